"""Attention over a sequence that is split over simulated ranks, on the device, against dense attention in float64.

What no CPU can show: the operations that take the place of its kernel, on the device's own products, and its codecs.

Shape legend: h query heads, g key-value heads, n tokens, d width, W ranks, of which U divide heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gpu_check.section import Outcome, Setting, outcome
from onebit.comm import Codec, Int4Codec, Int8Codec, SimTransport, run_ranks
from onebit.comm.codecs.tensors import decode_, encode
from onebit.zero.sequence import Pieces, SequenceRanks, ring_attention
from onebit.zero.sparse_attention import SparsityConfig, build_layout

HEADS, KEY_HEADS, FEATURES = 8, 4, 64  # so wide that a block of a codec is a token's key or value in one head
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "window": {"window": 40},
    "packed documents": {"documents": 5},
    "sparse": {"layout": 16},
    "capped scores": {"softcap": 2.0},
    "int8 blocks": {"codec": Int8Codec},
    "int4 blocks of packed documents": {"codec": Int4Codec, "documents": 5},
}
RANKS = ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2))  # W, U
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of results of about one; a CPU has 1e-6 and 6e-3


def sequence_checks(setting: Setting) -> Iterator[Outcome]:
    """Output and gradients of every case; in a rehearsal of a third of them, which are of all kinds."""
    length, stride = (60, 3) if setting.is_rehearsal else (1000, 1)
    cases = itertools.product(CASES, RANKS, (True, False), BOUNDS)
    for name, (W, U), is_causal, dtype in itertools.islice(cases, 0, None, stride):
        words = [name, f"W={W}", *[f"{U} divide heads"] * (U > 1), "causal" if is_causal else "all"]
        run = functools.partial(check, CASES[name], Pieces(length, W, U), is_causal, dtype, setting.device)
        yield outcome(f"sequence: {', '.join(words)}, {str(dtype).removeprefix('torch.')}", run)


def check(case: Mapping[str, Any], pieces: Pieces, is_causal: bool, dtype: torch.dtype, device: torch.device) -> None:
    options, seen = _options(case, pieces.length, is_causal)
    given = [x.to(device, dtype) for x in _inputs(pieces.length)]
    found = _split(given, pieces, options)
    wanted = _dense(given, seen.to(device), pieces, case)
    for what, got, exact in zip(("output", "queries", "keys", "values"), found, wanted, strict=True):
        gap = float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1))
        if not gap <= BOUNDS[dtype]:
            raise AssertionError(f"{what}: expected an error of at most {BOUNDS[dtype]}, got {gap:.2g}")


def _options(case: Mapping[str, Any], length: int, is_causal: bool) -> tuple[dict[str, Any], Tensor]:
    """Those of `ring_attention`; and which keys each query sees, element by element, bool [2, 1 or h, n, n]."""
    options = {key: case[key] for key in ("window", "softcap") if key in case} | {"is_causal": is_causal}
    at = torch.arange(length)
    seen = ((at <= at[:, None]) | (not is_causal)).expand(2, 1, length, length)
    if "window" in case:
        seen = seen & ((at - at[:, None]).abs() < case["window"])
    if "documents" in case:
        options["documents"] = ids = torch.stack([at * case["documents"] // length, (at > length // 3).long()])
        seen = seen & (ids[:, None] == ids[:, :, None])[:, None]
    if "layout" in case:
        towards = "unidirectional" if is_causal else "bidirectional"
        config = SparsityConfig(mode="bslongformer", block=case["layout"], attention=towards)
        options["layout"] = layout = build_layout(config, HEADS, length)
        seen = seen & layout.visible(length)
    if "codec" in case:
        options["codec"] = case["codec"](FEATURES)
    return options, seen


def _inputs(length: int) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output, [2, h or g, n, d]."""
    generator = torch.Generator().manual_seed(7)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(2, each, length, FEATURES, generator=generator) for each in heads]


def _split(given: list[Tensor], pieces: Pieces, options: Mapping[str, Any]) -> list[Tensor]:
    """The output and three gradients, of all ranks' pieces."""

    def rank(transport: SimTransport) -> list[Tensor]:
        ranks = SequenceRanks.of(transport, pieces.ulysses_degree)
        *leaves, grad = (pieces.cut(x, transport.rank, 2) for x in given)
        leaves = [x.requires_grad_() for x in leaves]
        out = ring_attention(*leaves, ranks, pieces, **options)
        # On a GPU torch runs all backward passes in one thread, where a rank would wait for one that comes after it.
        with torch.autograd.set_multithreading_enabled(False):
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return [pieces.join(list(parts), 2) for parts in zip(*run_ranks(pieces.world_size, rank), strict=True)]


def _dense(given: list[Tensor], seen: Tensor, pieces: Pieces, case: Mapping[str, Any]) -> list[Tensor]:
    """The same in float64, without ranks. If blocks are rounded, a node sees its own exact, and those of others not."""
    q, k, v = (x.double().requires_grad_() for x in given[:3])
    rounded = [_rounded(x, case.get("codec")) for x in given[1:3]]
    out, groups = torch.zeros_like(q), HEADS // KEY_HEADS
    for node in range(pieces.nodes):
        is_own = torch.zeros(pieces.length, 1, dtype=torch.bool, device=q.device)
        for chunk in pieces.chunks(node):
            is_own[chunk.start : chunk.stop] = True
        # Gradients pass as if nothing had been rounded.
        keys, values = (torch.where(is_own, x, x + (r - x).detach()) for x, r in zip((k, v), rounded, strict=True))
        scores = q @ keys.repeat_interleave(groups, 1).mT / FEATURES**0.5
        if "softcap" in case:
            scores = case["softcap"] * (scores / case["softcap"]).tanh()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(3)
        out = torch.where(is_own, weights @ values.repeat_interleave(groups, 1), out)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3].double())]


def _rounded(x: Tensor, codec: type[Codec] | None) -> Tensor:
    """What arrives of keys or values, in float64: by the reference, on the host."""
    if codec is None:
        return x.double()
    reference, out = codec(FEATURES, kernel="reference"), torch.empty_like(x, device="cpu")
    decode_(reference, encode(reference, x.cpu()), out)
    return out.to(x.device).double()
