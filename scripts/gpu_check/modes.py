"""Offload and inference on the device: modes of offload against each other, a served model against the host's, a
running batch against each of its requests alone."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from train.model import ModelSize, build_model

from gpu_check.checks import assert_same
from gpu_check.section import Outcome, Setting, outcome
from onebit.zero import ContinuousBatch, Offload, init_inference

BATCHED = ("GPT-2", "Mistral", "Gemma-3", "Mixtral", "T5", "BART")  # models of `study.model_cases`
LARGEST_GAP = {"fp32": 1e-3, "bf16": 5e-2, "int8": 5e-2}  # of logits, to the largest of the host's in float32


def trained(mode: str, to: str, device: torch.device, dtype: torch.dtype, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    model = model.to(device, dtype)
    optimizer = Offload(model, lambda params: torch.optim.AdamW(params, lr=1e-2), mode=mode, to=to, chunk_mb=0.1)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 64, generator=g).to(device, dtype)
        (model(x) - x[:, :8].sin()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().cpu() for p in model.parameters()]


def check_offload(mode: str, in_files: bool, dtype: torch.dtype, setting: Setting) -> None:
    """Against mode "state" in host memory, whose steps are computed there too."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        found = trained(mode, folder if in_files else "cpu", setting.device, dtype, setting.steps)
    expected = trained("state", "cpu", setting.device, dtype, setting.steps)
    for k, (p, other) in enumerate(zip(found, expected, strict=True)):
        assert_same(f"parameter {k} against mode 'state'", p, other)


def check_inference(dtype: str, is_compiled: bool, setting: Setting) -> None:
    """Logits beside the host's in float32; greedy tokens of a batch equal those of each row alone."""
    model = build_model(ModelSize(layers=2, width=64, heads=2, context=64), 0).eval()
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens)
    served = init_inference(model.to(setting.device), dtype=dtype, kernel_inject=is_compiled, max_out_tokens=64)
    with torch.no_grad():
        got = served(tokens.to(setting.device))
    assert isinstance(got, Tensor)
    gap = float((got.float().cpu() - expected).abs().max() / expected.abs().max())
    if not gap <= LARGEST_GAP[dtype]:
        raise AssertionError(f"expected logits within {LARGEST_GAP[dtype]} of the host's, got {gap:.2g}")
    together = served.generate(tokens.to(setting.device), max_new_tokens=8, eos_token_id=[])
    if dtype == "fp32":
        for row, whole in zip(tokens, together, strict=True):
            alone = served.generate(row[None].to(setting.device), max_new_tokens=8, eos_token_id=[])
            assert_same("greedy tokens of a row alone against those in a batch", alone[0], whole)


def check_batch(name: str, dtype: str, setting: Setting) -> None:
    """Requests that come while others are answered, more than there are rows: greedy tokens are those of each alone."""
    from study.model_cases import SERVED  # needs transformers

    engine = init_inference(SERVED[name].build(0.2).eval().to(setting.device), dtype=dtype, max_out_tokens=16)
    generator = torch.Generator().manual_seed(0)
    asked = [(torch.randint(3, 60, (length,), generator=generator), most)
             for length, most in ((1, 9), (10, 6), (4, 12), (7, 1), (2, 14))]  # fmt: skip
    batch, requests = ContinuousBatch(engine, rows=2, chunk=4), []
    while asked or batch.running or batch.waiting:
        if asked:
            prompt, most = asked.pop()
            alone = engine.generate([prompt.to(setting.device)], max_new_tokens=most, eos_token_id=[])[0]
            requests.append((batch.add(prompt, max_new_tokens=most, eos_token_id=[]), alone[-most:]))
        batch.step()
    batch.close()
    for request, alone in requests:
        assert_same(f"tokens of {len(request.prompt)} and more", torch.tensor(request.tokens), alone.cpu())


def offload_checks(setting: Setting) -> Iterator[Outcome]:
    for dtype in (torch.float32, torch.bfloat16):
        for mode in ("state", "gradients", "full"):
            for in_files in (False, True):
                name = f"offload: {mode}, {'files' if in_files else 'host memory'}, {str(dtype).removeprefix('torch.')}"
                yield outcome(name, functools.partial(check_offload, mode, in_files, dtype, setting))


def inference_checks(setting: Setting) -> Iterator[Outcome]:
    for dtype in LARGEST_GAP:
        for is_compiled in (False,) if setting.is_rehearsal else (False, True):
            name = f"inference: {dtype}, {'compiled' if is_compiled else 'eager'}"
            yield outcome(name, functools.partial(check_inference, dtype, is_compiled, setting))
    for name in BATCHED:
        for dtype in ("fp32", "int8"):
            yield outcome(f"running batch: {name}, {dtype}", functools.partial(check_batch, name, dtype, setting))
