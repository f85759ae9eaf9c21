"""FSDP2 for ranks that use different parts of a model: collectives in one order, and zeros for what a rank left out.

FSDP2 gathers a module's parameters when it runs, and reduces the gradients that exist. If two ranks run different
experts, each takes part in the other's collective, and if their sizes agree, parameters and gradients of different
modules are silently mixed. `take_turns` makes a parameter without a gradient on this rank count as one with a zero
gradient:

1. At stages 1 and 2 gathers go through the modules in one order. A rank that needs the fifth gathers the first four
   too, and after the model's forward pass the rest. Everything stays gathered until backward, as it does without this.
2. A module's gradients are reduced once per backward pass, after its last use and in reverse order; modules that this
   rank did not run are reduced at the end.
3. Before each reduction the ranks tell which gradients they have: one bit per parameter, sent without waiting. A rank
   that lacks one waits for the answer, and makes zeros for what others have. A parameter that no rank has a gradient
   for stays without one.
4. Stage 3 gathers module by module and keeps none, so all ranks must run the same modules in the same order (experts
   within them may differ). They compare before each collective; a DesyncError on all ranks names which rank runs what.
5. A rank whose loss does not depend on the model (an empty batch) has no backward pass that could do all this.
   `stand_in` walks through the modules instead, also forwards if the model did not run.

Depends on `unshard`, `pre_forward`, `post_forward`, `pre_backward`, `post_backward`, `_backward_prefetch` and the final
callback of FSDP2, which are not public; `comm/torch_versions.py` has what changed between versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...agreement.step_vote import DesyncError
from ...comm import Transport, Work, torch_versions

_GATHER, _REDUCE = 0, 1
_HEADER_BYTES = 3


def groups_of(module: nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it gathers with this module; empty for modules without FSDP2."""
    if not isinstance(module, FSDPModule):
        return []
    return torch_versions.fsdp_groups(module._get_fsdp_state())


def take_turns(model: nn.Module, modules: Sequence[nn.Module], transport: Transport, stage: int) -> None:
    """Make FSDP2's collectives of a sharded model wait for their turns. All ranks of the shards call it, once.

    A backward pass that reduces then sends one bit per parameter and 3 bytes per module to each peer. At stage 3 every
    gather sends as much, and waits for it unless the transport serves only CUDA.

    Args:
        model: The sharded model.
        modules: The modules that went through fully_shard, the root first, preferably in the order in which they run.
        transport: The transport between the shards.
        stage: The ZeRO stage.
    """
    model._onebit_turns = _Turns(model, modules, transport, stage)  # type: ignore[assignment]


def stand_in(model: nn.Module) -> None:
    """Stand in for the backward pass of a loss that does not depend on the model: its gradients are zero.

    Runs all collectives of the other ranks' forward and backward passes in their order; at stage 3 as if the modules
    ran in the order in which `take_turns` got them. Gradients that had added up before are kept.
    """
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    state._lazy_init()
    turns: _Turns | None = getattr(model, "_onebit_turns", None)
    if turns is not None:
        turns.walk()
    state._root_post_backward_final_callback()


def passes_of(model: nn.Module) -> int:
    """How many backward passes went through this model, including `stand_in`; 0 if only parts of it were sharded."""
    return getattr(model, "_onebit_passes", 0)


def count_passes(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Count backward passes for `passes_of`. Call it once, before `take_turns`, with the modules of fully_shard."""
    model._onebit_passes = 0  # type: ignore[assignment]

    def end_backward(own: Callable[[], None]) -> None:
        model._onebit_passes = passes_of(model) + 1  # type: ignore[assignment]
        own()

    for module in modules:  # any of them may be the first that a backward pass reaches, which ends it
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        state._root_post_backward_final_callback = partial(end_backward, state._root_post_backward_final_callback)


def forget_uses(model: nn.Module) -> None:
    """Forget forward passes without a backward pass, which will not have one any more."""
    turns = getattr(model, "_onebit_turns", None)
    if turns is not None:
        turns.uses = [0] * len(turns.groups)


class _Turns:
    """uses: forward passes of each group whose backward pass is still to come. A group's number is its turn."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], transport: Transport, stage: int):
        self.groups = [group for module in modules for group in groups_of(module)]
        self._roots = len(groups_of(modules[0]))
        self.uses = [0] * len(self.groups)
        self._transport, self._stage = transport, stage
        self._device = transport.device
        self._ready = [False] * len(self.groups)
        self._next = len(self.groups) - 1
        self._votes: list[Work] = []
        self._row_bytes = _HEADER_BYTES + -(-max(len(group.fsdp_params) for group in self.groups) // 8)
        self._own = [(group.unshard, group.pre_forward, group.post_backward) for group in self.groups]
        for k, group in enumerate(self.groups):
            group.unshard = partial(self._unshard, k)
            group.pre_forward = partial(self._pre_forward, k)
            group.post_backward = partial(self._post_backward, k)
            if stage < 3:  # all are gathered anyway, and FSDP2 could prefetch out of turn
                group._backward_prefetch = lambda: None
        for module in modules:
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            state._root_post_backward_final_callback = partial(
                self._end_backward, state._root_post_backward_final_callback
            )
        if stage < 3:
            model.register_forward_hook(lambda *_: self._gather_all())

    # ---------------------------------------------------------------- forward

    def _pre_forward(self, k: int, *args: object) -> object:
        self.uses[k] += torch.is_grad_enabled()
        return self._own[k][1](*args)

    def _unshard(self, k: int, async_op: bool = False) -> None:
        if not _is_gathered(self.groups[k]):
            if self._stage < 3:
                for earlier in range(k):
                    self._gather(earlier)
            elif self._device.type == "cpu":
                self._ask(_GATHER, k, [])
        self._own[k][0](async_op)

    def _gather(self, k: int) -> None:
        group = self.groups[k]
        if not _is_gathered(group):
            self._own[k][0](False)
            group.wait_for_unshard()

    def _gather_all(self) -> None:
        for k in range(len(self.groups)):
            self._gather(k)

    # ---------------------------------------------------------------- backward

    def _post_backward(self, k: int, *_: object) -> None:
        self.uses[k] -= self.uses[k] > 0
        if not self.groups[k].reduce_grads:
            self._own[k][2]()
        elif self._stage == 3:
            self._reduce(k)
        elif self.uses[k] == 0:
            self._ready[k] = True
            self._reduce_ready()

    def _end_backward(self, own: Any) -> None:
        """Give modules that have not had their turn their turn now."""
        if self._stage < 3:
            self._ready = [bool(group.reduce_grads) for group in self.groups]
            self._reduce_ready()
            self._ready, self._next = [False] * len(self.groups), len(self.groups) - 1
        own()
        for vote in self._votes:
            vote.wait()
        self._votes.clear()

    def _reduce_ready(self) -> None:
        while self._next >= 0 and self._ready[self._next]:
            if self._next == len(self.groups) - 1:
                self._gather_all()  # modules that this rank did not run
            self._reduce(self._next)
            self._next -= 1

    def _reduce(self, k: int) -> None:
        trained = [p for p in self.groups[k].fsdp_params if p.sharded_param.requires_grad]
        present = [_has_gradient(p) for p in trained]
        if trained:
            anywhere = self._ask(_REDUCE, k, present)
            for p, is_here, is_anywhere in zip(trained, present, anywhere, strict=True):
                if is_anywhere and not is_here:
                    x = p.unsharded_param
                    x.grad = torch.zeros_like(x, dtype=torch_versions.grad_dtype(x))
            torch_versions.accumulate_all(trained)
        self._own[k][2]()

    # ---------------------------------------------------------------- without a graph

    def walk(self) -> None:
        """Go forward (unless the model ran) and backward through the groups; the final callback does the rest."""
        if self._stage < 3:
            self._gather_all()
            return
        order: list[Any] = self.groups[0].comm_ctx.post_forward_order
        roots, blocks = self.groups[: self._roots], self.groups[self._roots :]
        if not any(self.uses):
            for group in roots:
                group.pre_forward(None, (), {})
            for group in blocks:
                group.pre_forward(None, (), {})
                group.post_forward(None, (), None)
            for group in roots:
                group.post_forward(None, (), None)
        for group in reversed(order[len(order) - sum(self.uses) :]):
            group.pre_backward(True)
            if group not in roots:  # whose turn is in the final callback
                group.post_backward()

    # ---------------------------------------------------------------- what ranks tell each other

    def _ask(self, kind: int, k: int, present: Sequence[bool]) -> Sequence[bool]:
        """Which of these gradients any rank has. Waits only if this rank lacks one, and at stage 3."""
        bits = sum(1 << j for j, is_here in enumerate(present) if is_here)
        row = bytes([kind]) + k.to_bytes(2, "little") + bits.to_bytes(self._row_bytes - _HEADER_BYTES, "little")
        row_B = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self._device)
        rows_WB = torch.empty(self._transport.world_size, len(row), dtype=torch.uint8, device=self._device)
        vote = self._transport.all_gather(rows_WB, row_B)
        compares = self._stage == 3 and self._device.type == "cpu"
        if all(present) and not compares:
            self._votes.append(vote)
            return present
        vote.wait()
        return self._anywhere(row, rows_WB, len(present))

    def _anywhere(self, mine: bytes, rows_WB: Tensor, count: int) -> list[bool]:
        rows = [bytes(row.tolist()) for row in rows_WB.cpu()]
        unlike = [rank for rank, row in enumerate(rows) if row[:_HEADER_BYTES] != mine[:_HEADER_BYTES]]
        if unlike:
            here, there = (self._describe(row) for row in (mine, rows[unlike[0]]))
            raise DesyncError(
                f"rank {self._transport.rank} of the shards {here}, rank {unlike[0]} {there}: at stage {self._stage} "
                "all ranks of a node must run the same blocks of the model in the same order; use stage 2, where "
                "they need not, or gather what they choose between as one: utils.set_z3_leaf_modules(model, [Class])"
            )
        bits = 0
        for row in rows:
            bits |= int.from_bytes(row[_HEADER_BYTES:], "little")
        return [bool(bits >> j & 1) for j in range(count)]

    def _describe(self, row: bytes) -> str:
        group = self.groups[int.from_bytes(row[1:_HEADER_BYTES], "little")]
        what = "gathers" if row[0] == _GATHER else "reduces the gradients of"
        return f"{what} {group.fsdp_params[0]._param_fqn} and its block"


def _is_gathered(group: Any) -> bool:
    return group.is_unsharded or group._all_gather_result is not None


def _has_gradient(p: Any) -> bool:
    if p.unsharded_accumulated_grad is not None:
        return True
    return hasattr(p, "_unsharded_param") and p.unsharded_param.grad is not None
