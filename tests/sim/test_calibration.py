"""Calibrated int4: GPTQ against the paper in float64, passes against whole ones, models, ranks, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import pytest
import torch
from test_inference import SLOW, gpt, logits_of, model_of, perplexity, text_of_python, trained
from torch import Tensor, nn

from onebit.comm import SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import init_inference
from onebit.zero.inference.calibration import calibrate, gptq
from onebit.zero.inference.layers import serve_packed
from onebit.zero.inference.packed import Groups, Rows


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- one matrix


def by_the_paper(w_NK: Tensor, x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with blocks of one column, in float64: (the matrix, for each row its least distance to a tie)."""
    w_NK, x_TK = w_NK.double(), x_TK.double()
    K = w_NK.shape[1]
    hessian = 2 * x_TK.T @ x_TK
    is_dead = hessian.diagonal() == 0
    damping = 0.01 * hessian.diagonal().mean()
    hessian += torch.diag(damping + is_dead.double())
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian)).T
    done, margin = torch.zeros_like(w_NK), torch.full((len(w_NK),), torch.inf, dtype=torch.float64)
    for k in range(K):
        if k % group == 0:
            low, high = w_NK[:, k : k + group].amin(1), w_NK[:, k : k + group].amax(1)
            scale = ((high - low) / 15).bfloat16().double()
            zero = (low + 8 * scale).bfloat16().double()
        place = torch.where(scale > 0, (w_NK[:, k] - zero) / scale, 0) + 8
        margin = torch.minimum(margin, ((place % 1) - 0.5).abs())
        done[:, k] = (place.round().clamp(0, 15) - 8) * scale + zero
        error = (w_NK[:, k] - done[:, k]) / inverse[k, k]
        w_NK[:, k:] -= error[:, None] * inverse[k, k:]
    return done, margin


@pytest.mark.parametrize(
    ("N", "K", "tokens", "group"),
    [
        (24, 256, 600, 128),
        (24, 192, 500, 64),
        (24, 96, 300, 32),
        (24, 45, 300, 32),  # the last group is shorter
        (24, 7, 50, 32),
        (5, 1, 9, 32),
        (1, 64, 300, 64),
        (24, 64, 1, 64),  # one token: all of the Hessian but damping has rank 1
    ],
)
def test_codes_are_the_papers(N: int, K: int, tokens: int, group: int) -> None:
    """Rows are independent. One that comes near a tie is passed over: float32 may round it the other way."""
    mixing = torch.eye(K) + 0.5 * drawn(K, K, seed=2) / K**0.5  # inputs that depend on each other
    w_NK, x_TK = drawn(N, K), drawn(tokens, K, seed=1) @ mixing
    x_TK[:, K // 2 : K // 2 + K // 20] = 0  # dead features
    expected, margin = by_the_paper(w_NK, x_TK, group)
    found = gptq(w_NK, x_TK.T @ x_TK)
    is_sure = margin > 1e-4
    assert is_sure.float().mean() >= 0.8 and found.group == group
    # Codes are equal if the values are: a step is about .3.
    torch.testing.assert_close(found.weight[is_sure].double(), expected[is_sure], rtol=0, atol=1e-5)


def test_outputs_are_nearer_and_dead_inputs_are_rounded_to_nearest() -> None:
    w_NK, x_TK = drawn(32, 128), drawn(400, 128, seed=1) @ drawn(128, 128, seed=2)
    x_TK[:, 5] = 0

    def error(served: Groups) -> float:
        return float((x_TK @ (served.weight - w_NK).T).square().mean())

    calibrated, rounded = gptq(w_NK, x_TK.T @ x_TK), Groups.quantized(w_NK)
    assert error(calibrated) < 0.7 * error(rounded)
    step = ((w_NK.amax(1) - w_NK.amin(1)) / 15)[:, None]
    assert ((calibrated.weight - w_NK)[:, 5:6].abs() <= 0.51 * step).all()


def test_without_any_input_all_weights_are_rounded_to_nearest() -> None:
    w_NK = drawn(16, 64).bfloat16()
    served = gptq(w_NK, torch.zeros(64, 64))
    assert torch.equal(served.weight, Groups.quantized(w_NK).weight) and served.dtype == torch.bfloat16


# ---------------------------------------------------------------- passes


class Residual(nn.Sequential):
    calls = 0

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + super().forward(x)


class Toy(nn.Module):
    """Five blocks in a list, and what else reads their outputs: `path`. Reads floats [B, 8]."""

    def __init__(self, path: str):
        super().__init__()
        torch.manual_seed(1)
        self.path = path
        self.first, self.head, self.other = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(Residual() for _ in range(5))

    def forward(self, text: Tensor) -> Tensor:
        x = start = self.first(text)
        outputs: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if self.path == "some" and number == 4 and text[0, 0] > 0:
                continue
            x = x + outputs[4 - number] if self.path == "skips" and number > 2 else x
            x = block(block(x)) if self.path == "twice" else block(x)
            x = x + start if self.path == "start" else x
            x = x + outputs[-1] if self.path == "sum" and outputs else x
            outputs.append(x)
        return self.head(torch.stack(outputs).mean(0) if self.path == "mean" else x)


def layer_by_layer(model: Toy, batches: Sequence[Tensor]) -> None:
    """Whole passes for each block, with the blocks before it packed."""
    for names in (["first"], *([f"blocks.{k}.0", f"blocks.{k}.2"] for k in range(5)), ["head"]):
        inputs: list[tuple[str, Tensor]] = []
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(
                partial(lambda to, name, _, x: to.append((name, x[0])), inputs, name)
            )
            for name in names
        ]
        for batch in batches:
            model(batch)
        for hook in hooks:
            hook.remove()
        for name in names:
            hessian = sum((x.T @ x for reader, x in inputs if reader == name), torch.zeros(()))
            serve_packed(model, name, gptq(cast(Tensor, model.get_submodule(name).weight).detach(), hessian))


@pytest.mark.parametrize("path", ["chain", "start", "skips", "sum", "mean", "twice", "some"])
def test_a_block_reads_what_packed_blocks_before_it_give(path: str) -> None:
    """Whatever else reads their outputs. Of a chain each block is computed twice for a batch, and at first."""
    batches = [drawn(20, 8, seed=seed) for seed in range(3)]
    batches[0][0, 0] = -1 if path == "some" else 1  # the other batches leave out a block
    expected, found = Toy(path), Toy(path)
    with torch.no_grad():
        layer_by_layer(expected, batches)
    calibrate(found, batches, SimTransport())
    state = found.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in expected.state_dict().items())
    assert not any("forward" in vars(module) for module in found.modules())
    assert all(isinstance(found.get_submodule(f"blocks.{k}.0.matrix"), Groups) for k in range(5))
    calls = [cast(Residual, block).calls for block in found.blocks]
    assert (max(calls) <= 2 + 2 * len(batches)) == (path in ("chain", "start", "some")), calls


# ---------------------------------------------------------------- models


def samples(count: int = 12) -> list[Tensor]:
    text = text_of_python()
    return [text[k * 1000 : k * 1000 + 8 * 48].view(8, 48) for k in range(1, count + 1)]


def distance(model: Callable[..., object], whole: Tensor, tokens: Tensor) -> float:
    """The mean divergence of the predictions from those of the whole model, in nats."""
    served = logits_of(model, tokens).float().log_softmax(-1)
    return float(nn.functional.kl_div(served, whole.log_softmax(-1), log_target=True, reduction="batchmean"))


@pytest.mark.parametrize(
    "kind", ["gpt", *(pytest.param(kind, marks=SLOW) for kind in ("llama", "gpt2", "qwen2 in windows", "mixtral"))]
)
def test_predictions_are_nearer_than_with_rounded_weights(kind: str) -> None:
    """On other text than that of the samples: of a byte GPT, Llama, Conv1D, biases, and experts, which stay in int8."""
    model, tokens = model_of(kind), text_of_python()[40_000 : 40_000 + 20 * 48].view(20, 48)
    before = [p.clone() for p in model.parameters()]
    whole = logits_of(model, tokens).float()
    engine = init_inference(model, dtype="int4", calibration=samples())
    assert distance(engine, whole, tokens) < 0.8 * distance(init_inference(model, dtype="int4"), whole, tokens)
    assert all(map(torch.equal, before, model.parameters()))
    assert len(engine.generate([tokens[0, :5]], max_new_tokens=3)[0]) == 5 + 3


@pytest.mark.slow
def test_calibrated_weights_keep_the_perplexity() -> None:
    model = trained("gpt")
    before = perplexity(init_inference(model))
    engine = init_inference(model, dtype="int4", calibration=samples())
    assert perplexity(engine) == pytest.approx(before, rel=0.01)


def test_a_tied_head_stays_in_int8_and_keywords_are_a_batch() -> None:
    tokens = samples(2)
    by_name = init_inference(gpt(), dtype="int4", calibration=[{"text_BT": batch} for batch in tokens])
    engine = init_inference(gpt(), dtype="int4", calibration=tokens)
    assert torch.equal(logits_of(engine, tokens[0]), logits_of(by_name, tokens[0]))
    assert isinstance(engine.module.bytes.matrix, Rows)  # type: ignore[union-attr]
    one = init_inference(gpt(), dtype="int4", calibration=torch.cat(tokens))  # sums in another order
    assert distance(one, logits_of(engine, tokens[0]), tokens[0]) < 1e-3


def test_layers_that_no_batch_reaches_are_named_and_rounded(caplog: pytest.LogCaptureFixture) -> None:
    model = Toy("chain")
    with caplog.at_level(logging.WARNING):
        engine = init_inference(model, dtype="int4", calibration=[drawn(20, 8)])
    assert "other are rounded to nearest: no batch of calibration reaches them" in caplog.text
    assert torch.equal(engine.module.other.weight, Groups.quantized(model.other.weight).weight)  # type: ignore[union-attr]


# ---------------------------------------------------------------- ranks and refusals


def test_ranks_calibrate_their_parts() -> None:
    """By their own inputs: "rowwise" parts do not make up for other ranks' errors, but for their own."""
    tokens = text_of_python()[40_000 : 40_000 + 20 * 48].view(20, 48)
    whole = logits_of(gpt(), tokens)

    def serve(transport: SimTransport, calibration: list[Tensor] | None) -> Tensor:
        return logits_of(
            init_inference(gpt(), dtype="int4", mp_size=2, transport=transport, calibration=calibration), tokens
        )

    first, second = run_ranks(2, lambda transport: serve(transport, samples()))
    rounded = run_ranks(2, lambda transport: serve(transport, None))[0]
    assert torch.equal(first, second)
    assert distance(lambda _: first, whole, tokens) < 0.8 * distance(lambda _: rounded, whole, tokens)


def test_ranks_with_different_batches() -> None:
    def serve(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match="ranks have different batches"):
            init_inference(gpt(), dtype="int4", mp_size=2, transport=transport, calibration=samples(1 + transport.rank))

    run_ranks(2, serve)


def test_what_cannot_be_calibrated() -> None:
    for dtype in ("int8", "bf16", None):
        with pytest.raises(ValueError, match='calibration is for weights in int4: write dtype "int4"'):
            init_inference(gpt(), dtype=dtype, calibration=samples(1))
    with pytest.raises(ValueError, match="calibration has no batches: pass a few hundred samples"):
        init_inference(gpt(), dtype="int4", calibration=[])
    with pytest.raises(
        TypeError, match=r"expected tensors of tokens \[B, T\] or dicts of the model's keywords, got list"
    ):
        init_inference(gpt(), dtype="int4", calibration=[[1, 2]])  # type: ignore[list-item]
    packed = init_inference(gpt(), dtype="int4").module  # as of a file of codes
    with pytest.raises(ValueError, match="calibration is for weights in floats, and these are packed already"):
        init_inference(packed, dtype="int4", calibration=samples(1))
    odd = drawn(20, 8)
    odd[3, 4] = torch.nan
    with pytest.raises(ValueError, match="calibration: inputs of first are not finite: look for NaN in the batches"):
        init_inference(Toy("chain"), dtype="int4", calibration=[drawn(20, 8), odd])
    with pytest.raises(ValueError, match="Embedding has no linear layers to calibrate: leave calibration out"):
        calibrate(nn.Embedding(3, 4), [torch.zeros(1, 2, dtype=torch.int64)], SimTransport())
