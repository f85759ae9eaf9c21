"""What crosses stages as frames: pipelines over Gloo against one process, and the wire's own rules without any rank."""

from __future__ import annotations

import math
from functools import cache

import activation_ranks
import pytest
import torch
from ranks import Ended, run_torchrun
from torch import Tensor

from onebit.comm.codecs.tensors import decode_, encode, frame_bytes
from onebit.zero.pipeline.wire import WIRES, quantised_boundary

FLOATS = ("float32", "bfloat16", "float16")
BITS = {"bf16": 16, "int8": 8, "int4": 4}

# One start for each number of ranks. Every case is trained for two steps, with an evaluation in between.
TRAINED: dict[str, tuple[int, dict]] = {
    "gpipe": (2, {"schedule": "ScheduleGPipe"}),
    "1f1b": (2, {"schedule": "Schedule1F1B"}),
    "interleaved": (2, {"schedule": "ScheduleInterleaved1F1B", "per_rank": 2}),
    "zbv": (2, {"schedule": "ScheduleZBVZeroBubble", "per_rank": 2}),
    "int4 down, int8 up": (2, {"schedule": "Schedule1F1B", "forward": "int4"}),
    "bf16": (2, {"schedule": "Schedule1F1B", "forward": "bf16", "backward": "bf16"}),
    "activations alone": (2, {"schedule": "Schedule1F1B", "backward": "fp32"}),
    "rows of one": (2, {"schedule": "Schedule1F1B", "rows": 1, "micro_batches": 2}),
    "several tensors": (2, {"schedule": "Schedule1F1B", "layer": "Several"}),
    "several, interleaved": (2, {"schedule": "ScheduleInterleaved1F1B", "per_rank": 2, "layer": "Several"}),
    "in bfloat16": (2, {"schedule": "Schedule1F1B", "dtype": "bfloat16"}),
    "in float16": (2, {"schedule": "Schedule1F1B", "dtype": "float16"}),
    "error feedback": (2, {"schedule": "Schedule1F1B", "backward": "int4", "error_feedback": True}),
    "1f1b, 4": (4, {"schedule": "Schedule1F1B", "forward": "int4"}),
    "interleaved zero bubble, 4": (4, {"schedule": "ScheduleInterleavedZeroBubble", "per_rank": 2}),
    "zbv, 4": (4, {"schedule": "ScheduleZBVZeroBubble", "per_rank": 2}),
}
NOT_FINITE: dict[str, tuple[int, dict]] = {
    "nan": (2, {"schedule": "Schedule1F1B", "layer": "Plain", "input_scale": math.nan}),
    "infinite": (2, {"schedule": "Schedule1F1B", "layer": "Plain", "input_scale": math.inf}),
    "gradients": (2, {"schedule": "Schedule1F1B", "layer": "Plain", "loss_scale": math.inf}),
    "gradients, zbv": (2, {"schedule": "ScheduleZBVZeroBubble", "per_rank": 2, "loss_scale": math.inf}),
    "float16": (2, {"schedule": "Schedule1F1B", "layer": "Plain", "dtype": "float16", "loss_scale": 1e9}),
}
TWINS: dict[str, tuple[int, dict]] = {
    f"twin, {schedule}": (2, {"schedule": schedule, "per_rank": n, "forward": "fp32", "backward": "fp32"})
    for schedule, n in (("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2))
}


CASES = TRAINED | NOT_FINITE | TWINS


@cache
def world_run(ranks: int) -> tuple[list[str], Ended]:
    """The names of the cases, and the run; started by whichever test asks first."""
    names = [name for name, (size, _) in CASES.items() if size == ranks]
    calls = [("plain_twin" if name in TWINS else "train", CASES[name][1]) for name in names]
    return names, run_torchrun(ranks, activation_ranks.run_cases, calls, timeout_s=110)


def results(name: str) -> list[dict]:
    """What each rank found."""
    names, ended = world_run(CASES[name][0])
    return [result[names.index(name)] for result in ended.check().results]


@pytest.mark.parametrize("name", TRAINED)
def test_a_pipeline_computes_what_one_process_with_boundaries_does(name: str) -> None:
    # To the bit: micro-batches add up in the same order in all of these schedules.
    for result in results(name):
        assert result["finite"] and result["largest"] > 0
        assert [result[gap] for gap in ("loss_gap", "grad_gap", "eval_gap")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_sent_is_the_frames_and_nothing_else(name: str) -> None:
    ranks, fields = TRAINED[name]
    case = activation_ranks.Case(**fields)
    rank_of = {k: rank for rank in range(ranks) for k in case.stages_of(rank, ranks)}
    down, up = wire_bytes(case, case.forward, is_forward=True), wire_bytes(case, case.backward, is_forward=False)
    for rank, result in enumerate(results(name)):
        mine = case.stages_of(rank, ranks)
        sent_down = case.micro_batches * down * sum(rank_of.get(k + 1, rank) != rank for k in mine)
        sent_up = case.micro_batches * up * sum(rank_of.get(k - 1, rank) != rank for k in mine)
        assert result["train_bytes"] == 2 * (sent_down + sent_up)
        assert result["eval_bytes"] == (0 if case.is_v else sent_down)
        if case.layer != "Several" and "fp32" not in (case.forward, case.backward):
            assert result["types"] == ["torch.uint8"]


def wire_bytes(case: activation_ranks.Case, wire: str, is_forward: bool) -> int:
    """Of one micro-batch at one cut, from the layout: codes, a scale of two bytes per block, up to a multiple of 16."""
    sizes = [case.rows * activation_ranks.WIDTH] + ([case.rows * 5] if case.layer == "Several" else [])
    integers = 8 * case.rows * activation_ranks.WIDTH if case.layer == "Several" and is_forward else 0
    if wire == "fp32":
        return integers + sum(sizes) * getattr(torch, case.dtype).itemsize
    block = 8 if wire == "bf16" else 64
    blocks = [-(-n // block) for n in sizes]
    scales = 0 if wire == "bf16" else 2
    return integers + sum(-(-(j * block * BITS[wire] // 8 + j * scales) // 16) * 16 for j in blocks)


def test_error_feedback_remembers_each_gradient_that_goes_up_and_nothing_else() -> None:
    assert [result["owed"] for result in results("error feedback")] == [0, 4]
    assert all(result["owed"] == 0 for result in results("1f1b"))


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_shows_on_every_rank(name: str) -> None:
    assert [result["finite"] for result in results(name)] == [False] * NOT_FINITE[name][0]


@pytest.mark.parametrize("name", TWINS)
def test_without_codecs_it_is_torchs_stage(name: str) -> None:
    for result in results(name):
        assert result["same"] and result["compared"] >= 2


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wire", BITS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (64,), (65,), (3, 5, 7), (4, 64)])
def test_a_tensor_comes_back_within_half_a_step(wire: str, shape: tuple[int, ...], dtype: str) -> None:
    codec, x = WIRES[wire], torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    assert codec is not None
    frame = encode(codec, x)
    assert frame.shape == (frame_bytes(codec, x.numel()),) and frame.dtype == torch.uint8
    out = torch.full_like(x, math.nan)
    decode_(codec, frame, out)
    levels = {"bf16": 128.0, "int8": 127.0, "int4": 7.0}[wire]
    largest = float(x.abs().max()) if x.numel() else 0.0
    # Half a step of a scale that bfloat16 rounds up by 1 % at most, and the rounding of the type.
    assert bool(((out - x).float().abs() <= largest * (0.51 / levels + torch.finfo(x.dtype).eps)).all())


def test_a_tensor_that_does_not_lie_in_one_piece_is_sent_in_the_order_of_its_elements() -> None:
    codec, x = WIRES["int8"], torch.randn(6, 70, generator=torch.Generator().manual_seed(1))
    assert codec is not None
    assert torch.equal(encode(codec, x.T), encode(codec, x.T.contiguous()))
    out = torch.empty(70, 6).T
    decode_(codec, encode(codec, x), out)
    assert torch.equal(out, sent(x))


def test_encoding_leaves_its_input_alone() -> None:
    codec, x = WIRES["int4"], torch.randn(64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert codec is not None
    before = x.detach().clone()
    encode(codec, x)
    assert torch.equal(x, before)


def sent(x: Tensor, wire: str = "int8") -> Tensor:
    return quantised_boundary(x, WIRES[wire], None).detach()


def test_a_boundary_rounds_values_down_the_line_and_gradients_up() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(2, 5, 30, generator=generator)
    x.requires_grad_()
    y = quantised_boundary(x, WIRES["int4"], WIRES["int8"])
    (y * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(y.detach(), sent(x, "int4")) and torch.equal(x.grad, sent(weights))
    assert not torch.equal(y, x) and not torch.equal(x.grad, weights)


def test_a_boundary_without_codecs_changes_nothing() -> None:
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(1), requires_grad=True)
    (quantised_boundary(x, None, None) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0)) and torch.equal(quantised_boundary(x, None, None), x)


def test_error_feedback_returns_what_frames_left_out() -> None:
    codec, x = WIRES["int4"], torch.randn(100, generator=torch.Generator().manual_seed(1))
    assert codec is not None
    error, total, out = torch.zeros(1, 128), torch.zeros(100), torch.empty(100)
    for _ in range(5):
        decode_(codec, encode(codec, x, error), out)
        total += out
    # Conservation: sent + kept = given. float32 sums of five numbers.
    torch.testing.assert_close(total + error[0, :100], 5 * x, rtol=0, atol=5e-6)
    assert bool((error[0, 100:] == 0).all()) and float(error.abs().max()) > 0


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_arrives_as_one(wire: str, bad: float) -> None:
    x = torch.ones(200)
    x[70] = bad
    assert not sent(x, wire)[70].isfinite() and bool(sent(x, wire)[128:].isfinite().all())
