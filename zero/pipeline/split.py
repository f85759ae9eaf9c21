"""Cut a plain module at named places for a pipeline. torch traces it, so it need not be written as a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from .layers import Loss, PipelineModule


def split(
    module: nn.Module, points: Sequence[str], example: Tensor | tuple[Tensor, ...], *, loss_fn: Loss, **options: object
) -> PipelineModule:
    """Cut a module into pieces, and return them as a `PipelineModule`.

    All ranks call it with the same arguments; nothing is sent.

    Args:
        module: A module on the CPU with the same values on all ranks. Its forward must be traceable by `torch.export`,
            and must not depend on values. It is traced in its current mode, which dropout keeps: call train() first.
        points: Names of submodules before which to cut, in the order in which they run.
        example: The inputs of a micro-batch. All micro-batches must have their shapes.
        loss_fn: Called as loss_fn(output, target); returns the mean over the micro-batch.
        **options: Further arguments of `PipelineModule`. partition_method is "uniform" by default.

    Raises:
        ValueError: A name is no submodule's, or two pieces would hold one parameter (then write the model as a list
            of layers with `TiedLayerSpec`).
    """
    known = {name for name, _ in module.named_modules() if name}
    if unknown := [point for point in points if point not in known]:
        raise ValueError(f"the module has no submodule {unknown[0]!r}; it has {', '.join(sorted(known)[:8])}, ...")
    inputs = example if isinstance(example, tuple) else (example,)
    own = {point: vars(module.get_submodule(point)).get("forward") for point in points}
    try:
        traced = pipeline(module, mb_args=inputs, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
    finally:  # torch leaves its marks in the module, and they would cut the next trace
        for point, forward in own.items():
            names = vars(module.get_submodule(point))
            names.pop("_orig_forward", None)
            names.pop("forward", None)
            if forward is not None:
                names["forward"] = forward
    pieces = [traced.get_stage_module(k) for k in range(traced.num_stages)]
    if len(pieces) != len(points) + 1:
        raise ValueError(
            f"{len(points)} points should make {len(points) + 1} pieces, but tracing found {len(pieces)}; name "
            "submodules that run one after the other"
        )
    _check_untied(module, pieces)
    pieces[0].register_forward_pre_hook(_shapes_of(inputs))
    return PipelineModule(pieces, loss_fn=loss_fn, **{"partition_method": "uniform", **options})  # type: ignore[arg-type]


def _check_untied(module: nn.Module, pieces: Sequence[nn.Module]) -> None:
    """Raise ValueError if two pieces hold one parameter: tracing copies it, and trained copies would differ."""
    piece_of = {name: k for k, piece in enumerate(pieces) for name, _ in piece.named_parameters(remove_duplicate=False)}
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for same in names.values():
        if len({piece_of[name] for name in same if name in piece_of}) > 1:
            raise ValueError(
                f"{' and '.join(same)} are one parameter and would be in different pieces; write the model as a list "
                "of layers, with TiedLayerSpec"
            )


def _shapes_of(inputs: tuple[Tensor, ...]) -> Callable[[nn.Module, tuple[object, ...]], None]:
    """A forward pre-hook that raises ValueError on inputs of other shapes."""
    expected = [tuple(x.shape) for x in inputs]

    def check(_: nn.Module, given: tuple[object, ...]) -> None:
        found = [tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in given]
        if found != expected:
            raise ValueError(
                f"the module was traced for inputs of shapes {expected}, a micro-batch has {found}; drop the last, "
                "incomplete batch, or pad it"
            )

    return check
