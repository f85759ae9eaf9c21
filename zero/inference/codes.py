"""From the codes of a compressed file to layers that multiply by them; no matrix is in floats on the way.

    up to 4 bits    `Groups`, with a factor for each row if the scales are by row
    5 to 8 bits     `Rows` if the scales are by row; otherwise `Groups` of two planes, high and low bits
    anything else   expanded to floats, which is logged

Shape legend: N outputs, K inputs, J groups of inputs.
"""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor, nn

from ..compression.armed import activation_of
from ..compression.packing import Codes, Compressed
from ..compression.techniques import quantize_inputs
from .layers import ServedEmbedding, ServedLinear, has_hooks, is_linear, replace
from .packed import GROUPS, Groups, Packed, Rows

log = logging.getLogger(__name__)


@torch.no_grad()
def serve_codes(model: nn.Module, read: Compressed, *, has_int8_inputs: bool) -> None:
    """Put a file's weights into a plain model, in place: codes as packed layers, the rest as parameters.

    Weights that cannot be packed are expanded, and named in the log. Quantized inputs stay: if these have 8 symmetric
    bits with a range for each token, `Rows` multiply them as int8; otherwise they are rounded as in training.

    Args:
        model: The model as it was built before compression.
        read: The file.
        has_int8_inputs: Whether layers whose inputs the file does not quantize take them in int8.

    Raises:
        ValueError: The file is damaged or of another model, or a layer of fewer than 8 bits cannot take int8 inputs.
            Nothing has changed.
    """
    read.check(model)
    made: dict[str, Packed] = {}
    holders = {name: _holders(model, name) for name, x in read.weights.items() if isinstance(x, Codes)}
    for name, modules in holders.items():
        try:
            why = next(filter(None, map(_why_unserved, modules.values())), None)
            found = why or packed_of(cast(Codes, read.weights[name]))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{read.path} is damaged at {name}: {error}") from error
        if isinstance(found, str):
            log.warning("%s of %s is expanded to floats: %s", name, read.path, found)
        elif has_int8_inputs and isinstance(found, Groups) and any(map(is_linear, modules.values())):
            raise ValueError(
                f"quant.activation is for weights of int8 rows, and {name} of {read.path} has "
                f"{cast(Codes, read.weights[name]).scales.code.bits} bits or groups: leave quant.activation out"
            )
        else:
            made[name] = found
    read.put(model, but=made.keys())
    for name, matrix in made.items():
        for holder, module in holders[name].items():
            if isinstance(module, nn.Embedding):
                replace(model, holder, ServedEmbedding(matrix))
            else:
                replace(model, holder, _linear(module, matrix, has_int8_inputs))


def packed_of(codes: Codes) -> Packed | str:
    """The packed matrix of these codes, or why there is none."""
    scales, bits = codes.scales, codes.scales.code.bits
    columns, N, K = set(scales.grid.columns), codes.form.rows, codes.form.columns
    if not N or not K:
        return "it is empty"
    if bits > 8:
        return f"{bits} bits are more than kernels take"
    if len(columns) > 1:
        return f"its groups have different widths, {min(columns)} to {max(columns)}"
    (width,) = columns
    is_by_row = width == K
    group = next((each for each in GROUPS if width % each == 0), GROUPS[-1] if is_by_row else None)
    if group is None:
        return f"its groups of {width} inputs are no multiple of {GROUPS[-1]}"
    level_NK = codes.levels()
    rows = torch.tensor(scales.grid.rows, device="cpu", dtype=torch.int64)
    scale_NJ = scales.scale_IJ.float().repeat_interleave(rows, 0)
    # Level 0 is the middle of what the kernel takes; zero points move it by half of the file's codes at most, so that
    # little is lost when their products with scales are rounded.
    middle, half = 8 if bits <= 4 else 128, 2 ** (bits - 1)
    if scales.zero_IJ is None:
        first_NJ = torch.full_like(scale_NJ, middle, dtype=torch.int16)
    else:
        first_NJ = scales.zero_IJ.to(torch.int16).repeat_interleave(rows, 0) + (middle - half)
    if bits > 4 and is_by_row:
        offset_N = None if scales.zero_IJ is None else ((middle - first_NJ) * scale_NJ)[:, 0].contiguous()
        rows_NK = level_NK.add_(first_NJ - middle).to(torch.int8)
        return Rows(rows_NK, scale_NJ[:, 0].contiguous(), codes.dtype, offset_N)
    q_NK = (level_NK.view(N, -1, width) + first_NJ[..., None]).view(N, K).to(torch.uint8)
    row_N, unit_NJ = (scale_NJ[:, 0].contiguous(), torch.ones_like(scale_NJ)) if is_by_row else (None, scale_NJ)
    times = -(-width // group)  # groups of the kernel in one of the file
    unit_NJ, first_NJ = unit_NJ.repeat_interleave(times, 1), first_NJ.repeat_interleave(times, 1)
    if bits <= 4:
        return Groups(q_NK[None], unit_NJ[None], ((8 - first_NJ) * unit_NJ)[None], group, codes.dtype, row_N)
    # 16·(high - 8) + (low - 8) = code - 136: the rest of the zero point goes to the high plane.
    planes = torch.stack([q_NK >> 4, q_NK & 15])
    zeros = torch.stack([(128 - first_NJ) * unit_NJ, 8 * unit_NJ])
    return Groups(planes, torch.stack([16 * unit_NJ, unit_NJ]), zeros, group, codes.dtype, row_N)


def _holders(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """The modules whose weight this is, by name: tied weights have several."""
    weight = model.get_parameter(name)
    return {
        holder: module
        for holder, module in model.named_modules(remove_duplicate=False)
        if any(p is weight for p in module._parameters.values())
    }


def _why_unserved(module: nn.Module) -> str | None:
    if has_hooks(module):
        return "its layer has hooks"
    if is_linear(module) or (type(module) is nn.Embedding and module.max_norm is None):
        return None
    return f"no kernel multiplies by that of a {type(module).__name__}"


def _linear(module: nn.Module, matrix: Packed, has_int8_inputs: bool) -> ServedLinear:
    bias, activation = cast("Tensor | None", module.bias), activation_of(module)
    bias = None if bias is None else bias.detach()
    if activation is None:
        return ServedLinear(matrix, bias, None, has_int8_inputs)
    is_by_token = activation.bits == 8 and activation.kind == "symmetric" and not activation.is_static
    if is_by_token and isinstance(matrix, Rows):
        return ServedLinear(matrix, bias, None, has_int8_inputs=True)
    served = ServedLinear(matrix, bias, None)
    quantize_inputs(served, activation)
    return served
