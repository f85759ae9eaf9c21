"""A plain module cut at named places, for a pipeline: torch traces it, so that it need not be written as a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from .layers import Loss, PipelineModule


def split(
    module: nn.Module, points: Sequence[str], example: Tensor | tuple[Tensor, ...], *, loss_fn: Loss, **options: object
) -> PipelineModule:
    """The module as a `PipelineModule` with a piece between any two points. No communication; all ranks, alike.

    module: on the CPU, the same values on all ranks; what it does must be traceable (`torch.export`) and not depend on
    values. It is traced in the mode it is in: call train() first; dropout and the like stay in that mode. points: names
    of submodules before which it is cut, in the order of execution. example: a micro-batch's inputs; all micro-batches
    must have their shapes. options: of `PipelineModule`. Raises ValueError where a name is no submodule's, and where
    two pieces would hold one parameter (write the list with `TiedLayerSpec` then).
    """
    known = {name for name, _ in module.named_modules() if name}
    if unknown := [point for point in points if point not in known]:
        raise ValueError(f"the module has no submodule {unknown[0]!r}; it has {', '.join(sorted(known)[:8])}, ...")
    inputs = example if isinstance(example, tuple) else (example,)
    traced = pipeline(module, mb_args=inputs, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
    pieces = [traced.get_stage_module(k) for k in range(traced.num_stages)]
    if len(pieces) != len(points) + 1:
        raise ValueError(f"{len(points)} points make {len(points) + 1} pieces, tracing found {len(pieces)}")
    _check_untied(module, pieces)
    pieces[0].register_forward_pre_hook(_shapes_of(inputs))
    return PipelineModule(pieces, loss_fn=loss_fn, **{"partition_method": "uniform", **options})  # type: ignore[arg-type]


def _check_untied(module: nn.Module, pieces: Sequence[nn.Module]) -> None:
    """Tracing copies what two pieces hold; trained apart, the copies would differ."""
    piece_of = {name: k for k, piece in enumerate(pieces) for name, _ in piece.named_parameters(remove_duplicate=False)}
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for same in names.values():
        if len({piece_of[name] for name in same if name in piece_of}) > 1:
            raise ValueError(
                f"{' and '.join(same)} are one parameter and would lie in different pieces; write the model as a list "
                "of layers, with TiedLayerSpec"
            )


def _shapes_of(inputs: tuple[Tensor, ...]) -> Callable[[nn.Module, tuple[object, ...]], None]:
    """A forward pre-hook that raises ValueError on inputs of other shapes."""
    expected = [tuple(x.shape) for x in inputs]

    def check(_: nn.Module, given: tuple[object, ...]) -> None:
        found = [tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in given]
        if found != expected:
            raise ValueError(f"the module was traced for inputs of shapes {expected}, a micro-batch has {found}")

    return check
