"""The registry of forms: chooses the form of a configuration on this grid, and builds it.

    local        Adam, AdamW, LaProp,     as dense inside a replica; between replicas `LocalSteps` exchanges differences
                 Lamb, local_steps        every N steps, and no gradients
    offloaded    the same, offload_param  as dense, with parameters in files; in checkpoints it is dense
    dense        the same                 as intra_node, with gradients averaged between replicas in float32; stage 0:
                                          as replicated
    replicated   stage 0, float32         the model as it is; a one-bit optimizer sends buckets during backward
    intra_node   stages 1 to 3, and any   shards over the ranks of a node (`parallel/`); a one-bit
                 stage in bf16 and fp16   optimizer on them, between nodes. Masters are float32, computing is in dtype
    untrained    no optimizer, or all     parameters in dtype; at stage 3 FSDP2's. Not chosen among the others: `build`
                 parameters frozen        takes it
    inter_node   stages 1 and 2           `sharded/`: sharding itself crosses the slow network, in one bit and four

To add a form, write a file in this folder with a class that implements `../form.py`, and a line in `FORMS`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from torch import nn

from ...agreement.replicas import make_equal, unequal_lines
from ...comm.launch import Launch
from ...model_parallel import local as held  # `local` is a module here
from ...usage.buffers import begin_equal
from ..config.schema import is_set
from ..config.whole import Config
from ..form import Form, Given
from ..grid import Grid, GridShape
from ..pipeline.run import Ties
from .dense import Dense
from .inter_node import InterNode
from .intra_node import IntraNode
from .local import Local
from .offloaded import Offloaded
from .replicated import Replicated
from .untrained import Untrained

log = logging.getLogger(__name__)

FORMS: tuple[type[Form], ...] = (
    Local,
    Offloaded,
    Replicated,
    Dense,
    IntraNode,
    InterNode,
)
"""All forms, in the order in which `choose` tries them."""


def choose(config: Config, shape: GridShape) -> type[Form]:
    """Return the first form that fits this grid, of those whose block is in the configuration. Pure.

    Args:
        config: The configuration.
        shape: Number of ranks along each axis.

    Raises:
        ValueError: No form fits.
    """
    for form in FORMS:
        if (not form.block or is_set(config, form.block)) and form.fits(config, shape):
            return form
    raise ValueError(
        f"no form fits this configuration on a grid of {shape}: there are {', '.join(f.name for f in FORMS)}"
    )


def shard_ranks(config: Config, launch: Launch) -> int:
    """Return the number of ranks along the shard axis, after the tensor axis has taken its ranks.

    These are the ranks of a node, or all ranks if gradients are averaged in full precision; at most those of a pipeline
    stage. 1 at stage 0 and in the form inter_node.

    Args:
        config: The configuration.
        launch: World size and ranks of a node, from the launcher.

    Raises:
        ValueError: onebit.tensor does not divide the ranks of a node.
    """
    if config.zero_optimization.stage == 0:
        return 1
    is_in_nodes = config.onebit.local_steps.is_on or (config.optimizer is not None and config.optimizer.is_one_bit)
    if is_in_nodes and config.onebit.sharding == "inter_node":
        return 1
    if config.onebit.ranks_per_node is None and config.zero_optimization.ranks_per_shard_group is not None:
        return config.zero_optimization.ranks_per_shard_group
    ranks, tensor = launch.local_size or 1 if is_in_nodes else launch.world_size, config.onebit.tensor or 1
    ranks = config.onebit.ranks_per_node or ranks
    if max(ranks, tensor) % min(ranks, tensor):
        raise ValueError(f"onebit.tensor: {tensor} ranks do not divide the {ranks} of a node; take a divisor of them")
    shards, stages = max(1, ranks // tensor), config.pipeline.ranks
    return shards if stages == 1 else math.gcd(shards, launch.world_size // (stages * tensor))


def _begin_equal(model: nn.Module, grid: Grid) -> None:
    """Give every rank the values of its stage's first rank, if they are not the same already. All ranks.

    If ranks have loaded the same file or used the same seed, only votes are sent. Raises ValueError, on all ranks, if
    names, shapes or dtypes of parameters differ.
    """
    lines = [f"{name}: {p.dtype} {tuple(p.shape)}" for name, p in model.named_parameters()]
    if problem := unequal_lines(grid.world, "the model's parameters", lines, stage=grid.coordinates["pipe"]):
        raise ValueError(problem)
    params = [p for p in model.parameters() if not p.is_meta]
    # Axis by axis: after the last one all ranks of a stage have the values of its first.
    for transport in (grid.transports[axis] for axis in ("tensor", "shard", "replica")):
        if transport.world_size > 1:
            make_equal(transport, [held(p) for p in params if held(p).numel() > 0])
            begin_equal(model, transport)


def build(given: Given) -> Form:
    """Send rank 0's values to all ranks, shard the model in place, and make its optimizer. All ranks.

    Args:
        given: The inputs from which the form is built.

    Raises:
        ValueError: No form fits, or the model does not fit the form or differs between ranks.
        TypeError: A parameter has a dtype that does not fit the form.
    """
    config, grid, model = given.config, given.grid, given.model
    # A pipeline's stages differ in what they train, and must take the same form.
    is_frozen = grid.shape.size("pipe") == 1 and not any(p.requires_grad for p in model.parameters())
    has_optimizer = given.make is not None or config.optimizer is not None
    form = choose(config, grid.shape) if has_optimizer and not is_frozen else Untrained
    form.check(given)
    if grid.world.rank == 0:
        if has_optimizer and is_frozen:
            log.warning(
                "no parameter requires gradients: the optimizer has nothing to train, and backward() is refused"
            )
        for warning in form.without_effect(config, grid.shape):
            log.warning("%s", warning)
    # Before sharding, after which a rank has only parts to compare.
    _begin_equal(model, grid)
    if grid.shape.size("pipe") > 1:
        ties = Ties(model, grid)
        if given.fill is None:
            ties.equalise()
        given = replace(given, ties=ties)
    return form.build(given)
