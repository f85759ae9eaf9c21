"""The techniques, each a parametrization of a weight; activation quantization, which has none, a submodule and a hook.

    torch.nn.utils.parametrize.register_parametrization(module, "weight", WeightQuantization(...))

In a stack, each takes the output of the one before: quantization first, then the masks. Each follows its schedule at
the step that `reach` has set. Masks of "l1" are buffers, computed once from the whole weight; those of "topk" are
computed in every forward pass, from weights and learned scores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from .matrices import Form, is_convolution
from .quantizers import Code, Scales, quantize, quantize_range, straight_through
from .schedule import BitSchedule, DensitySchedule

_MOMENTUM = 0.95  # of a static range


class WeightQuantization(nn.Module):
    """q(w), or a mix of w and q(w), with the gradient of w. name: of the weight; seeds stochastic rounding.

    Stochastic rounding draws from a generator of (name, step): the same on all ranks and in every micro-batch.
    """

    def __init__(self, form: Form, schedule: BitSchedule, kind: str, tiles: int, *, name: str, is_stochastic: bool):
        super().__init__()
        self.form, self.schedule, self.kind, self.tiles = form, schedule, kind, tiles
        self.name, self.is_stochastic = name, is_stochastic
        self.reach(0)

    def reach(self, step: int) -> None:
        """This many steps are done."""
        self.step, self.bits, self.mix = step, self.schedule.bits(step), self.schedule.mix(step)

    def forward(self, weight: Tensor) -> Tensor:
        if self.bits is None:
            return weight
        with torch.no_grad():
            scales, level_RC = self.quantized(weight)
            whole = self.form.weight(scales.values(level_RC)).to(weight.dtype)
            if self.mix > 0:
                whole = torch.lerp(whole, weight, self.mix)
        return straight_through(weight, whole)

    @torch.no_grad()
    def quantized(self, weight: Tensor) -> tuple[Scales, Tensor]:
        """(scales, levels [R, C]) of the weight now; computed in float32."""
        assert self.bits is not None
        matrix_RC = self.form.matrix(weight).float()
        return quantize(matrix_RC, Code(self.kind, self.bits), self.tiles, self._noise(matrix_RC))

    def _noise(self, matrix_RC: Tensor) -> Tensor | None:
        if not self.is_stochastic:
            return None
        digest = hashlib.sha256(f"{self.name}/{self.step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.rand(matrix_RC.shape, generator=generator, dtype=torch.float32, device="cpu").to(matrix_RC.device)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.bits} bits, {self.tiles} groups"


class _Masked(torch.autograd.Function):
    """weight · mask. The scores' gradient is that of the mask: the sum of gradient · weight over each unit."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, mask: Tensor, units: Units) -> Tensor:
        ctx.save_for_backward(weight, mask)
        ctx.units = units
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight, mask = ctx.saved_tensors
        return grad * mask, ctx.units.total(grad * weight).to(grad.dtype), None, None


class Units:
    """The units of pruning: "element", "row" (an output), "head" (an equal share of the inputs). shape: of a mask."""

    def __init__(self, form: Form, kind: str, heads: int = 1):
        self.form, self.kind, self.heads = form, kind, heads
        self.shape = {"element": form.shape, "row": (form.rows,), "head": (heads,)}[kind]

    def _split(self, weight: Tensor) -> Tensor:
        """The weight as [R, units, columns of a unit], for heads."""
        return self.form.matrix(weight).reshape(self.form.rows, self.heads, -1)

    def total(self, weight: Tensor) -> Tensor:
        """The sum over each unit."""
        if self.kind == "element":
            return weight
        return self.form.matrix(weight).sum(1) if self.kind == "row" else self._split(weight).sum((0, 2))

    def expand(self, mask: Tensor) -> Tensor:
        """A value per unit, repeated for each element of the weight."""
        if self.kind == "element":
            return mask
        matrix = mask[:, None] if self.kind == "row" else mask.repeat_interleave(self.form.columns // self.heads)[None]
        return self.form.weight(matrix.expand(self.form.rows, self.form.columns))

    def l1_mask(self, weight: Tensor, keep: int) -> Tensor:
        """torch's mask: 1 for the units with the largest L1 norms."""
        drop = torch.Size(self.shape).numel() - keep
        mask: Tensor
        if self.kind == "element":
            mask = prune.L1Unstructured(drop).compute_mask(weight, torch.ones_like(weight))
            return mask
        matrix = self.form.matrix(weight) if self.kind == "row" else self._split(weight)
        dim = 0 if self.kind == "row" else 1
        mask = prune.LnStructured(drop, n=1, dim=dim).compute_mask(matrix, torch.ones_like(matrix))
        return mask.select(1, 0) if self.kind == "row" else mask[0, :, 0]


class Pruning(nn.Module):
    """weight · mask, over units. `kept`: the mask of the last forward pass; None while nothing is pruned.

    "l1": the mask is a buffer; `choose` computes it. "topk": the units with the largest (norm / mean norm + score);
    scores begin at zero, so that the first mask is that of l1, and learn with the straight-through gradient.
    """

    mask: Tensor

    def __init__(self, units: Units, schedule: DensitySchedule, method: str, like: Tensor):
        super().__init__()
        self.units, self.schedule, self.method = units, schedule, method
        self.kept: Tensor | None = None
        self._stack: tuple[nn.Module, ...] = ()  # in a tuple: not registered
        if method == "topk":
            self.scores = nn.Parameter(torch.zeros(units.shape, dtype=like.dtype, device=like.device))
        else:
            self.register_buffer("mask", torch.ones(units.shape, dtype=torch.uint8, device=like.device))
        self.reach(0)

    def read_from(self, stack: nn.Module) -> None:
        """Use norms of the trained weight: those of a quantized one are often equal."""
        self._stack = (stack,)

    def reach(self, step: int) -> None:
        """This many steps are done."""
        self.density = self.schedule.density(step)

    def is_due(self, before: int | None, step: int) -> bool:
        """Whether `choose` must compute a new mask since step `before`; None: there was none."""
        now = self.schedule.density(step)
        return self.method == "l1" and now < 1.0 and (before is None or self.schedule.density(before) != now)

    @property
    def count(self) -> int:
        """Number of units to keep, at least one."""
        return max(1, round(self.density * torch.Size(self.units.shape).numel()))

    @torch.no_grad()
    def choose(self, weight: Tensor) -> None:
        """Compute the mask of this whole weight, for "l1"."""
        self.mask.copy_(self.units.l1_mask(weight.float(), self.count))

    def _now(self, weight: Tensor) -> Tensor:
        if self.method == "l1":
            return self.mask
        norms = self.units.total(weight.detach().abs().float())
        value = norms / norms.mean().clamp(min=torch.finfo(torch.float32).tiny) + self.scores.detach().float()
        drop = value.numel() - self.count
        # torch's takes absolute values: from the least value on, they are in the order of the values
        mask: Tensor = prune.L1Unstructured(drop).compute_mask(value - value.min(), torch.ones_like(value))
        return mask

    @torch.no_grad()
    def keep(self, weight: Tensor | None = None) -> Tensor | None:
        """Compute the mask now, and store it in `kept`; from the trained weight if `read_from` was called."""
        trained = self._stack[0].original if self._stack else weight
        assert isinstance(trained, Tensor)
        self.kept = None if self.density >= 1.0 else self._now(trained).to(trained.dtype)
        return self.kept

    def forward(self, weight: Tensor) -> Tensor:
        kept = self.keep(weight)
        if kept is None:
            return weight
        with torch.no_grad():
            mask = self.units.expand(kept)
        if self.method == "l1":
            return weight * mask
        masked: Tensor = _Masked.apply(weight, self.scores, mask, self.units)  # type: ignore[no-untyped-call]
        return masked

    def extra_repr(self) -> str:
        return f"{self.units.kind}, {self.method}, density {self.density:g}"


class RelatedInputs(nn.Module):
    """The weight with zeros for inputs that come from rows dropped in another module, so that cleaning changes no
    output. source: the pruning of that module; not a submodule of this one.
    """

    def __init__(self, form: Form, source: Pruning):
        super().__init__()
        self.form, self._source = form, (source,)  # in a tuple: not registered

    @property
    def source(self) -> Pruning:
        """The pruning that drops the rows."""
        return self._source[0]

    def reach(self, step: int) -> None:
        """Does nothing: it follows its source."""

    def forward(self, weight: Tensor) -> Tensor:
        kept = self.source.kept
        if kept is None:
            return weight
        columns = self.form.columns_of(kept.to(weight.dtype))
        return weight * self.form.weight(columns.expand(self.form.rows, -1))


class ActivationQuantization(nn.Module):
    """Quantizes the inputs of a module; the gradient passes through. offset: None: on from the start, permanently.

    dynamic: a range for each token, over the last dimension; before a convolution for each image, over its channels and
    places. static: one running range of the training so far, in the buffers low and high, which `sync_buffers` averages
    over ranks. Inputs that pruning has dropped, here or in the module before, do not count in a range, because cleaning
    removes them.

    Attributes:
        dims: The dimensions that share a dynamic range, that of the inputs first; `quantize_inputs` sets them.
    """

    averaged_buffers = ("low", "high")

    low: Tensor
    high: Tensor

    def __init__(self, bits: int, kind: str, *, is_static: bool, offset: int | None = None, device: torch.device):
        super().__init__()
        self.bits, self.kind, self.is_static, self.offset = bits, kind, is_static, offset
        if is_static:
            self.register_buffer("low", torch.full((), torch.inf, device=device, dtype=torch.float32))
            self.register_buffer("high", torch.full((), -torch.inf, device=device, dtype=torch.float32))
        self.is_on = offset is None
        self.dims: tuple[int, ...] = (-1,)
        self._dropping: tuple[Pruning, ...] = ()  # not registered
        self.reach(0)

    def reach(self, step: int) -> None:
        """This many steps are done."""
        self.is_on = self.offset is None or step >= self.offset

    def without(self, dropping: tuple[Pruning, ...]) -> None:
        """Set the prunings that drop inputs."""
        self._dropping = dropping

    def _kept(self, x: Tensor) -> Tensor:
        dim = self.dims[0]  # of the inputs: in a convolution that of its channels
        for pruning in self._dropping:
            # Heads are chosen by this module's own weight, rows by that of a module that has run before.
            kept = pruning.keep() if pruning.units.kind == "head" else pruning.kept
            if kept is not None:
                mask = kept.to(x.dtype).repeat_interleave(x.shape[dim] // len(kept))
                x = x * mask.view(-1, *[1] * (len(self.dims) - 1))
        return x

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        x = self._kept(x)
        with torch.no_grad():
            if self.is_static and self.training and x.numel() > 0 and not _is_computed_again():
                self._observe(x)
            if not self.is_on:
                return x
            if not self.is_static:
                low, high = x.amin(self.dims, keepdim=True), x.amax(self.dims, keepdim=True)
            elif torch.isfinite(self.low):
                low, high = self.low, self.high
            else:
                raise RuntimeError(
                    "an activation with a static range has seen no training batch: run some with model.train() first, "
                    'or write "range_calibration": "dynamic"'
                )
            quantized = quantize_range(x, low, high, self.kind, self.bits)
        return straight_through(x, quantized)

    def _observe(self, x: Tensor) -> None:
        low, high = x.min().float(), x.max().float()
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            return  # a step that is skipped
        is_first = not bool(torch.isfinite(self.low))
        self.low.copy_(low if is_first else torch.lerp(low, self.low.float(), _MOMENTUM))
        self.high.copy_(high if is_first else torch.lerp(high, self.high.float(), _MOMENTUM))

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.bits} bits, {'static' if self.is_static else 'dynamic'}"


def _is_computed_again() -> bool:
    """Whether this pass is part of a backward one, as of checkpointed activations: the first one has counted."""
    return torch._C._current_graph_task_id() != -1


ACTIVATIONS = "activation_quantization"  # the submodule's name


def quantize_inputs(module: nn.Module, quantization: ActivationQuantization) -> None:
    """Pass a module's inputs through this quantization, which becomes its submodule."""
    if is_convolution(module):
        quantization.dims = tuple(range(1 - len(Form.of(module).shape), 0))
    setattr(module, ACTIVATIONS, quantization)
    module.register_forward_pre_hook(take_quantized, with_kwargs=True)


def take_quantized(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before a module's forward pass."""
    quantization: Callable[[Tensor], Tensor] = getattr(module, ACTIVATIONS)
    if args:
        return (quantization(args[0]), *args[1:]), named
    return args, {name: quantization(x) if isinstance(x, Tensor) else x for name, x in named.items()}
