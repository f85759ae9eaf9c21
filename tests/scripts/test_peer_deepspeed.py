"""DeepSpeed as a contender: what stands in for its GPU libraries, what is counted, which steps are measured."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from bench import peer_deepspeed
from bench.command import COMMAND
from bench.peer_deepspeed import (
    FOLDER,
    METHODS,
    Collectives,
    Measured,
    make_cupy,
    measure,
    parse,
    plan,
    why_not_prepared,
)
from ranks import free_port

WORKER_TIMEOUT_S = 300.0  # importing DeepSpeed takes 6 s of a processor, and minutes of a busy machine
STARTED_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


# ---------------------------------------------------------------- what is patched


@pytest.mark.parametrize("bytes_", [0, 1, 2, 1000])
def test_packed_signs_are_most_significant_bit_first(bytes_: int) -> None:
    signs = torch.randint(2, (8 * bytes_,), dtype=torch.uint8)
    cupy = make_cupy()
    packed = cupy.packbits(cupy.from_dlpack(torch.utils.dlpack.to_dlpack(signs)))
    weights = 2 ** torch.arange(7, -1, -1)
    assert packed.dtype == numpy.uint8
    assert packed.tolist() == (signs.view(-1, 8) * weights).sum(1).tolist()
    assert cupy.unpackbits(packed).tolist() == signs.tolist()


def test_arrays_and_tensors_share_their_memory() -> None:
    """DeepSpeed receives into tensors that it reads as arrays afterwards."""
    cupy = make_cupy()
    array = cupy.zeros([2, 4], dtype=numpy.dtype("uint8"))
    torch.utils.dlpack.from_dlpack(array[1]).fill_(7)
    assert array.tolist() == [[0] * 4, [7] * 4]
    x = torch.zeros(3)
    cupy.from_dlpack(torch.utils.dlpack.to_dlpack(x))[1] = 5
    assert x.tolist() == [0, 5, 0]
    halves = cupy.split(array.reshape(-1), 2)
    torch.utils.dlpack.from_dlpack(halves[0]).fill_(1)
    assert array[0].tolist() == [1] * 4


def test_devices_and_streams_are_nothing() -> None:
    cuda = make_cupy().cuda
    cuda.Device(0).use()
    cuda.get_current_stream().synchronize()


# ---------------------------------------------------------------- what is counted


class Recorded:
    """Four ranks' torch.distributed, as far as one of them can tell, without the others."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor, op: object = None, group: object = None, async_op: bool = False) -> None:
        self.calls.append("all_reduce")

    def all_gather(self, tensors: list, tensor: torch.Tensor, group: object = None, async_op: bool = False) -> None:
        assert all(received.shape == tensor.shape for received in tensors), "Gloo refuses this"
        self.calls.append("all_gather")

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, *splits: object, **rest: object) -> None:
        self.calls.append("all_to_all_single")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    for name in ("all_reduce", "all_gather", "all_to_all_single"):
        monkeypatch.setattr(dist, name, getattr(recorded, name))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    yield recorded


def exchange(n: int, scale: torch.Tensor) -> None:
    """The four collectives of DeepSpeed's compressed_allreduce of n elements between four ranks."""
    signs = torch.zeros(4, n // 32, dtype=torch.uint8)
    dist.all_to_all_single(torch.empty_like(signs), signs, group=None)
    dist.all_gather([torch.zeros(1) for _ in range(4)], scale, group=None)
    dist.all_gather([torch.empty_like(signs[0]) for _ in range(4)], signs[0], group=None)
    dist.all_gather([torch.zeros(1) for _ in range(4)], scale, group=None)


def test_payload_of_an_exchange_is_the_formula(recorded: Recorded) -> None:
    """Two phases of 3/4 of a bit per element, and two scales for each of three other ranks."""
    collectives = Collectives()
    collectives.install()
    exchange(3200, torch.tensor(1.0))
    assert collectives.sent_bytes == 2 * 3 * 3200 // 8 // 4 + 2 * 3 * 4
    assert recorded.calls == ["all_to_all_single"] + ["all_gather"] * 3


def test_an_all_reduce_counts_as_reduce_scatter_and_all_gather(recorded: Recorded) -> None:
    collectives = Collectives()
    collectives.install()
    dist.all_reduce(torch.zeros(1000))
    assert collectives.sent_bytes == 2 * 4000 * 3 // 4


def test_without_network_nothing_is_sent_or_counted_and_all_is_copied(recorded: Recorded) -> None:
    collectives = Collectives()
    collectives.install()
    received, gathered = torch.zeros(8), [torch.zeros(1) for _ in range(4)]
    with collectives.without_network():
        dist.all_to_all_single(received, torch.arange(8.0))
        dist.all_gather(gathered, torch.tensor(3.0))
        dist.all_reduce(received)
    assert received.tolist() == list(range(8)) and torch.cat(gathered).tolist() == [3.0] * 4
    assert collectives.sent_bytes == 0 and recorded.calls == []
    dist.all_reduce(received)
    assert collectives.sent_bytes > 0


def test_warm_up_is_neither_timed_nor_counted(recorded: Recorded) -> None:
    collectives = Collectives()
    collectives.install()
    acts = []

    def act() -> float:
        first = len(acts) < 2
        acts.append(first)
        dist.all_reduce(torch.zeros(1000 if first else 10))
        time.sleep(0.2 if first else 0.0)
        return 0.5

    measured = measure(act, collectives, repeats=3, warmup=2)
    assert len(acts) == 5 and len(measured.seconds) == 3 and max(measured.seconds) < 0.2
    assert measured.compute_seconds == [0.5] * 3
    assert measured.sent_bytes == 2 * 40 * 3 // 4 and measured.wire_bytes is None


# ---------------------------------------------------------------- which steps


def variance_intervals(steps: int) -> list[bool]:
    """Which steps 1, 2, … of 0/1 Adam with var_update_scaler 1 are dense; step 1 only tries the collective."""
    interval, dense = 1, [False]
    for step in range(2, steps + 1):
        dense.append(step % interval == 0)
        if dense[-1]:
            interval *= 2
    return dense


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 12])
def test_zero_one_adam_sends_one_bit_in_every_measured_step(steps: int) -> None:
    way = plan("deepspeed-zero-one-adam", "every-step", steps)
    assert way.optimizer["params"]["var_update_scaler"] == 1
    dense = variance_intervals(way.steps_before + steps)
    assert dense[1] and not any(dense[way.steps_before :])


def test_local_steps_start_at_the_longest_interval() -> None:
    """Intervals 1, 2, 4, 8, 16 after steps 2, 3, 4, 5, 6; a round in step 16 is the last one before."""
    way = plan("deepspeed-zero-one-adam", "local-steps", 16)
    params, interval = way.optimizer["params"], 1
    rounds = []
    for step in range(params["var_freeze_step"] + 2, way.steps_before + 33):
        if step % interval == 0:
            rounds.append(step)
        interval = min(params["local_step_clipper"], 2 * interval)
    assert [step for step in rounds if step > way.steps_before] == [32, 48]


@pytest.mark.parametrize("method", ["deepspeed-onebit-adam", "deepspeed-onebit-lamb"])
def test_the_others_have_no_local_steps(method: str) -> None:
    assert (
        plan(method, "every-step", 5).steps_before == plan(method, "every-step", 5).optimizer["params"]["freeze_step"]
    )
    with pytest.raises(ValueError, match="no local steps"):
        plan(method, "local-steps", 5)


# ---------------------------------------------------------------- command line and environment


def test_arguments_of_a_worker(tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    args = parse(["--worker", "--what", "step", "--method", METHODS[1], "--batch", "2", "--steps", "4", "--out", out])
    assert (args.what, args.method, args.batch, args.steps, str(args.out)) == ("step", METHODS[1], 2, 4, out)
    assert args.elements == 25_000_000 and args.size == "25m"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--prepare --worker"),
        (["--worker"], "--out"),
        (["--worker", "--out", "x", "--steps", "0"], "at least 1"),
        (["--worker", "--out", "x", "--warmup-steps", "-1"], "at least 0"),
        (["--worker", "--out", "x", "--phase", "local-steps"], "no local steps"),
        (["--worker", "--out", "x", "--method", "adam"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], complaint: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert complaint in capsys.readouterr().err


def test_the_command_sets_the_allocator_before_python_starts() -> None:
    words = peer_deepspeed.worker_command(Path("/e"), ["--what", "step"])
    at = words.index("/e/bin/python")
    assert words[0] == "env" and dict(w.split("=") for w in words[1:at]) == peer_deepspeed.ALLOCATOR
    assert words[at + 1 :] == [COMMAND, "peer_deepspeed", "--worker", "--what", "step"]


def test_pins_name_what_is_compared() -> None:
    pins = peer_deepspeed.read_pins(peer_deepspeed.PINS.read_text())
    assert pins["deepspeed"] == "0.19.6" and {"torch", "numpy"} <= set(pins)


def test_another_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(SystemExit, match="not a virtual environment"):
        peer_deepspeed.prepare(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that `prepare` would run; a virtual environment without pip is really made."""
    commands: list[list[str]] = []

    def call(command: list[str], complaint: str, **env: str) -> None:
        commands.append(command)
        if command[1:3] == ["-m", "venv"]:
            venv.create(command[3], symlinks=True)

    monkeypatch.setattr(peer_deepspeed, "_call", call)
    return commands


def test_preparing_twice_does_nothing_and_unfinished_ones_are_made_anew(
    tmp_path: Path, made: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "environment"
    assert "--prepare" in str(why_not_prepared(folder))
    with caplog.at_level(logging.INFO):
        peer_deepspeed.prepare(folder)
    assert why_not_prepared(folder) is None and "--worker" in caplog.text
    first = len(made)
    assert [command[-1] for command in made[1:3]] == ["torch", "deepspeed"]
    peer_deepspeed.prepare(folder)
    assert len(made) == first
    (folder / peer_deepspeed.STAMP).unlink()
    peer_deepspeed.prepare(folder)
    assert len(made) == 2 * first and why_not_prepared(folder) is None


def test_a_failing_command_is_shown_with_what_it_wrote() -> None:
    with pytest.raises(SystemExit, match=r"(?s)no such thing.*it failed.*ended with 3"):
        peer_deepspeed._call([sys.executable, "-c", "print('no such thing'); exit(3)"], "it failed")


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="needs an environment without DeepSpeed")
def test_without_deepspeed_the_worker_says_where_it_is(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, COMMAND, "peer_deepspeed", "--worker", "--out", str(tmp_path / "x")],
        env=os.environ | STARTED_ALONE, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode != 0 and "No module named 'deepspeed'" in ended.stderr and "--prepare" in ended.stderr


# ---------------------------------------------------------------- DeepSpeed itself


def run_two_ranks(out: Path, *flags: str) -> dict:
    """The prepared environment's worker as two ranks on loopback; what rank 0 wrote."""
    command = peer_deepspeed.worker_command(FOLDER, ["--out", str(out), "--steps", "2", "--warmup-steps", "1", *flags])
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        written = [rank.communicate(timeout=WORKER_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(written)
    return json.loads(out.read_text())


needs_deepspeed = pytest.mark.skipif(why_not_prepared() is not None, reason=str(why_not_prepared()))


@pytest.mark.slow
@pytest.mark.timeout(WORKER_TIMEOUT_S + 20)
@needs_deepspeed
def test_deepspeeds_collective_runs_between_two_ranks(tmp_path: Path) -> None:
    result = run_two_ranks(tmp_path / "out.json", "--what", "collective", "--elements", "10000")
    assert set(asdict(Measured([], [], 0, None))) <= set(result)
    assert len(result["seconds"]) == len(result["compute_seconds"]) == 2 and min(result["seconds"]) > 0
    assert result["sent_bytes"] == 10_000 / 8 + 8 and result["wire_bytes"] is None
    assert result["is_allocator_tuned"] and result["deepspeed"] == "0.19.6" and result["world_size"] == 2


@pytest.mark.slow
@pytest.mark.timeout(WORKER_TIMEOUT_S + 20)
@needs_deepspeed
@pytest.mark.parametrize("method", METHODS)
def test_deepspeeds_optimizers_send_one_bit_a_step(tmp_path: Path, method: str) -> None:
    """tiny: 119,104 elements in 15 tensors, whose lengths are multiples of 16. A call sends 8 bytes of scales."""
    result = run_two_ranks(tmp_path / "out.json", "--what", "step", "--size", "tiny", "--method", method)
    calls = 1 if method == "deepspeed-onebit-lamb" else 15
    assert result["sent_bytes"] == 119_104 / 8 + 8 * calls
    assert all(0 < c < s for c, s in zip(result["compute_seconds"], result["seconds"], strict=True))
