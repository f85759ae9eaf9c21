"""`bench.py time_to_loss`: what a budget buys, by hand; every way trains; PowerSGD against a loop of its own; a run."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from bench.peer_deepspeed import ROOT, python, why_not_prepared
from study.catalog import load_task
from study.tasks import LargeLM
from time_to_loss import forecasts, losses, report
from time_to_loss.losses import Found, Run
from time_to_loss.main import main
from time_to_loss.peers import DeMo, LowRank
from time_to_loss.seconds import Timed, read
from time_to_loss.ways import WAYS

from onebit.comm import SimTransport, run_ranks

DEEPSPEED_S = 300.0  # importing DeepSpeed takes 6 s of a processor, and minutes of a busy machine


def found(way: str, steps: int, loss: float, phases: dict[str, int] | None = None, lr: float = 1e-2) -> Found:
    run = Run("byte-lm", way, 4, 4, steps, lr, 0)
    return Found(run, loss, phases or {"plain": steps}, bits=0.0, seconds=1.0, revision="x")


def timed(way: str, **seconds: float) -> Timed:
    return Timed("1gbit", 4, 1e6, 0.1, way, seconds, dict.fromkeys(seconds, 3), "x")


def test_a_budget_buys_what_lies_between_two_runs() -> None:
    runs = [found("DDP float32", 10, 4.0), found("DDP float32", 1000, 2.0), found("DDP float32", 1000, 9.0, lr=1.0)]
    (curve,) = report.curves(runs, [timed("DDP float32", plain=0.1)])["1gbit"]
    assert curve.seconds == (1.0, 100.0) and curve.losses == (4.0, 2.0)
    assert curve.at(0.5) is None
    assert [curve.at(s) for s in (1.0, 10.0, 100.0, 500.0)] == pytest.approx([4.0, 3.0, 2.0, 2.0])


def test_a_runs_seconds_are_those_of_its_phases() -> None:
    run = found("OnebitAdam", 20, 3.0, {"warmup": 5, "refresh": 1, "compressed": 14})
    (line,) = report.curves([run], [timed("OnebitAdam", warmup=2.0, refresh=1.0, compressed=0.5)])["1gbit"]
    assert line.seconds == (18.0,)
    (line,) = report.curves([run], [timed("OnebitAdam", warmup=2.0, compressed=0.5)])["1gbit"]
    assert line.seconds == (19.0,)  # a refresh is timed as the warm-up where it was not seen
    with pytest.raises(KeyError):
        report.curves([run], [timed("OnebitAdam", warmup=2.0)])


def test_a_way_has_the_seconds_of_the_one_it_names_where_it_has_none() -> None:
    lines = [timed("DiLoCo int8, H = 32", plain=0.2)]
    others = [f"DiLoCo int8, outer {outer}, H = 32" for outer in ("1 and 0", ".7 and .6")]
    others.append("Muon in DiLoCo int8, H = 32")
    assert [(one.way, one.seconds) for one in report.everyones(lines)][1:] == [(way, {"plain": 0.2}) for way in others]
    lines += [timed(way, plain=0.1) for way in others]
    assert report.everyones(lines) == lines


def test_a_frontier_is_convex_and_falls() -> None:
    """By hand, over powers of ten: of (1, 9), (10, 5), (100, 4), (1000, 1) the third lies above a line."""
    lines = [report.Curve("a", (1.0, 100.0), (9.0, 4.0)), report.Curve("b", (10.0, 100.0, 1e3), (5.0, 9.0, 1.0))]
    assert report.frontier(lines) == [(1.0, 9.0), (10.0, 5.0), (1e3, 1.0)]
    assert report.frontier([]) == []


def test_whole_runs_count_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "WHOLE_STEPS", (20,))
    runs = [replace(found("OnebitAdam", 20, 3.0, {"warmup": 5, "compressed": 15}), bits=50.0), found("DeMo", 10, 2.0)]
    seconds = [timed("OnebitAdam", warmup=2.0, compressed=0.5), timed("DeMo", plain=1.0)]
    text = "\n".join(report.report(runs, seconds))
    assert "| OnebitAdam | 3.000 | 2.50 | 18 |" in text.splitlines()
    assert "| DeMo |" not in text.split("## Runs of 20 steps")[1].split("##")[0]


def test_losses_are_means_of_the_rate_that_most_seeds_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "revision", lambda: "x")
    runs = [found("DDP float32", 10, 4.0), found("DDP float32", 10, 3.0, lr=1.0), found("DDP float32", 20, 2.5)]
    runs += [replace(one, run=replace(one.run, seed=1), loss=one.loss - 2.0) for one in runs[:1]]
    text = "\n".join(report.report(runs, [timed("DDP float32", plain=0.2)]))
    assert "| DDP float32 | 3.000 (2.000 to 4.000; 0.01) | 2.500 (0.01) |" in text and "seeds 0, 1," in text


def test_another_form_has_the_loss_of_the_one_it_names() -> None:
    lines = report.curves([found("DDP float32", 10, 4.0)], [timed("DDP bfloat16", plain=0.2)])["1gbit"]
    assert [(line.way, line.seconds, line.losses) for line in lines] == [("DDP bfloat16", (2.0,), (4.0,))]


def test_a_control_has_the_seconds_of_its_hosts_and_times_one_worker_alone() -> None:
    alone = timed("one worker alone", plain=0.4)
    control = [timed("OnebitAdam", warmup=2.0, compressed=0.5, refresh=3.0), alone]
    lines = "\n".join(report.report([found("DeMo", 10, 2.0)], [timed("DeMo", plain=1.0)], control)).splitlines()
    assert lines.count("| OnebitAdam | 2.00 warmup, 0.50 compressed, 3.00 refresh (1.25) |") == 1
    assert lines.count("| one worker alone | 0.40 (1.00) |") == 1
    without = "\n".join(report.report([found("DeMo", 10, 2.0)], [timed("DeMo", plain=1.0)], control[:1])).splitlines()
    assert "| OnebitAdam | 2.00 warmup, 0.50 compressed, 3.00 refresh |" in without


def test_low_rank_gradients_are_those_of_the_paper() -> None:
    """Two ranks against a loop in float64: approximate the mean of what was owed, keep one's own remainder."""
    ranks, rows, columns, steps = 2, 12, 9, 4
    gradients = numpy.random.default_rng(0).standard_normal((steps, ranks, rows, columns))
    right = torch.randn(columns, 1, generator=torch.Generator().manual_seed(0)).double().numpy()
    errors, expected = numpy.zeros((ranks, rows, columns)), []
    for step in range(steps):
        owed = gradients[step] + errors
        left = (owed @ right).mean(0)
        left /= numpy.linalg.norm(left)
        right = numpy.einsum("wrc,rk->wck", owed, left).mean(0)
        expected.append(left @ right.T)
        errors = owed - expected[-1]

    def work(transport: SimTransport) -> list[torch.Tensor]:
        p = torch.nn.Parameter(torch.zeros(rows, columns))
        optimizer, seen = LowRank([{"params": [p]}], transport, rank=1, start=0), []
        for step in range(steps):
            p.grad = torch.tensor(gradients[step, transport.rank], dtype=torch.float32)
            optimizer.step()
            seen.append(p.grad.clone())
        return seen

    for seen in run_ranks(ranks, work):
        for ours, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(ours.double(), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def test_demo_sends_the_largest_frequencies_and_keeps_the_rest() -> None:
    """Two ranks against a loop in float64, with a cosine transform summed by hand; a matrix of two blocks, a vector."""
    ranks, steps, top, lr, decay = 2, 3, 2, 0.1, 0.9
    shapes = {"matrix": (4, 67 * 2), "vector": (8,)}
    generator = numpy.random.default_rng(1)
    gradients = {name: generator.standard_normal((steps, ranks, *shape)) for name, shape in shapes.items()}

    def transform(block: numpy.ndarray) -> numpy.ndarray:
        out = block
        for axis, n in enumerate(block.shape):
            waves = [[numpy.cos(numpy.pi * (j + 0.5) * k / n) for j in range(n)] for k in range(n)]
            waves = numpy.array(waves) * numpy.where(numpy.arange(n) > 0, 2 / n, 1 / n)[:, None] ** 0.5
            out = numpy.moveaxis(numpy.tensordot(waves, out, (1, axis)), 0, axis)
        return out

    def back(block: numpy.ndarray) -> numpy.ndarray:
        """The transform is orthonormal: its inverse is the sum of basis vectors, each found by transforming units."""
        size = block.size
        units = numpy.stack([transform(unit.reshape(block.shape)).ravel() for unit in numpy.eye(size)])
        return (units @ block.ravel()).reshape(block.shape)

    def blocks(name: str, x: numpy.ndarray) -> list[numpy.ndarray]:
        """Views. 134 = 2 · 67, whose largest divisor of at most 64 is 2."""
        return [x[:, c : c + 2] for c in range(0, 134, 2)] if name == "matrix" else [x[None]]

    expected = {}
    for name, shape in shapes.items():
        p, momenta = numpy.zeros(shape), numpy.zeros((ranks, *shape))
        for step in range(steps):
            total = [numpy.zeros(block.shape) for block in blocks(name, p)]
            senders = [numpy.zeros(block.shape) for block in blocks(name, p)]
            for rank in range(ranks):
                momenta[rank] = decay * momenta[rank] + lr * gradients[name][step, rank]
                for k, block in enumerate(blocks(name, momenta[rank])):
                    found = transform(block)
                    kept = numpy.argsort(-numpy.abs(found).ravel())[:top]
                    sent = numpy.zeros(found.size)
                    sent[kept] = found.ravel()[kept]
                    total[k] += sent.reshape(found.shape)
                    senders[k].ravel()[kept] += 1
                    block -= back(sent.reshape(found.shape))
            for k, block in enumerate(blocks(name, p)):
                block *= 1 - lr * 0.5
                block -= lr * numpy.sign(back(total[k] / numpy.maximum(senders[k], 1)))
        expected[name] = p

    def work(transport: SimTransport) -> dict[str, torch.Tensor]:
        params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        group = {"params": list(params.values()), "lr": lr, "weight_decay": 0.5}
        optimizer = DeMo([group], transport, decay=decay, top=top)
        for step in range(steps):
            for name, p in params.items():
                p.grad = torch.tensor(gradients[name][step, transport.rank], dtype=torch.float32)
            optimizer.step()
        assert transport.sent_bytes == steps * 6 * top * (67 + 1)
        return params

    for found in run_ranks(ranks, work):
        for name, p in found.items():
            torch.testing.assert_close(p.detach().double(), torch.tensor(expected[name]), rtol=1e-5, atol=1e-6)


def test_every_way_trains_and_what_was_run_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, seconds = tmp_path / "runs" / "losses.jsonl", tmp_path / "seconds.jsonl"
    here = [name for name, way in WAYS.items() if not way.is_deepspeeds]
    asked = ["losses", "--task", "digits", "--results", str(results), "--lengths", "4", "8", "--lrs", "1e-2"]
    asked += ["--ways", *here]
    main([*asked, "--ranks", "2", "--processes", "2"])
    runs = losses.read(results)
    own = {name for name in here if WAYS[name].make is not None}
    assert {(one.run.way, one.run.steps) for one in runs} == {(name, steps) for name in own for steps in (4, 8)}
    assert all(sum(one.phases.values()) == one.run.steps for one in runs)
    written = results.read_text()
    main([*asked, "--ranks", "2"])
    assert results.read_text() == written

    lines = [timed(name, **dict.fromkeys(way.phases, 0.1)) for name, way in WAYS.items() if way.timed]
    seconds.write_text("".join(json.dumps(vars(line)) + "\n" for line in lines))
    capsys.readouterr()
    main(["report", "--losses", str(results), "--seconds", str(seconds), "--record", str(tmp_path / "x.md")])
    said = capsys.readouterr().out
    assert all(said.count(f"| {name} |") == 1 + (name in own) for name in here)
    assert (tmp_path / "x.md").read_text().startswith(said.rstrip("\n")) and (tmp_path / "x.png").stat().st_size > 0


@pytest.mark.net
@pytest.mark.thorough
@pytest.mark.usefixtures("emulated_hosts", "forks")
def test_steps_are_timed_on_emulated_hosts(tmp_path: Path) -> None:
    ways = ["DDP float32", "OnebitAdam, delay 1", "ZeroOneAdam, H = 8", "local steps in one bit, H = 32, a tenth at 4"]
    small = ["--rates", "100mbit", "--hosts", "2", "--params", "1e5", "--compute", "0.01", "--budget", "1"]
    record = tmp_path / "s.md"
    main(["seconds", "--results", str(tmp_path / "s.jsonl"), "--record", str(record), "--ways", *ways, *small])
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [line["way"] for line in lines] == ways
    for line in lines:
        phases = set(WAYS[line["way"]].phases)
        seconds = line["seconds"]
        assert set(seconds) == phases
        assert f"\n| {line['way']} | {seconds[WAYS[line['way']].phases[-1]]:.3f}" in record.read_text()
        assert min(seconds.values()) < 1  # .01 s of compute, and traffic of .1 MB
        if "round" in phases:  # the two are a difference of cycles, which noise may turn round: their sums are not
            assert all(seconds["round"] + (n - 1) * seconds["local"] > 0.01 * n for n in (4, 32))
        else:
            assert all(s > 0.01 for s in seconds.values())


@pytest.mark.net
@pytest.mark.thorough
@pytest.mark.usefixtures("emulated_hosts", "forks")
def test_forecasts_stand_beside_what_steps_take(tmp_path: Path) -> None:
    small = ["--params", "1e6", "--compute", "0.01", "--hosts", "2", "--rates", "1gbit", "--budget", "0.2"]
    forecasts.main([*small, "--folder", str(tmp_path), "--record", str(tmp_path / "record.md")])
    text = (tmp_path / "record.md").read_text()
    rows = [
        line.split(" | ")
        for line in text.splitlines()
        if line.startswith(tuple(f"| {m} |" for m in forecasts.MEASURED))
    ]
    assert len(rows) == len(forecasts.MEASURED) and f"of {len(rows)} are within 10%" in text
    said = json.loads((tmp_path / "2-1gbit.json").read_text())["predicted"]["OnebitAdam"]["hidden"]
    (found,) = (t.seconds["compressed"] for t in read(tmp_path / "2-1gbit.jsonl") if t.way == "OnebitAdam")
    assert f"| OnebitAdam | {said:.3f}, {found:.3f} ({said / found - 1:+.0%}) |" in text


def test_deepspeeds_ways_are_left_out_aloud_without_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time_to_loss.main.why_not_prepared", lambda: "no environment here")
    main(["losses", "--results", str(tmp_path / "x.jsonl"), "--ways", "DeepSpeed OneBitAdam"])
    said = capsys.readouterr().err
    assert "left out: DeepSpeed OneBitAdam: no environment here" in said and not (tmp_path / "x.jsonl").exists()


needs_deepspeed = pytest.mark.skipif(why_not_prepared() is not None, reason=str(why_not_prepared()))


@pytest.mark.slow
@pytest.mark.timeout(DEEPSPEED_S + 20)
@needs_deepspeed
def test_deepspeeds_optimizers_train_in_its_environment(tmp_path: Path) -> None:
    """Bits by hand: 32 in a dense step, else two phases of a half, in tensors padded to 16, and 8 bytes of scales."""
    results, steps, ranks = tmp_path / "losses.jsonl", 40, 2
    names = [name for name, way in WAYS.items() if way.is_deepspeeds]
    asked = ["losses", "--results", str(results), "--lengths", str(steps), "--lrs", "1e-2"]
    main([*asked, "--ways", *names, "--ranks", str(ranks)])
    runs = {one.run.way: one for one in losses.read(results)}
    assert runs["DeepSpeed OneBitAdam"].phases == {"warmup": 5, "compressed": 35}  # the first only tries the collective
    assert runs["DeepSpeed ZeroOneAdam"].phases == {"variance": 28, "compressed": 12}  # steps 2 to 16, 18, ... 40
    frozen = runs["DeepSpeed ZeroOneAdam, local steps"].phases
    assert frozen == {"variance": 4, "compressed": 1, "round": 20, "local": 15}
    numels = [p.numel() for p in losses.load_task("byte-lm").build(0).parameters()]
    one_bit = sum(-(-n // 16) * 16 + 8 * 8 for n in numels)
    for one in runs.values():
        dense, local = (one.phases.get(phase, 0) for phase in (WAYS[one.run.way].phases[0], "local"))
        bits = dense * 32 * sum(numels) + (steps - dense - local) * one_bit
        assert one.loss < 5.0 and one.bits == pytest.approx(bits / sum(numels))


TWIN = """
import sys
import deepspeed, torch
import torch.distributed as dist
from bench.peer_deepspeed import start
from time_to_loss.deepspeed import Stepped

kind, options = sys.argv[1], {"lr": 1e-2} | eval(sys.argv[2])
start()

class Model(torch.nn.Module):
    # Its gradients are what it is given: matrix products differ by where in memory their factors lie.

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in ((30, 20), (30,), (3, 30)))

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.weights, gradients))

ours, theirs = Model(), Model()
stepped = Stepped(kind, [{"params": list(ours.parameters())}], "dense", **options)
optimizer = {"type": {"OnebitAdam": "OneBitAdam"}.get(kind, kind), "params": options}
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "optimizer": optimizer}
engine, *_ = deepspeed.initialize(model=theirs, model_parameters=theirs.parameters(), config=config)
torch.manual_seed(1 + dist.get_rank())
for step in range(12):
    gradients = [torch.randn_like(p) for p in ours.parameters()]
    ours(gradients).backward()
    stepped.step()
    stepped.zero_grad()
    engine.backward(engine(gradients))
    engine.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p, q), step
assert all(p.abs().min() > 0 for p in ours.parameters())
"""


@pytest.mark.slow
@pytest.mark.timeout(DEEPSPEED_S + 20)
@needs_deepspeed
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("OnebitAdam", {"freeze_step": 4}),
        ("ZeroOneAdam", {"var_update_scaler": 1}),
        ("ZeroOneAdam", {"var_update_scaler": 1, "var_freeze_step": 5, "local_step_scaler": 2}),
    ],
)
def test_steps_are_those_of_deepspeeds_engine(kind: str, options: dict, tmp_path: Path) -> None:
    """To the bit, though its engine is not used: who averages gradients, and when, is all that it adds here."""
    script = tmp_path / "twin.py"
    script.write_text(TWIN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["env", f"PYTHONPATH={ROOT}:{ROOT / 'scripts'}", *python(), *torchrun, str(script), kind, repr(options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEEPSPEED_S)
    assert ended.returncode == 0, ended.stderr[:3000]


def test_the_command_for_a_gpu_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/gpu.md, by every way that trains here, on the host: a tiny model takes the large one's place."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    (words,) = re.findall(r"bench.py time_to_loss (losses --task large-lm .*) --results", page)
    monkeypatch.setattr(LargeLM, "size", "tiny")
    monkeypatch.setattr(LargeLM, "validated", 8)  # of 512 windows, which took longer than the rest
    load_task.cache_clear()  # of the large one: another test may have read its text
    ways = [name for name, way in WAYS.items() if not way.is_deepspeeds and way.make is not None]
    smaller = ["--device", "cpu", "--rows", "1", "--ranks", "2", "--lengths", "2"]
    main([*words.split(), *smaller, "--results", str(tmp_path / "large.jsonl"), "--ways", *ways])
    found = losses.read(tmp_path / "large.jsonl")
    assert [one.run.way for one in found] == ways and {one.run.task for one in found} == {"large-lm"}
    assert all(1 < one.loss < 10 for one in found)


def test_one_alone_has_one_ranks_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    task = losses.load_task("digits")
    batch = task.batch
    monkeypatch.setattr(losses, "load_task", lambda name: task)

    def seen(seed: int, step: int, rank: int, size: int) -> object:
        asked.append(rank)
        return batch(seed, step, rank, size)

    monkeypatch.setattr(task, "batch", seen)
    losses.train(losses.Run("digits", "one worker alone", 4, 4, 2, 1e-2, 0))
    assert asked == [0, 0]


def test_lengths_come_shortest_first() -> None:
    runs = list(losses.wanted("digits", ["DDP float32", "DDP bfloat16"], 2, 4, [8, 4], [1e-2], 2))
    assert [run.steps for run in runs] == [4, 4, 8, 8]  # DDP bfloat16 has no run of its own
    assert all(a.steps <= b.steps for a, b in pairwise(runs))
