"""The block "local_steps" of the block "onebit": rounds of differences instead of gradients in every step.

    "onebit": {"local_steps": {"every": 32, "start_steps": 200, "codec": "sign"}}

Keys and defaults are the arguments of `onebit.LocalSteps`. `every` is a number; "auto"; a table, {"0": 4, "1000": 32};
a `QSR`, {"scale": 0.01, "least": 8, "most": 64}; or an `Auto` of other bounds, {"share": 0.1, "least": 4, "most": 32}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...comm import CODECS
from ...local.intervals import QSR, Auto, Every, interval_of
from .reader import nearest
from .schema import EVERY, FLOAT, INT, TEXT, Block, Key, as_json, changed, key

_QSR = {"scale": Key(FLOAT, above=0), "least": Key(INT, least=1), "most": Key(INT, least=1)}
_AUTO = {"share": Key(FLOAT, above=0, most=1), "least": Key(INT, least=1), "most": Key(INT, least=1)}


@dataclass(frozen=True)
class LocalRounds(Block):
    """Local steps around the dense optimizer. every: steps between rounds; 0: none, gradients travel in every step.

    codec: codec of differences; "fp32": in full. The other keys are arguments of `onebit.LocalSteps`; options that all
    optimizers share (block, bucket_cap_mb, error_dtype, check_replicas_every, max_consecutive_skips) are in the block
    "onebit" itself.
    """

    every: object = key(0, EVERY, required=True)
    start_steps: int = key(0, INT, least=0)
    start_every: int = key(4, INT, least=1)
    outer_lr: float = key(1.0, FLOAT, above=0, most=10)
    outer_momentum: float = key(0.0, FLOAT, least=0, below=1)
    error_decay: float = key(1.0, FLOAT, above=0, most=1)
    codec: str = key("sign", TEXT, choices=tuple(CODECS))
    fragments: int = key(1, INT, least=1)
    delay: int = key(0, INT, least=0)
    correction_steps: int = key(0, INT, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_on:
            if others := changed(self):
                raise ValueError(f"{others[0]} is set, but every is 0: no local steps; write how many, or drop both")
            return
        smallest = interval_of(self.interval()).smallest
        if self.start_steps:
            smallest = min(smallest, self.start_every)
        if self.delay >= smallest:
            raise ValueError(
                f"a round every {smallest} steps cannot land delay={self.delay} steps after it was sent; lower delay, "
                "or raise every (its least interval, and start_every)"
            )

    @property
    def is_on(self) -> bool:
        """Whether the file asks for local steps."""
        return self.every != 0

    def interval(self) -> Every:
        """`every` for `LocalSteps`: a new object each time, because an `Auto` remembers its measurement.

        Raises TypeError or ValueError.
        """
        if not isinstance(self.every, Mapping):
            return cast("int | str", self.every)
        if self.every and all(name.isdecimal() for name in self.every):
            return {int(first): cast(int, _STEPS.read(n, f"every.{first}")) for first, n in self.every.items()}
        if "scale" in self.every:
            return QSR(**_read(self.every, _QSR))
        return Auto(**_read(self.every, _AUTO))


_STEPS = Key(INT, least=1)


def _read(given: Mapping[str, object], known: Mapping[str, Key]) -> dict[str, Any]:
    """The arguments of an interval. Raises ValueError on an unknown name."""
    for name in given:
        if name not in known:
            found = nearest(name, {*_QSR, *_AUTO})
            advice = f"did you mean {as_json(found)}?" if found and found != name else f"known here: {', '.join(known)}"
            raise ValueError(f"every: unknown key {as_json(name)}; {advice}")
    if not given:
        raise ValueError('every: {} says no interval; write a number of steps, or "auto"')
    return {name: known[name].read(value, f"every.{name}") for name, value in given.items()}
