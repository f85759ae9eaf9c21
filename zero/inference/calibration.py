"""GPTQ (Frantar et al., 2022, arXiv 2210.17323): matrices in int4, rounded for the inputs that samples give them.

Rounding to nearest keeps each weight. GPTQ keeps a layer's outputs: it rounds the weights of one input after the
other, and moves those that are not rounded yet to make up for the error. `gptq` is the paper's Algorithm 1 for one
matrix, `calibrate` takes a model's blocks in turn, and `Passes` computes no more of the model than a block needs. No
library does this for torch's int4 product on a CPU: `docs/inference.md`, "Calibration".

Shape legend: N outputs, K inputs, g inputs of a group, J groups, T tokens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...agreement.replicas import fingerprints
from ...comm import Transport
from ...comm.messages import gather_texts, raise_on_all_ranks
from ..parallel.model_plan import patterns
from .layers import serve_packed, tables_of, weight_of
from .packed import Groups, group_range, group_size, nearest

log = logging.getLogger(__name__)

Batch = Tensor | Mapping[str, Any]
"""Tokens [B, T], or the model's keywords."""
DAMPING = 0.01
"""Added to the Hessian's diagonal, in means of it."""


def gptq(weight_NK: Tensor, hessian_KK: Tensor) -> Groups:
    """A matrix in int4 that keeps W·x for the inputs x of which the Hessian is the sum Σ x·xᵀ. Computed in float32.

    The paper's factor of 2 cancels. The weights of an input that is always zero are rounded to nearest.
    """
    K = weight_NK.shape[1]
    group = group_size(K)
    H_KK = hessian_KK.clone()
    diagonal_K = H_KK.diagonal()
    damping = DAMPING * diagonal_K.mean()
    diagonal_K[diagonal_K == 0] = 1
    diagonal_K += damping
    # U is upper with UᵀU = H⁻¹. Without H⁻¹, which loses digits: H = R·Rᵀ, R upper, and U = R⁻¹.
    R_KK = torch.linalg.cholesky(H_KK.flip(0, 1)).flip(0, 1)
    U_KK = torch.linalg.solve_triangular(R_KK, torch.eye(K, dtype=torch.float32, device=R_KK.device), upper=True)
    w_KN = weight_NK.t().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    q_KN, scales, zeros = torch.empty_like(w_KN), [], []
    for start in range(0, K, group):
        end = min(start + group, K)
        scale_N, zero_N = group_range(w_KN[start:end].t())
        error_gN = torch.empty_like(w_KN[start:end])
        for k in range(start, end):
            q_KN[k] = nearest(w_KN[k], scale_N, zero_N)
            error_gN[k - start] = (w_KN[k] - (q_KN[k] - 8) * scale_N - zero_N) / U_KK[k, k]
            w_KN[k:end] -= U_KK[k, k:end, None] * error_gN[k - start]
        w_KN[end:] -= U_KK[start:end, end:].t() @ error_gN
        scales.append(scale_N)
        zeros.append(zero_N)
    q_PNK = q_KN.t().to(torch.uint8)[None]
    return Groups(q_PNK, torch.stack(scales, 1)[None], torch.stack(zeros, 1)[None], group, weight_NK.dtype)


@torch.no_grad()
def calibrate(model: nn.Module, batches: Batch | Iterable[Batch], transport: Transport) -> None:
    """Pack a model's linear layers in int4 by `gptq`, in place, block after block. All ranks, with the same batches.

    The inputs of a block are those that the packed blocks before it give. Tables, and heads tied to them, stay.

    Args:
        model: The model. A rank's parts of divided layers are calibrated by the inputs that the rank has of them.
        batches: Samples without padding.
        transport: Between the ranks that have the parts.

    Raises:
        ValueError: On all ranks: there are no batches or no layers, ranks have different batches, or a layer has inputs
            that are not finite.
        TypeError: A batch has the wrong type.
    """
    checked, tables = _checked(batches, transport), tables_of(model)
    matrices: dict[int, Tensor] = {}
    names_of: dict[int, list[str]] = {}
    blocks: dict[str, list[int]] = {}  # a matrix belongs to the first block that has it
    for name, module in model.named_modules(remove_duplicate=False):
        if (found := weight_of(module)) is not None and (number := id(found[0])) not in tables:
            if number not in matrices:
                matrices[number] = found[1]
                blocks.setdefault(_block_of(model, name), []).append(number)
            names_of.setdefault(number, []).append(name)
    if not matrices:
        raise ValueError(f"{type(model).__name__} has no linear layers to calibrate: leave calibration out")
    passes, unreached = Passes(model, blocks, checked), []
    for block in passes.order:
        hessians: dict[int, Tensor] = {}
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(partial(_add, hessians, number))
            for number in blocks[block]
            for name in names_of[number]
        ]
        passes.run(block)
        for hook in hooks:
            hook.remove()
        odd = next((names_of[number][0] for number, H in hessians.items() if not H.isfinite().all()), None)
        raise_on_all_ranks(
            transport, odd and f"calibration: inputs of {odd} are not finite: look for NaN in the batches", ValueError
        )
        for number in blocks[block]:
            if number in hessians:
                packed = gptq(matrices[number], hessians[number])
                for name in names_of[number]:
                    serve_packed(model, name, packed)
            else:
                unreached += names_of[number]
    passes.close()
    if unreached and transport.rank == 0:
        log.warning("%s are rounded to nearest: no batch of calibration reaches them", patterns(unreached))


def _checked(batches: Batch | Iterable[Batch], transport: Transport) -> list[Batch]:
    """The batches as a list, if there are some, and the same on all ranks."""
    given = [batches] if isinstance(batches, Tensor | Mapping) else list(batches)
    if odd := [type(batch).__name__ for batch in given if not isinstance(batch, Tensor | Mapping)]:
        raise TypeError(
            f"calibration: expected tensors of tokens [B, T] or dicts of the model's keywords, got {odd[0]}"
        )
    if not given:
        raise ValueError("calibration has no batches: pass a few hundred samples, or leave it out")
    inputs = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    found = [f"{tuple(x.shape)} {x.dtype} {bits}" for x, bits in zip(inputs, fingerprints(inputs), strict=True)]
    if len(set(gather_texts(transport, "\n".join(found)))) > 1:
        raise ValueError("calibration: ranks have different batches; pass the same ones, in the same order")
    return given


def _add(hessians: dict[int, Tensor], number: int, layer: nn.Module, inputs: tuple[Tensor]) -> None:
    x, part = inputs[0], getattr(layer, "inputs", None)
    x_TK = (x if part is None else x[..., part]).flatten(0, -2).float()
    hessians[number] = hessians.get(number, 0) + x_TK.t() @ x_TK


# -------------------------------------------------------------------------------- passes that compute one block


class Passes:
    """Forward passes of all batches, for one block after the other, each of which may be changed when it has run.

    1. A pass ends with its block.
    2. It computes the block before, changed by then, and keeps the outputs; so each block is computed twice.
    3. Blocks before that give back what the last of their list gave: a model reads no other output of them.

    A model with other paths, or that calls a block twice, is computed as a whole for each block.

    Attributes:
        order: The blocks in the order of their calls, followed by those that the first batch does not call.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str], batches: Sequence[Batch]):
        self._model, self._batches = model, batches
        self._list_of = {name: name.rpartition(".")[0] for name in blocks if name.rpartition(".")[2].isdigit()}
        self._at, self._block, self._before, self._is_chain = 0, "", "", False
        self._done: set[str] = set()
        self._outputs: dict[tuple[str, int], object] = {}  # of the last changed block of a list, by batch
        self._calls: list[tuple[str, object]] = []
        self._wrapped: list[nn.Module] = []
        for name in blocks:
            module = model.get_submodule(name)
            if "forward" not in vars(module):  # a module under two names is wrapped once
                module.forward = partial(self._forward, name, module.forward)
                self._wrapped.append(module)
        expected = self._run(batches[0])
        given = dict(self._calls)
        self.order = [*given, *(name for name in blocks if name not in given)]
        is_once = len(given) == len(self._calls) and given.keys() >= self._list_of.keys()
        self._is_chain = is_once and self._reads_last_only(given, expected)
        self._done.clear()
        self._calls.clear()

    def run(self, block: str) -> None:
        """Run all batches until this block, the next in the order, has been computed."""
        self._block = block
        for at, batch in enumerate(self._batches):
            self._at = at
            with contextlib.suppress(_Enough):
                self._run(batch)
        if self._is_chain and self._before in self._list_of:
            self._done.add(self._before)
        self._before = block

    def close(self) -> None:
        """Leave the blocks as they were."""
        for module in self._wrapped:
            del module.forward

    def _forward(self, name: str, forward: Callable[..., object], *inputs: object, **named: object) -> object:
        if name in self._done:
            return self._outputs[self._list_of[name], self._at]
        out = forward(*inputs, **named)
        if not self._block:
            self._calls.append((name, out))
        elif self._is_chain and name == self._block:
            raise _Enough
        elif self._is_chain and name == self._before and name in self._list_of:
            self._outputs[self._list_of[name], self._at] = out
        return out

    def _run(self, batch: Batch) -> list[Tensor]:
        """The output's first tensor, such as logits."""
        out = self._model(**batch) if isinstance(batch, Mapping) else self._model(batch)
        return _tensors(out)[:1]

    def _reads_last_only(self, given: Mapping[str, object], expected: list[Tensor]) -> bool:
        """Whether the output stays the same if half of each list, and then all of it, give back their last output."""
        lists: dict[str, list[str]] = {}
        for name in (name for name in given if name in self._list_of):
            lists.setdefault(self._list_of[name], []).append(name)
        shapes = {name: [x.shape for x in _tensors(out)] for name, out in given.items()}
        if any(shapes[name] != shapes[names[0]] for names in lists.values() for name in names):
            return False
        for share in (2, 1):
            for of, names in lists.items():
                first = names[: -(-len(names) // share)]
                self._done.update(first)
                self._outputs[of, 0] = given[first[-1]]
            if not all(map(torch.equal, self._run(self._batches[0]), expected)):
                return False
        return True


def _tensors(out: object) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]


class _Enough(Exception):
    """Ends a pass whose rest nobody reads."""


def _block_of(model: nn.Module, layer: str) -> str:
    """The outermost numbered module around a layer, such as layers.3; without one the layer."""
    parts = layer.split(".")
    outer = (".".join(parts[:end]) for end, part in enumerate(parts, 1) if part.isdigit())
    containers = nn.ModuleList | nn.ModuleDict  # models call what is in them
    return next((name for name in outer if not isinstance(model.get_submodule(name), containers)), layer)
