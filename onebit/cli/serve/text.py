"""Tokens to text while they come: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"
"""What a decoder writes for bytes that are no character yet."""

_MOST_BEFORE = 8
"""Tokens among which the last whole character of a prompt is looked for."""


class Text:
    """The text of an answer, piece by piece.

    Attributes:
        is_stopped: A stop string has come; the text ends before it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), after: Sequence[int] = ()):
        """
        Args:
            decode: Tokens to text.
            stops: Strings that end the text.
            after: The tokens of a text that goes on in this one. Decoders treat a beginning in another way: those of
                Llama drop its space. Default (): the text is one of its own.
        """
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        ends = (list(after[-n:]) for n in range(1, min(len(after), _MOST_BEFORE) + 1))
        self._before = next((end for end in ends if (text := decode(end)) and HALF not in text), [])
        self._skipped = len(decode(self._before)) if self._before else 0
        self._given = 0
        self.is_stopped = False

    def piece(self, tokens: list[int], *, is_last: bool) -> str:
        """What the tokens add to the pieces so far.

        A last character that may be half, and an end that may begin a stop string, wait for the next piece, unless it
        is the last one.
        """
        if self.is_stopped:
            return ""
        whole = self._decode(self._before + tokens)[self._skipped :]
        if found := [at for stop in self._stops if (at := whole.find(stop)) >= 0]:
            self.is_stopped, whole = True, whole[: min(found)]
        elif not is_last:
            whole = whole.rstrip(HALF)
            whole = whole[: len(whole) - max((self._begun(whole, stop) for stop in self._stops), default=0)]
        piece = whole[self._given :]
        self._given = max(self._given, len(whole))
        return piece

    @staticmethod
    def _begun(whole: str, stop: str) -> int:
        """How many characters at the end of the text begin the stop string."""
        return next((n for n in range(min(len(stop) - 1, len(whole)), 0, -1) if whole.endswith(stop[:n])), 0)
