"""ZeRO inside the node by FSDP2, one-bit traffic between nodes: plain functions on a plain model.

    grid = onebit.zero.grid.start()
    fsdp.shard(model, grid, stage=2, dtype=torch.bfloat16)
    groups = {"transport": grid.transport, "model_parallel_group": grid.model_parallel_group}
    optimizer = onebit.OnebitAdam(model.parameters(), **groups)
    for k, batch in enumerate(micro_batches):
        fsdp.begin_micro_batch(model, stage=2, is_last=k == len(micro_batches) - 1)
        (loss_of(model, batch) / len(micro_batches)).backward()
    optimizer.step()

FSDP2 averages gradients over the shards of a replica, in full precision, and leaves on each rank the node's mean for
its own shard; it does not know other replicas. The optimizer works on that shard in place, and does all traffic between
replicas. Built on torch.distributed.fsdp and `grid.py`.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from ...comm import torch_versions
from ..grid import Grid
from ..offload.layout import kept
from ..pipeline.layers import parts_of
from . import leaves
from .sharding import Sharding, ZeroGrad
from .turns import count_passes, forget_uses, groups_of, passes_of, stand_in, take_turns

STAGES = (1, 2, 3)
_CALLED_BY_LIBRARIES = "generate"  # of transformers' models: it runs an encoder by itself, before any forward pass


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
    whole: Collection[Tensor] = (),
    methods: Iterable[str] = (),
) -> nn.Module:
    """Shard a model over the grid's shard axis, in place. All ranks call it, before the optimizer is made.

    Parameters become DTensors: a rank holds the rows of its shard, or none if a parameter has fewer rows than there are
    shards.

    Args:
        model: The model, the same on all ranks.
        grid: The grid of ranks, from `onebit.zero.grid.start`.
        stage: The ZeRO stage: 1, 2 or 3; see the module docstring.
        dtype: The dtype to compute in (torch.bfloat16, torch.float16). Trained parameters then become float32 masters,
            and gradients are reduced in float32; frozen parameters keep their dtype. None (default) for no change.
        blocks: Modules that are gathered one at a time; everything else is gathered with the root. None (default) for
            `blocks_of`.
        offload: Whether shards, gradients and optimizer state are in host memory, where the optimizer updates them;
            False by default. The grid needs a backend for host tensors.
        ratio: With offload, the share of the model's elements to keep in host memory, at least: those of the root and
            of the last blocks. 1 by default.
        pin_memory: Whether offloaded memory is page-locked if there is CUDA; True by default.
        whole: Parameters that stay whole, and whose gradients are not reduced; none by default.
        methods: Names of the model's methods that gather as forward does; none by default. Its generate() always does.

    Returns:
        The model.

    Raises:
        ValueError: The stage is not 1, 2 or 3.
        ImportError: torch is older than 2.7.
    """
    if stage not in STAGES:
        raise ValueError(
            f"stage must be 1, 2 or 3, got {stage!r}; at stage 0 nothing is sharded: give the optimizer the plain model"
        )
    torch_versions.require_fsdp2()
    for p in model.parameters() if dtype is not None else ():
        if p.is_floating_point() and p.requires_grad and p not in whole:
            p.data = p.data.float()  # safe: no optimizer holds them yet, and FSDP2 replaces them anyway
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    options: dict[str, Any] = {"mesh": grid.mesh["shard"], "mp_policy": policy, "ignored_params": set(whole)}
    found = blocks_of(model) if blocks is None else blocks
    modules = [model, *(block for block in found if any(p not in whole for p in block.parameters()))]
    policies = [OffloadPolicy()] * len(modules)
    if offload and ratio > 0.0:
        away = CPUOffloadPolicy(pin_memory=pin_memory and torch.cuda.is_available())
        near = _kept_blocks(modules, ratio)
        policies = [away if k == 0 or k > near else policy for k, policy in enumerate(policies)]
    for block, offloaded in zip(modules[1:], policies[1:], strict=True):
        fully_shard(block, reshard_after_forward=stage == 3, offload_policy=offloaded, **options)
    # Never reshard the root after its forward pass: backward begins with it. At stage 3 that is FSDP2's default.
    resharding = torch_versions.reshard_by_default() if stage == 3 else False
    fully_shard(model, reshard_after_forward=resharding, offload_policy=policies[0], **options)
    for module in modules:
        _keep_name(module)
    count_passes(model, modules)
    if grid.shape.size("shard") > 1:
        take_turns(model, modules, grid.transports["shard"], stage)
    for name in {*methods, *([_CALLED_BY_LIBRARIES] if hasattr(model, _CALLED_BY_LIBRARIES) else [])}:
        register_fsdp_forward_method(model, name)
    model.zero_grad = partial(zero_grad, model)  # type: ignore[method-assign]
    return model


def _keep_name(module: nn.Module) -> None:
    """Give the class that FSDP2 has made for a module the name of the module's own.

    Libraries look it up: transformers' Trainer shifts the labels of a causal language model by the name of its class.
    """
    made, own = type(module), type(module).__bases__[-1]
    made.__name__, made.__qualname__ = own.__name__, own.__qualname__


def refused(model: nn.Module) -> set[Tensor]:
    """The parameters that FSDP2 does not shard: scalars, empty, complex ones, those whose rows are not contiguous."""
    return {p for p in model.parameters() if p.dim() == 0 or 0 in p.shape or p.is_complex() or not p.is_contiguous()}


def _kept_blocks(modules: Sequence[nn.Module], ratio: float) -> int:
    """How many of the first blocks stay on the device. modules: the root, followed by the blocks."""
    model, *blocks = modules
    numels = [sum(p.numel() for p in block.parameters()) for block in blocks]
    return min(len(blocks), kept([*numels, sum(p.numel() for p in model.parameters()) - sum(numels)], ratio))


def bring_near(model: nn.Module, device: torch.device) -> None:
    """Move blocks that were filled in host memory, but are not offloaded, to the computing device."""
    for module in model.modules():
        if any(not isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups_of(module)):
            module._apply(lambda x: x.to(device))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the elements of its outermost ModuleLists and Sequentials.

    An element without a forward pass, as a ModuleDict, is a list of layers itself. A leaf module is one block.

    Only those with parameters, none of which is used elsewhere: tied weights belong to the root.
    """
    found = [block for block in _elements(model) if block is not model and any(True for _ in block.parameters())]
    inside = {module for block in found for module in block.modules()}
    outside = {p for m in model.modules() if m not in inside for p in m.parameters(recurse=False)}
    holders = Counter(p for block in found for p in block.parameters())
    return [block for block in found if all(holders[p] == 1 and p not in outside for p in block.parameters())]


def _elements(module: nn.Module, is_listed: bool = False) -> Iterator[nn.Module]:
    has_forward = type(module).forward is not nn.Module.forward  # FSDP2 gathers in its hooks
    if (is_listed and has_forward) or leaves.is_leaf(module):
        if has_forward:  # else its parameters are gathered with the block around it
            yield module
        return
    is_list = is_listed or isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module._modules.values() if is_list else module.children():  # a layer twice in a list comes twice
        if child is not None:
            yield from _elements(child, is_list)


def begin_micro_batch(model: nn.Module, stage: int, *, is_last: bool) -> None:
    """Tell FSDP2 before each forward pass whether it is the last of the step. Not needed if a step has only one.

    At stage 1 gradients add up unsharded, and are reduced with the last micro-batch; at stages 2 and 3 with each.
    Stages 1 and 2 keep the gathered parameters until the last backward pass: until then model.parameters() are these,
    not the optimizer's. At stage 1 an optimizer's zero_grad() does not clear what has added up; model.zero_grad() does.

    Args:
        model: A model that `shard` has sharded.
        stage: Its stage.
        is_last: Whether this is the step's last micro-batch.
    """
    root = _root(model)
    root.set_requires_gradient_sync(is_last or stage != 1)
    root.set_reshard_after_backward(is_last or stage == 3)
    root.set_is_last_backward(is_last)


def reduce_each(model: nn.Module, stage: int) -> None:
    """Reduce gradients with each micro-batch, at stages 2 and 3, if other forward passes come in between (a pipeline).

    Call `reshard` after the last micro-batch: stage 2 keeps the gathered parameters until then.
    """
    root = _root(model)
    root.set_requires_gradient_sync(True)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(stage == 3)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after a forward pass without a backward pass, as in an evaluation.

    Call it before anything changes the parameters or reads model.parameters(): `optimizer.sync()`, loading, saving.
    """
    sharded = [m for part in (model, *getattr(model, "parts", ())) for m in part.modules() if isinstance(m, FSDPModule)]
    if not sharded:
        _root(model)
    for module in sharded:
        module.reshard()


def zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """Drop all gradients of a sharded model, also those not reduced yet. `shard` makes it model.zero_grad.

    torch's own sees only the gathered or only the sharded parameters, whichever are in the model at the time.
    """
    drop_unreduced(model)
    for p in _parameters(model):
        p.sharded_param.grad = None


def drop_unreduced(model: nn.Module) -> None:
    """Drop gradients that FSDP2 has not reduced yet, which an optimizer's zero_grad() does not reach."""
    forget_uses(model)
    for p in _parameters(model):
        torch_versions.forget_accumulated(p)
        if hasattr(p, "_unsharded_param"):
            p.unsharded_param.grad = None


def sharded_of(model: nn.Module, p: Tensor) -> Tensor:
    """The shard of a parameter that FSDP2 has gathered; any other parameter itself."""
    return next((own.sharded_param for own in _parameters(model) if getattr(own, "_unsharded_param", None) is p), p)


def _parameters(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters, the only way to gradients that are not reduced yet."""
    for module in model.modules():
        for group in groups_of(module):
            yield from group.fsdp_params


def _root(model: nn.Module) -> FSDPModule:
    if not isinstance(model, FSDPModule):
        raise TypeError(f"expected a model that went through onebit.zero.fsdp.shard, got {type(model).__name__}")
    return model


class FullyShard(Sharding):
    """FSDP2 at stage 3 over a model that went through `shard`, as the engine drives it.

    Args:
        model: The model, or this rank's stages of a pipeline.
        rest: Divides gradients and state of parameters that stayed whole. Default None: there are none.
    """

    divides_parameters = True
    reduces_in_pipeline = True

    def __init__(self, model: nn.Module, rest: Sharding | None = None):
        super().__init__(model)
        self._rest = Sharding(model) if rest is None else rest
        self.held = self._rest.held

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        self._rest.keep(optimizer)
        self.held = self._rest.held
        self.model.zero_grad = ZeroGrad(self)  # type: ignore[method-assign]

    @property
    def scalars(self) -> Mapping[str, Tensor]:
        return self._rest.scalars

    def backward(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._rest.backward(is_last=is_last)

    def reduce(self, *, is_last: bool) -> float:
        return self._rest.reduce(is_last=is_last)

    def gather(self) -> None:
        self._rest.gather()

    def adopt(self) -> None:
        self._rest.adopt()

    def trained(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        return self._rest.trained(optimizer)

    def begin_forward(self, *, is_last: bool) -> None:
        begin_micro_batch(self.model, 3, is_last=is_last)

    def begin_pipeline(self, *, reduces_each: bool) -> None:
        for part in parts_of(self.model) if reduces_each else ():
            reduce_each(part, 3)

    @property
    def passes(self) -> int:
        return passes_of(self.model)

    def stand_in(self, *, is_last: bool) -> None:
        self.begin_forward(is_last=is_last)
        stand_in(self.model)

    def release(self) -> None:
        reshard(self.model)

    def drop_gradients(self) -> None:
        for part in parts_of(self.model):
            zero_grad(part)
        self._rest.drop_gradients()

    def resident(self, p: Tensor) -> Tensor:
        for part in parts_of(self.model):
            p = sharded_of(part, p)
        return p

    def shard_of(self, p: Tensor) -> Tensor:
        return self._rest.shard_of(p)
