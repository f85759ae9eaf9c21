"""The convergence study: its tasks are pure functions, its runs repeatable, its arithmetic right."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from study import main as study
from study import run as study_run
from study.catalog import TASKS, load_task
from study.divided import largest_directories
from study.figure import COLOURS, family, lines_of, saving
from study.main import read_results
from study.report import best_lr, gap_with_interval, report, runs_by_lr, verdict
from study.run import Job, Point, Result, muon_groups, run_job
from study.tasks import MASK, Task, joined, read_digits

JOB = Job(task="digits", method="onebit-adam", lr=4e-3, seed=1, steps=6, ranks=2, batch_size=4)


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", TASKS)
def test_batch_is_a_function_of_seed_step_and_rank(name: str) -> None:
    task = load_task(name)
    before = torch.get_rng_state()
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({b"".join(part.numpy().tobytes() for part in task.batch(*place, 4)) for place in places}) == 4
    for first, again in zip(task.batch(3, 5, 7, 4), task.batch(3, 5, 7, 4), strict=True):
        assert len(first) == 4 and torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


# LargeLM is ByteLM at a size of which a few windows take a minute.
MODEST = [name for name in TASKS if name != "large-lm"]


@pytest.mark.parametrize("name", MODEST)
def test_model_is_a_function_of_the_seed(name: str) -> None:
    task = load_task(name)
    before = torch.get_rng_state()
    first, again, other = (torch.nn.utils.parameters_to_vector(task.build(seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and first.isfinite().all()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", MODEST)
def test_mean_over_ranks_is_the_mean_over_their_batches(name: str) -> None:
    """What lets a dense method see all batches in one. float32 sums of some hundred terms: 1e-5."""
    task = load_task(name)
    model = task.build(0)
    batches = [task.batch(0, 0, rank, 4) for rank in range(3)]
    joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    means = [task.loss(model, batch).item() for batch in batches]
    assert task.loss(model, joined).item() == pytest.approx(statistics.mean(means), rel=1e-5)


def test_rows_of_positions_beyond_the_windows_never_get_a_gradient() -> None:
    task = load_task("masked-lm")
    model = task.build(0)
    task.loss(model, task.batch(0, 0, 0, 2)).backward()
    used, unused = model.positions.weight.grad.split([128, 384])
    assert (used != 0).any(dim=1).all()
    assert (unused == 0).all()


def test_hidden_bytes_are_seen_from_both_sides_and_not_themselves() -> None:
    task = load_task("masked-lm")
    model = task.build(0)
    read_BT, text_BT = task.batch(0, 0, 0, 2)
    assert ((read_BT == MASK).sum(dim=1) == 19).all()
    assert torch.equal(read_BT[read_BT != MASK], text_BT[read_BT != MASK])
    edited = read_BT.clone()
    edited[:, 100] = 7
    assert not torch.allclose(model(read_BT)[:, 20], model(edited)[:, 20], atol=0, rtol=1e-6)


def test_digits_have_inputs_that_are_always_zero() -> None:
    task = load_task("digits")
    model = task.build(0)
    task.loss(model, task.batch(0, 0, 0, 1200)).backward()
    columns = model[0].weight.grad.abs().sum(dim=0)
    assert 1 <= int((columns == 0).sum()) <= 20
    assert 0.0 < task.accuracy(model) < 0.4  # untrained


def test_pictures_are_four_digits_with_noise_in_patches() -> None:
    def digits_in(patches_BP4: torch.Tensor) -> set[bytes]:
        rows = patches_BP4.view(-1, 8, 8, 2, 2).transpose(2, 3).reshape(-1, 2, 8, 2, 8)
        return {digit.numpy().tobytes() for digit in rows.transpose(2, 3).reshape(-1, 8, 8)}

    task = load_task("denoise")
    noisy_BP4, clean_BP4 = task.batch(0, 0, 0, 200)
    assert noisy_BP4.shape == clean_BP4.shape == (200, 64, 4)
    assert abs(float((noisy_BP4 - clean_BP4).std()) - 0.5) < 0.01
    trained_on, tested = digits_in(clean_BP4), digits_in(task._test[1])
    known = {digit.numpy().tobytes() for digit in read_digits()[0].view(-1, 8, 8)}
    assert trained_on | tested <= known and not trained_on & tested


def test_muon_is_for_hidden_matrices_alone() -> None:
    model = load_task("denoise").build(0)
    hidden = {id(p) for group in muon_groups(model) if group["use_muon"] for p in group["params"]}
    assert id(model.blocks[0].qkv.weight) in hidden
    assert not hidden & {id(model.head.weight), id(model.positions.weight), id(model.norm.weight)}


@pytest.mark.parametrize("name", ["byte-lm", "digits", "sums"])
def test_a_control_deals_the_same_rows_evenly(name: str) -> None:
    unlike, mixed = load_task(f"{name}-unlike"), load_task(f"{name}-mixed")

    def rows(task: Task, ranks: Iterable[int]) -> list[bytes]:
        columns = zip(*(task.batch(0, 3, rank, 8) for rank in ranks), strict=True)
        joined = [torch.cat(column) for column in columns]
        return sorted(b"".join(x[k].numpy().tobytes() for x in joined) for k in range(len(joined[0])))

    assert rows(unlike, range(8)) == rows(mixed, range(8))  # two blocks of ranks
    assert all(rows(unlike, [rank]) != rows(mixed, [rank]) for rank in range(4))
    with pytest.raises(ValueError, match="batch size 6 is no multiple of 4"):
        unlike.batch(0, 0, 0, 6)


def test_unlike_ranks_have_other_labels_and_other_files() -> None:
    labels = [load_task("sums-unlike").batch(0, 0, rank, 40)[1] for rank in range(4)]
    assert all((column % 4 == rank).all() for rank, column in enumerate(labels))
    digits = [load_task("digits-unlike").batch(0, 0, rank, 1200)[1].bincount(minlength=10) / 1200 for rank in range(4)]
    assert max((mine - other).abs().sum() for mine in digits for other in digits) > 0.5
    texts = largest_directories(4)
    assert sorted(map(len, texts), reverse=True) == [*map(len, texts)]
    assert b"class Charset" not in texts[1] and b"codecs.Codec" in texts[1]


def test_missing_scikit_learn_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install onebit\[study\]"):
        TASKS["digits"]()


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("method", ["adamw", "onebit-adam"])
def test_same_job_gives_the_same_losses_and_traffic(method: str) -> None:
    job = replace(JOB, method=method)
    first, again = run_job(job), run_job(job)
    assert first.curve == again.curve
    assert [point.step for point in first.curve] == [1, 2, 3, 4, 5, 6]
    assert first.loss != run_job(replace(job, seed=2)).loss


def test_last_round_of_local_steps_is_counted_and_changes_nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(JOB, method="zero-one-adam H=8", steps=20)
    *synced, last = run_job(job).curve
    monkeypatch.setattr(study_run.onebit.ZeroOneAdam, "sync", lambda optimizer: None)
    *unsynced, local = run_job(job).curve
    assert synced == unsynced
    assert any(b.bits == a.bits for a, b in pairwise(synced))  # there are local steps
    assert last.bits > local.bits == synced[-1].bits and last.loss != local.loss


def test_a_method_against_itself_reads_the_batches_of_further_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    job, asked = replace(JOB, method="adamw, other batches"), list[tuple[int, ...]]()
    task = load_task(job.task)
    expected = [task.batch(job.seed, 3, rank, job.batch_size) for rank in (2, 3)]
    read = joined(task, job.seed, 3, (2, 3), job.batch_size)
    assert all(torch.equal(part, torch.cat(parts)) for part, *parts in zip(read, *expected, strict=True))
    own = run_job(replace(job, method="adamw"))
    batch = task.batch
    monkeypatch.setattr(task, "batch", lambda *of: asked.append(of) or batch(*of))
    assert run_job(job).loss != own.loss
    assert asked == [(job.seed, step, rank, job.batch_size) for step in range(job.steps) for rank in (2, 3)]


def test_dense_traffic_is_that_of_a_ring() -> None:
    result = run_job(replace(JOB, method="adamw", ranks=4))
    assert (result.bits_per_step, result.bits_in_full, result.bytes_sent) == (48, 64, 48 * 6 / 8)


def test_study_reports_its_runs_and_does_not_run_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--task", "digits", "--methods", "adamw", "onebit-adam", "--ranks", "2", "--steps", "6", "--seeds", "2"]
    flags += ["--lrs", "1e-3", "4e-3", "--batch-size", "4", "--results", str(tmp_path / "runs.jsonl")]
    args = study.parse_args(flags)
    with ThreadPoolExecutor(1) as pool:
        study.run_study(args, pool)
        written = args.results.read_text()
        assert len(read_results(args.results)) == 2 * (2 + 1)  # methods · (learning rates + the best one's second seed)

        monkeypatch.setattr(study, "run_job", None)
        study.run_study(args, pool)
        assert args.results.read_text() == written
    study.main([*flags, "--report-only", "--record", str(tmp_path / "study.md")])
    text = (tmp_path / "study.md").read_text()
    assert "## digits, 2 ranks, 6 steps, batch 4 per rank" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| adamw | ", "| onebit-adam | "))]
    assert [row[0] for row in rows] == ["| adamw", "| onebit-adam"]
    assert rows[0][4:] == ["", "", "32", "64", "24 |"]
    assert " ± " in rows[1][4] and rows[1][5].startswith(("yes, interval ", "no, interval "))
    assert "The best learning rate lies at the edge of the grid for adamw, onebit-adam." in text
    assert 1000 < (tmp_path / "study.png").stat().st_size < 300_000


def test_line_cut_short_is_passed_over_and_its_job_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(study.to_line(result(loss=1.0)))[:-20])
    assert not read_results(path)
    with ThreadPoolExecutor(1) as pool:
        study.run_missing([JOB], path, pool, "")
    assert list(read_results(path)) == [JOB]


# ---------------------------------------------------------------- arithmetic


def result(*, loss: float, **job: object) -> Result:
    return Result(replace(JOB, **job), (Point(6, loss, 60.0),), seconds=1.0, revision="")


def test_gap_of_a_worked_example() -> None:
    """Gaps 1, 2 and 3 %: mean 2 %, standard deviation 1 %, t(2 degrees of freedom) = 4.303, /√3."""
    gap, half = gap_with_interval([1.01, 2.04, 4.12], [1.0, 2.0, 4.0])
    assert gap == pytest.approx(0.02)
    assert half == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert gap_with_interval([1.01], [1.0]) == (pytest.approx(0.01), math.inf)
    assert gap_with_interval([math.inf, 1.0], [1.0, 1.0]) == (math.inf, math.inf)


def test_interval_of_more_seeds_than_the_table_holds_is_not_too_narrow() -> None:
    losses = [1.0 + k / 100 for k in range(40)]
    expected = 2.045 * statistics.stdev(losses) / 40**0.5
    assert gap_with_interval(losses, [1.0] * 40)[1] == pytest.approx(expected)


def test_verdict_says_whether_the_interval_agrees() -> None:
    assert verdict(0.005, 0.004) == "yes, interval excludes 1 %"
    assert verdict(0.005, 0.006) == "yes, interval includes 1 %"
    assert verdict(0.02, 0.004) == "no, interval excludes 1 %"
    assert verdict(0.02, math.inf) == "no, interval includes 1 %"


def test_best_learning_rate_is_judged_by_the_seeds_all_were_run_with() -> None:
    runs = [result(loss=2.0, lr=1e-3, seed=0), result(loss=1.0, lr=2e-3, seed=0), result(loss=9.0, lr=2e-3, seed=1)]
    assert best_lr(runs_by_lr(runs, JOB.setting)["onebit-adam"]) == 2e-3


def test_gap_pairs_the_seeds_that_both_have() -> None:
    runs = [result(loss=2.0, method="adamw", seed=seed) for seed in (0, 1, 2)]
    runs += [result(loss=2.02, seed=0), result(loss=2.02, seed=2)]
    assert "| onebit-adam | 0.004 | 2 | 2.0200 | +1.00% ± 0.00% |" in report(runs)


def test_diverged_run_is_said_to_be_one() -> None:
    text = report([result(loss=2.0, method="adamw"), result(loss=math.inf)])
    assert "| onebit-adam | 0.004 | 1 | diverged | diverged | no |" in text


# ---------------------------------------------------------------- the figure


def curve_of(method: str, seed: int, *losses: float, ranks: int = 4) -> Result:
    job = replace(JOB, method=method, seed=seed, steps=len(losses), ranks=ranks)
    return Result(job, tuple(Point(k + 1, loss, 10.0 * (k + 1)) for k, loss in enumerate(losses)), 1.0, "r")


def test_the_figure_has_one_line_for_each_optimizer_with_its_gap_by_step() -> None:
    variants = ("zero-one-adam H=4", "onebit-adam, frozen at 15 %", "zero-one-adam", "adamw", "onebit-adam", "lamb")
    results = [curve_of(method, seed, 2.0 + seed, 1.0) for method in variants for seed in range(3)]
    results += [curve_of("onebit-lamb", seed, 3.0 + seed, 1.1) for seed in (0, 1)]
    lines = {line.name: line for line in lines_of(results, results[0].job.setting)}
    assert list(lines) == ["adamw", "onebit-adam", "zero-one-adam", "lamb", "onebit-lamb"]
    assert lines["adamw"].gaps is None and lines["lamb"].gaps is None
    assert lines["onebit-adam"].gaps == [(0.0, 0.0), (0.0, 0.0)] and lines["onebit-adam"].losses == [3.0, 1.0]
    first, last = lines["onebit-lamb"].gaps or ()
    assert first[0] == pytest.approx((3 / 2 + 4 / 3) / 2 - 1) and last == (pytest.approx(0.1), pytest.approx(0.0))
    assert lines["onebit-lamb"].seeds == 2 and lines["onebit-lamb"].bits == [10.0, 20.0]


def test_the_figure_says_what_is_sent_beside_the_dense_twin() -> None:
    """Dense Muon has a gap, to AdamW, and sends as much; the twin of 1-bit Muon is dense Muon."""
    results = [curve_of(method, 0, 2.0, 1.0) for method in ("adamw", "muon", "onebit-muon", "onebit-lamb")]
    lines = lines_of(results, results[0].job.setting)
    lines = [replace(line, bits=[5.0 if line.name.startswith("onebit") else 20.0]) for line in lines]
    said = {line.name: saving(line, lines) for line in lines}
    assert said == {"adamw": "float32", "muon": "float32", "onebit-muon": "4 × fewer bits", "onebit-lamb": ""}


def test_every_method_of_the_study_has_a_colour() -> None:
    assert {family(method) for method in study_run.METHODS} <= COLOURS.keys()


def test_a_figure_of_recorded_runs_is_drawn(tmp_path: Path) -> None:
    runs = [curve_of(method, seed, 2.0, 1.0) for method in ("adamw", "onebit-adam") for seed in (0, 1)]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(study.to_line(run)) + "\n" for run in runs))
    study.main(["--report-only", "--results", str(tmp_path / "runs.jsonl"), "--figure", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "figure.md").exists()
