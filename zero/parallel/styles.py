"""Tensor-parallel styles beyond torch's: Conv1D, matrices stacked in one, experts, and widths that attention keeps.

A module with one of them runs its own forward on this rank's parts of its parameters. `model_plan.py` gives the styles
to layers by name, `tensor.py` checks and applies them, `stacked.py` describes parameters that are cut in several parts.

Shape legend: T tokens, N outputs, K inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .experts import aligned, inputs_dim, is_experts, stacked_in_up, up_name, why_undividable
from .stacked import by_stack, stack_placement


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided: along `dim`, which stacks matrices of these sizes. Ranks divide each of them."""

    dim: int
    sizes: tuple[int, ...]

    def odd_size(self, ranks: int) -> int:
        """The first size that the ranks do not divide; 0 if they divide all."""
        return next((size for size in self.sizes if size % ranks), 0)


class OwnStyle(ParallelStyle):
    """A style that says what it does with parameters before it does it."""

    fits = ""
    """The modules that it is for, in an error."""

    def cuts(self, module: nn.Module) -> Mapping[str, Cut | None] | None:
        """How each parameter is divided (None: whole on each rank); None if the style does not fit the module."""
        raise NotImplementedError


class LocalStyle(OwnStyle):
    """Runs the module's forward on this rank's parts, which are plain tensors there.

    1. `_apply` makes each parameter a DTensor: its part as `_part` takes it, or whole, to be added on one rank.
    2. Before forward the parts take the places of the parameters; `_given` prepares the inputs.
    3. After it the parameters return, also after an error, and `_made` joins the output.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, cut in (self.cuts(module) or {}).items():
            if (p := module._parameters.get(name)) is not None:
                module.register_parameter(name, self._part(p, cut, device_mesh))
        module.register_forward_pre_hook(
            lambda module, inputs, named: self._begin(module, inputs, named, device_mesh), with_kwargs=True
        )
        module.register_forward_hook(lambda module, inputs, out: self._end(module, out, device_mesh), always_call=True)
        return module

    def _part(self, p: Tensor, cut: Cut | None, mesh: DeviceMesh) -> nn.Parameter:
        """This rank's part of a whole parameter, which all ranks hold."""
        place: Any = Replicate() if cut is None else Shard(cut.dim)
        mine = p.detach() if cut is None else p.detach().chunk(mesh.size(), cut.dim)[mesh.get_local_rank()]
        return _distributed(p, mine, place, mesh)

    def _given(self, inputs: tuple[Any, ...], named: dict[str, Any], mesh: DeviceMesh) -> tuple[Any, Any]:
        """Inputs are whole, and each rank adds to their gradients."""
        return (
            tuple(_shared(x, mesh) for x in inputs),
            {name: _shared(x, mesh) for name, x in named.items()},
        )

    def _made(self, module: nn.Module, out: Tensor, mesh: DeviceMesh) -> Tensor:
        raise NotImplementedError

    def _begin(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[Any, Any]:
        whole = _whole(module)
        parts: Any = self._computed(module, {name: self._local(p, mesh) for name, p in whole.items()})
        given = self._given(inputs, named, mesh)
        cast(Any, module).whole_parameters = whole
        module._parameters.update(parts)
        return given

    def _computed(self, module: nn.Module, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the module computes with, from this rank's parts."""
        return parts

    @staticmethod
    def _local(p: DTensor, mesh: DeviceMesh) -> Tensor:
        """The elements to compute with. A replicated one is added to a sum over ranks, so only rank 0 adds it."""
        if not p.placements[0].is_replicate():
            return p.to_local()
        whole = p.to_local(grad_placements=[Partial()])
        return whole if mesh.get_local_rank() == 0 else whole * 0

    def _end(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        module._parameters.update(module.__dict__.pop("whole_parameters", {}))
        return None if out is None else self._made(module, out, mesh)


class StackedColwise(LocalStyle):
    """Column-wise for a Linear or Conv1D whose matrix stacks several, as q, k and v: a rank computes its share of each.

    The parameters are divided as the model stacks them, so that checkpoints, exports and ZeRO know them as those of any
    other column-wise layer: a rank holds N/W neighbouring outputs. After the product the ranks exchange outputs, at
    most T·N/W elements per rank and once more in backward, so that each holds its share of every matrix.

    Args:
        sizes: Outputs of each matrix, in order. None: one, so that nothing is exchanged.
    """

    fits = "Linear and Conv1D"

    def __init__(self, sizes: Sequence[int] | None = None):
        self._sizes = None if sizes is None else tuple(sizes)

    def cuts(self, module: nn.Module) -> Mapping[str, Cut | None] | None:
        if (dims := _dims(module)) is None:
            return None
        weight = cast(Tensor, module.weight)
        sizes = self._sizes or (weight.shape[dims[0]],)
        if sum(sizes) != weight.shape[dims[0]]:
            raise ValueError(f"matrices of {sizes} outputs are no stack of {weight.shape[dims[0]]}")
        return {"weight": Cut(dims[0], sizes), "bias": Cut(0, sizes)}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if is_transposed(module):
            cast(Any, module).nf = cast(int, module.nf) // device_mesh.size()  # its forward views the product by it
        return module

    def _made(self, module: nn.Module, out: Tensor, mesh: DeviceMesh) -> Tensor:
        if self._sizes is None or len(self._sizes) == 1:
            return out
        return cast(Tensor, _Exchange.apply(out, self._sizes, mesh))  # type: ignore[no-untyped-call]


class Conv1DRowwise(LocalStyle):
    """Row-wise for Conv1D, which keeps its matrix as [K, N]; its inputs are divided already."""

    fits = "Conv1D"

    def cuts(self, module: nn.Module) -> Mapping[str, Cut | None] | None:
        if not is_transposed(module):
            return None
        return {"weight": Cut(0, (cast(Tensor, module.weight).shape[0],)), "bias": None}

    def _given(self, inputs: tuple[Any, ...], named: dict[str, Any], mesh: DeviceMesh) -> tuple[Any, Any]:
        return inputs, named

    def _made(self, module: nn.Module, out: Tensor, mesh: DeviceMesh) -> Tensor:
        return _summed(out, mesh)


class Experts(LocalStyle):
    """The experts of a mixture in one module: each rank has a part of every expert, and outputs are summed.

    Every rank routes all tokens. Gate and up projection are stacked in one parameter, of which a rank holds its rows of
    both (`stacked.py`): there are too many to exchange.
    """

    fits = "transformers' experts in one module"

    def cuts(self, module: nn.Module) -> Mapping[str, Cut | None] | None:
        if not is_experts(module):
            return None
        if why := why_undividable(module):
            raise ValueError(f"{type(module).__name__} {why}: leave the experts out of the tensor plan")
        up, inner = up_name(module), inputs_dim(module)
        width = cast(Tensor, getattr(module, up)).shape[3 - inner]
        stack = (width // stacked_in_up(module),) * stacked_in_up(module)
        found: dict[str, Cut | None] = {
            up: Cut(3 - inner, stack),
            "down_proj": Cut(inner, (cast(Tensor, module.down_proj).shape[inner],)),
        }
        if module.has_bias:
            found |= {f"{up}_bias": Cut(1, stack), "down_proj_bias": None}
        return found

    def _part(self, p: Tensor, cut: Cut | None, mesh: DeviceMesh) -> nn.Parameter:
        if cut is None or len(cut.sizes) == 1:
            return super()._part(p, cut, mesh)
        count = len(cut.sizes)
        mine = by_stack(p.detach(), cut.dim, count, mesh.size(), mesh.get_local_rank())
        return _distributed(p, mine, stack_placement(cut.dim, count), mesh)

    def _computed(self, module: nn.Module, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return aligned(module, parts)

    def _made(self, module: nn.Module, out: Tensor, mesh: DeviceMesh) -> Tensor:
        return _summed(out, mesh)


class SharedEnd(OwnStyle):
    """Leaves a projection whole on each rank, and sums the gradients of its last outputs, which meet only own heads.

    Latent attention projects to a latent, from which a column-wise layer makes keys and values of heads (it sums the
    latent's gradient), and to a rotating part of the key, which all heads share.

    Args:
        size: Outputs that go to the heads directly.
    """

    fits = "Linear"

    def __init__(self, size: int):
        self._size = size

    def cuts(self, module: nn.Module) -> Mapping[str, Cut | None] | None:
        return {} if isinstance(module, nn.Linear) else None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, inputs, out: self._made(out, device_mesh))
        return module

    def _made(self, out: Tensor, mesh: DeviceMesh) -> Tensor:
        latent, shared = out.split([out.shape[-1] - self._size, self._size], dim=-1)
        return torch.cat([latent, _shared(shared, mesh)], dim=-1)


class Divided(OwnStyle):
    """Divides widths that a module keeps as attributes, if a rank computes only its share of them.

    Args:
        attributes: Names of whole numbers. "config.NAME" is divided for this module alone: others share the config.
    """

    fits = "modules with these attributes"

    def __init__(self, attributes: Sequence[str]):
        self._attributes = attributes

    def cuts(self, module: nn.Module) -> Mapping[str, Cut | None] | None:
        return {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divide(module, self._attributes, device_mesh.size())
        return module


def divide(module: nn.Module, attributes: Sequence[str], ranks: int) -> None:
    """Divide attributes of a module by the number of ranks, as `Divided`."""
    for name in attributes:
        if name.startswith("config."):
            module.config = _DividedConfig(module.config, name.removeprefix("config."), ranks)  # type: ignore[assignment]
        else:
            setattr(module, name, getattr(module, name) // ranks)


class _DividedConfig:
    """A config with one number divided; all else is asked of the model's own, which may change later."""

    def __init__(self, config: Any, name: str, ranks: int):
        self.__dict__.update(_config=config, _name=name, _ranks=ranks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in self.__dict__:  # being copied
            raise AttributeError(name)
        found = getattr(self._config, name)
        return found // self._ranks if name == self._name else found


def _whole(module: nn.Module) -> dict[str, DTensor]:
    """The module's own parameters that are divided or replicated among ranks."""
    return {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}  # type: ignore[misc]


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, which keeps W as [K, N]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _dims(module: nn.Module) -> tuple[int, int] | None:
    """The dimensions of a matrix's outputs and inputs; None if the module is no linear layer."""
    return (1, 0) if is_transposed(module) else (0, 1) if isinstance(module, nn.Linear) else None


def _distributed(p: Tensor, mine: Tensor, place: Any, mesh: DeviceMesh) -> nn.Parameter:
    # A copy: a view of the whole parameter would keep that in memory.
    mine = mine.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(p.shape, device="meta", dtype=p.dtype).stride()
    held = DTensor.from_local(mine, mesh, (place,), run_check=False, shape=p.shape, stride=stride)
    return nn.Parameter(held, requires_grad=p.requires_grad)


# -------------------------------------------------------------------------------- what ranks send each other


def _shared(x: Any, mesh: DeviceMesh) -> Any:
    """An input that all ranks hold: the same tensor, whose gradient is the sum over the ranks."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    return DTensor.from_local(x, mesh, (Replicate(),), run_check=False).to_local(grad_placements=(Partial(),))


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks, on each."""
    return DTensor.from_local(x, mesh, (Partial(),), run_check=False).redistribute(placements=(Replicate(),)).to_local()


class _Exchange(torch.autograd.Function):
    """From N/W neighbouring features on each rank to its share of each stacked matrix, [..., N/W]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
        ctx.route, ctx.group = route(sizes, mesh.size(), mesh.get_local_rank(), x.device), mesh.get_group()
        order, sent, taken = ctx.route
        x_NT = x.flatten(0, -2).t()[order]
        return _sent(x_NT, sent, taken, ctx.group).t().reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order, sent, taken), (grad,) = ctx.route, grads
        back_NT = _sent(grad.flatten(0, -2).t().contiguous(), taken, sent, ctx.group)
        x_NT = torch.empty_like(back_NT).index_copy_(0, order, back_NT)
        return x_NT.t().reshape(grad.shape), None, None


@cache  # as each layer of a model asks for the same
def route(sizes: tuple[int, ...], ranks: int, rank: int, device: torch.device) -> tuple[Tensor, list[int], list[int]]:
    """Which features a rank sends to whom: (its features in the order of sending, counts to each, counts from each).

    A rank holds N/ranks neighbouring features, and wants its share of each matrix. Both are in ascending order, so what
    arrives from ranks 0, 1, ... is in the wanted order. Pure.
    """
    matrices = torch.arange(sum(sizes), device="cpu").split(list(sizes))
    wanted = [torch.cat([features.chunk(ranks)[r] for features in matrices]) for r in range(ranks)]
    each = sum(sizes) // ranks
    holder = [torch.div(features, each, rounding_mode="floor") for features in wanted]
    order = torch.cat([features[at == rank] - rank * each for features, at in zip(wanted, holder, strict=True)])
    sent = [int((at == rank).sum()) for at in holder]
    taken = [int((holder[rank] == r).sum()) for r in range(ranks)]
    return order.to(device), sent, taken


def _sent(x_NT: Tensor, sent: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
    out_NT = x_NT.new_empty(sum(taken), x_NT.shape[1])
    dist.all_to_all_single(out_NT, x_NT.contiguous(), taken, sent, group=group)
    return out_NT
