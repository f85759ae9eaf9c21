"""What a call raises: as text that goes from a rank to its test, or as the test expects it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Kinds = type[BaseException] | tuple[type[BaseException], ...]


def error_of(kinds: Kinds, call: Callable[..., object], *args: object, **named: object) -> str:
    """The type and the text of what the call raises; "" if nothing. What is none of these kinds is raised."""
    try:
        call(*args, **named)
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(kinds: Kinds, pattern: str, call: Callable[..., object], /, *args: object, **named: object) -> None:
    """Assert that the call raises one of these kinds, with a text that the pattern is found in."""
    __tracebackhide__ = True
    with pytest.raises(kinds, match=pattern):
        call(*args, **named)
