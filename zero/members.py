"""The engine in a run whose members come and go (`onebit.membership`): each member has the whole model.

    members = onebit.membership.connect()
    engine, *_ = onebit.zero.initialize(model=model, config=config, grid=onebit.zero.members.grid_of(members))
    onebit.zero.members.begin(engine, sampler=sampler)

To the engine a member is a world of one rank, at stage 0, or of the ranks of a node, which divide the model:

    node = onebit.zero.grid.start()
    members = onebit.membership.connect(node=node.world)
    ... grid=onebit.zero.members.grid_of(members, node)

So nothing of it depends on the other members; its optimizer exchanges with them. A newcomer takes over the engine's
counts, schedule and features besides the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .. import membership
from ..comm import SimTransport
from ..membership.members import Members, Travels
from ..model_parallel import model_parallel_group_of
from .engine import Engine
from .grid import AXES, Grid, GridShape

_COUNTS = ("global_steps", "skipped_steps", "global_samples")


def grid_of(members: Members, node: Grid | None = None) -> Grid:
    """The grid of an engine over these members, for `initialize(grid=)`. Sizes of batches are those of one member.

    Args:
        members: From `onebit.membership.connect`.
        node: The grid of this member's ranks, if it has several, whose transport between all ranks `connect` got:
            `zero.grid.start()` under torchrun on this machine alone. Default None: it has one rank.

    Raises:
        ValueError: The grid has other ranks than the member, or replicas.
    """
    if node is not None:
        if node.shape.size("replica") > 1:
            raise ValueError(f"the replicas of a run with members are its members; this node's grid has {node.shape}")
        return replace(node, transport=members, model_parallel_group=members.parts(node.model_parallel_group))
    alone = SimTransport()
    shape = GridShape(tuple(1 for _ in AXES))
    return Grid(shape, None, alone, dict.fromkeys(AXES, alone), members, model_parallel_group_of(None), alone)


def begin(engine: Engine, *, warm_up: Callable[[], object] | None = None, **travels: Travels) -> None:
    """Enter the run with an engine over `grid_of`. Args and errors as `onebit.membership.begin`; all members.

    Args:
        engine: Before its first step. One that has loaded a checkpoint gives its state to the other founders.
        warm_up: As there, with `engine.backward`; without `engine.step`. Default None.
        travels: Other objects whose state a newcomer gets, such as a sampler. The schedule and the counts of the engine
            are among them already.
    """
    if engine.scheduler is not None:
        travels["engine_schedule"] = engine.scheduler
    warmed = None if warm_up is None else partial(_warm_up, engine, warm_up)
    membership.begin(engine.optimizer, warm_up=warmed, engine=_Counts(engine), **travels)  # type: ignore[arg-type]
    engine.form.sharding.gather()  # the optimizer's parameters may be those of others now


def _warm_up(engine: Engine, warm_up: Callable[[], object]) -> None:
    warm_up()
    engine.zero_grad()


class _Counts:
    """The engine's counts, and the states of its features."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        features = {name: value for feature in engine.active_features for name, value in feature.state().items()}
        before = engine.micro_steps - engine.micro_steps_of_step  # the step under way is the newcomer's, too
        return {"features": features, "micro_steps": before, **{name: getattr(engine, name) for name in _COUNTS}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        engine = self._engine
        engine.micro_steps = state_dict["micro_steps"] + engine.micro_steps_of_step
        for name in _COUNTS:
            setattr(engine, name, state_dict[name])
        for feature in engine.active_features:
            feature.load_state(engine, state_dict["features"])
