"""Sparse attention on the device: FlexAttention and gather against dense attention, and seconds against length.

What no CPU can show: FlexAttention's backward pass, its compiled kernel, lengths up to 131,072 beside FlashAttention.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from bench.sparse_attention import LAYOUTS
from torch import Tensor
from torch.nn import functional as F

from gpu_check.section import Outcome, Setting, outcome
from gpu_check.speed import time_in_turn
from onebit.zero.sparse_attention import Layout, build_layout, sparse_attention

HEADS, KEY_HEADS, FEATURES = 8, 4, 64
MASKS = ("none", "padding", "bias", "padding and bias")
# Of results of about one. Flex in float32: its kernel may round products to 10 bits (TF32).
BOUNDS = {
    ("flex", torch.float32): 5e-3,
    ("flex", torch.bfloat16): 4e-2,
    ("gather", torch.float32): 2e-5,
    ("gather", torch.bfloat16): 4e-2,
}
DTYPES = (torch.float32, torch.bfloat16)


def attention_checks(setting: Setting) -> Iterator[Outcome]:
    """Both executors against dense attention in float64 with the layout as a mask, forward and backward.

    Without a GPU: gather alone has a backward pass; flex's forward pass is checked, with all masks at once, in float32.
    """
    device, length = setting.device, 300 if setting.is_rehearsal else 1000
    for name, mask, dtype, executor in _cases(device):
        check = functools.partial(_check, name, mask, dtype, executor, device, length)
        kind = str(dtype).removeprefix("torch.")
        yield outcome(f"sparse attention: {executor}, {name}, mask: {mask}, {kind}", check)


def _cases(device: torch.device) -> Iterator[tuple[str, str, torch.dtype, str]]:
    is_gpu = device.type == "cuda"
    masks, dtypes = (MASKS, DTYPES) if is_gpu else (MASKS[-1:], (torch.float32,))
    yield from itertools.product(LAYOUTS, masks, dtypes, ("flex", "gather"))


def _check(name: str, mask: str, dtype: torch.dtype, executor: str, device: torch.device, length: int) -> None:
    layout = build_layout(LAYOUTS[name], HEADS, length)
    has_backward = executor == "gather" or device.type == "cuda"
    tensors = [x.to(device, dtype).requires_grad_(has_backward) for x in _inputs(length, KEY_HEADS)]
    given: dict[str, Tensor] = {}
    if "padding" in mask:
        given["padding"] = torch.arange(length, device=device)[None] < torch.tensor([[2 * length // 3]], device=device)
    if "bias" in mask:
        bias = torch.randn(1, HEADS, 1, length, generator=torch.Generator().manual_seed(9))
        given["bias"] = bias.to(device, dtype).requires_grad_(has_backward)
    out = sparse_attention(*tensors, layout, **given, executor=executor)
    expected = _dense(*tensors, layout, **given)
    found, wanted = [out], [expected]
    if has_backward:
        trained = [*tensors, *([given["bias"]] if "bias" in given else [])]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(device)
        found += torch.autograd.grad((out.float() * weight).sum(), trained)
        wanted += torch.autograd.grad((expected * weight).sum(), trained)
    for got, exact in zip(found, wanted, strict=True):
        got, exact = got.detach().double(), exact.detach().double()
        gap, bound = float((got - exact).abs().max() / exact.abs().max().clamp(min=1)), BOUNDS[executor, dtype]
        if not gap <= bound:
            raise AssertionError(f"expected an error of at most {bound}, got {gap:.2g}")


def _inputs(length: int, key_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(1, h, length, FEATURES, generator=generator) for h in (HEADS, key_heads, key_heads)]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, padding: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    seen = layout.visible(q.shape[2]).to(q.device)[None]
    if padding is not None:
        seen = seen & padding[:, None, None]
    scores = q @ k.mT / q.shape[3] ** 0.5
    scores = scores if bias is None else scores + bias.double()
    return scores.masked_fill(~seen, float("-inf")).softmax(3).nan_to_num(0) @ v


def attention_table(setting: Setting) -> list[str]:
    """Milliseconds of forward and backward in bfloat16: dense causal attention, flex and gather, in turn."""
    device, repeats = setting.device, max(1, setting.repeats // 5)
    lines = ["| tokens | attention | density | dense ms | flex ms | gather ms | flex, × dense | flex, × gather |"]
    lines.append("|---:|---|---:|---:|---:|---:|---:|---:|")
    for length in setting.lengths:
        tensors = [x.to(device, torch.bfloat16).requires_grad_() for x in _inputs(length, HEADS)]
        for name, config in LAYOUTS.items():
            layout = build_layout(config, HEADS, length)
            executors = ("flex", "gather") if device.type == "cuda" else ("gather",)
            calls = [_timed(tensors, functools.partial(F.scaled_dot_product_attention, is_causal=True))]
            for executor in executors:
                calls.append(_timed(tensors, functools.partial(sparse_attention, layout=layout, executor=executor)))
            dense, *sparse = time_in_turn(calls, repeats, device)
            gather, flex, faster = sparse[-1], "", " | "
            if len(sparse) > 1:
                flex = str(sparse[0])
                faster = " | ".join(f"{other.median / sparse[0].median:.1f}" for other in (dense, gather))
            lines.append(f"| {length} | {name} | {layout.density:.4f} | {dense} | {flex} | {gather} | {faster} |")
    return lines


def _timed(tensors: list[Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], object]:
    q, k, v = tensors
    return lambda: torch.autograd.grad(attend(q, k, v).sum(), tensors)
