"""ZeRO inside the node by FSDP2, one-bit traffic between nodes: plain functions on a plain model.

    grid = onebit.zero.grid.start()
    fsdp.shard(model, grid, stage=2, dtype=torch.bfloat16)
    groups = {"transport": grid.transport, "model_parallel_group": grid.model_parallel_group}
    optimizer = onebit.OnebitAdam(model.parameters(), **groups)
    for k, batch in enumerate(micro_batches):
        fsdp.begin_micro_batch(model, stage=2, is_last=k == len(micro_batches) - 1)
        (loss_of(model, batch) / len(micro_batches)).backward()
    optimizer.step()

FSDP2 averages gradients over the shards of a replica, in full precision, and leaves on each rank the mean over its node
for its own shard; it knows nothing of other replicas. The optimizer works on that shard, where it lies, and does all
traffic between replicas. Rests on torch.distributed.fsdp and `grid.py`.

What each stage holds on a rank, of a model of P parameters over S shards, and what its node's network carries for a
step of k micro-batches:

    stage  parameters  gradients            optimizer state  gathered     reduced
    1      P           P while it adds up   1/S              once         once, with the last micro-batch
    2      P           1/S                  1/S              once         k times
    3      P/S         1/S                  1/S              2k times     k times

Ranks may use different parts of the model: what one leaves out counts as a zero gradient there (`turns.py`).

At k = 1 stages 1 and 2 are one and the same. What the replicas send to each other is the same at every stage: one
exchange per step. To save stage 2 and 3 the reductions, call `begin_micro_batch` with stage=1: gradients then add up
unsharded, in float32 where dtype was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ..grid import Grid
from ..offload.layout import kept
from .turns import count_passes, forget_uses, groups_of, take_turns

STAGES = (1, 2, 3)


def shard(
    model: nn.Module,
    grid: Grid,
    stage: int,
    *,
    dtype: torch.dtype | None = None,
    blocks: Iterable[nn.Module] | None = None,
    offload: bool = False,
    ratio: float = 1.0,
    pin_memory: bool = True,
) -> nn.Module:
    """Shard a model over the grid's shard axis, in place, and return it. All ranks, before its optimizer is made.

    stage: 1, 2 or 3; see the module docstring. dtype: compute in it (torch.bfloat16, torch.float16); the parameters
    are float32 masters, which those of another dtype become, and gradients are reduced in float32. What requires no
    gradient keeps its dtype: the base under LoRA adapters takes what its files do. blocks: modules
    that are gathered one at a time (default: `blocks_of`); what is in none of them is gathered with the root.
    offload: shards, their gradients and the optimizer's state live in host memory, where the optimizer steps on
    them; the grid needs a backend for host tensors. ratio: those of the last blocks and the root alone, which have this
    share of the model's elements or more; the others stay on the device. pin_memory: page-locked, where there is CUDA.

    Parameters become DTensors: a rank holds the rows of its shard, or none where a parameter has fewer rows than there
    are shards. Raises ValueError for another stage.
    """
    if stage not in STAGES:
        raise ValueError(
            f"stage must be 1, 2 or 3, got {stage!r}; at stage 0 nothing is sharded: give the optimizer the plain model"
        )
    for p in model.parameters() if dtype is not None else ():
        if p.is_floating_point() and p.requires_grad:
            p.data = p.data.float()  # no optimizer knows them yet: FSDP2 replaces them in any case
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    options: dict[str, Any] = {"mesh": grid.mesh["shard"], "mp_policy": policy}
    modules = [model, *(blocks_of(model) if blocks is None else blocks)]
    policies = [OffloadPolicy()] * len(modules)
    if offload and ratio > 0.0:
        away = CPUOffloadPolicy(pin_memory=pin_memory and torch.cuda.is_available())
        near = _kept_blocks(modules, ratio)
        policies = [away if k == 0 or k > near else policy for k, policy in enumerate(policies)]
    for block, offloaded in zip(modules[1:], policies[1:], strict=True):
        fully_shard(block, reshard_after_forward=stage == 3, offload_policy=offloaded, **options)
    # The root is never resharded after its forward pass: backward begins with it. At stage 3 that is FSDP2's default.
    fully_shard(model, reshard_after_forward=None if stage == 3 else False, offload_policy=policies[0], **options)
    count_passes(model, modules)
    if grid.shape.size("shard") > 1:
        take_turns(model, modules, grid.transports["shard"], stage)
    model.zero_grad = partial(zero_grad, model)  # type: ignore[method-assign]
    return model


def _kept_blocks(modules: Sequence[nn.Module], ratio: float) -> int:
    """How many of the first blocks stay on the device. modules: the root, then the blocks."""
    model, *blocks = modules
    numels = [sum(p.numel() for p in block.parameters()) for block in blocks]
    return min(len(blocks), kept([*numels, sum(p.numel() for p in model.parameters()) - sum(numels)], ratio))


def bring_near(model: nn.Module, device: torch.device) -> None:
    """What was filled in host memory, of blocks whose shards are not offloaded, to the device that computes."""
    for module in model.modules():
        if any(not isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups_of(module)):
            module._apply(lambda x: x.to(device))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, as far as it says so: the elements of its outermost ModuleLists and Sequentials.

    Those that hold parameters, and no parameter that another of them shares: tied weights belong to the root.
    """
    found = [block for block in _elements(model) if any(True for _ in block.parameters())]
    inside = {module for block in found for module in block.modules()}
    outside = {p for m in model.modules() if m not in inside for p in m.parameters(recurse=False)}
    holders = Counter(p for block in found for p in block.parameters())
    return [block for block in found if all(holders[p] == 1 and p not in outside for p in block.parameters())]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        yield from module
        return
    for child in module.children():
        yield from _elements(child)


def begin_micro_batch(model: nn.Module, stage: int, *, is_last: bool) -> None:
    """Say before each forward pass whether its gradients complete the step's. Not needed where a step has one.

    Stage 1: gradients add up unsharded, and are reduced with the last micro-batch. Stages 2 and 3: they are reduced
    each time. Stages 1 and 2 keep the gathered parameters until the last backward pass is over: until then
    model.parameters() are these, not the optimizer's. At stage 1 an optimizer's zero_grad() does not reach what has
    added up; the model's does.
    """
    root = _root(model)
    root.set_requires_gradient_sync(is_last or stage != 1)
    root.set_reshard_after_backward(is_last or stage == 3)
    root.set_is_last_backward(is_last)


def reduce_each(model: nn.Module, stage: int) -> None:
    """Stages 2 and 3, where forward passes of other micro-batches come in between (a pipeline): reduce with each.

    After the last micro-batch call `reshard`: stage 2 keeps the gathered parameters until then.
    """
    root = _root(model)
    root.set_requires_gradient_sync(True)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(stage == 3)


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: after a forward pass that no backward pass follows, as in an evaluation.

    Before anything else changes them or reads model.parameters(): `optimizer.sync()`, loading, saving.
    """
    sharded = [m for part in (model, *getattr(model, "parts", ())) for m in part.modules() if isinstance(m, FSDPModule)]
    if not sharded:
        _root(model)
    for module in sharded:
        module.reshard()


def zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """Drop all gradients of a sharded model, those that have not been reduced too. `shard` makes it model.zero_grad.

    torch's sees either the gathered parameters or the sharded ones, whichever are in the model now.
    """
    drop_unreduced(model)
    for p in _parameters(model):
        p.sharded_param.grad = None


def drop_unreduced(model: nn.Module) -> None:
    """Drop what micro-batches have left and FSDP2 has not reduced: what an optimizer's zero_grad() does not reach."""
    forget_uses(model)
    for p in _parameters(model):
        p.unsharded_accumulated_grad = None
        if hasattr(p, "_unsharded_param"):
            p.unsharded_param.grad = None


def sharded_of(model: nn.Module, p: Tensor) -> Tensor:
    """The shard of a parameter that FSDP2 has gathered, or what was given."""
    return next((own.sharded_param for own in _parameters(model) if getattr(own, "_unsharded_param", None) is p), p)


def _parameters(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters: it has no other name for gradients that are not reduced."""
    for module in model.modules():
        for group in groups_of(module):
            yield from group.fsdp_params


def _root(model: nn.Module) -> FSDPModule:
    if not isinstance(model, FSDPModule):
        raise TypeError(f"expected a model that went through onebit.zero.fsdp.shard, got {type(model).__name__}")
    return model
