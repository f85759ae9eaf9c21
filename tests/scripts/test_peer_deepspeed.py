"""DeepSpeed as a contender: what stands in for its GPU libraries, what is counted, its environment."""

from __future__ import annotations

import logging
import sys
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from bench import peer_deepspeed
from bench.peer_deepspeed import (
    Collectives,
    make_cupy,
    why_not_prepared,
)

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


# ---------------------------------------------------------------- the environment


def test_the_allocator_is_set_before_python_starts() -> None:
    *words, interpreter = peer_deepspeed.python(Path("/e"))
    assert interpreter == "/e/bin/python"
    assert words[0] == "env" and dict(w.split("=") for w in words[1:]) == peer_deepspeed.ALLOCATOR


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
    assert str(why_not_prepared(folder)).endswith("python scripts/bench.py peer_deepspeed")
    with caplog.at_level(logging.INFO):
        peer_deepspeed.prepare(folder)
    assert why_not_prepared(folder) is None and "done" in caplog.text
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
def test_without_deepspeed_a_rank_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "all_gather", "all_to_all_single"):  # which `start` replaces
        monkeypatch.setattr(dist, name, getattr(dist, name))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    with pytest.raises(SystemExit, match=r"No module named 'deepspeed'; .*`bench.py peer_deepspeed` made"):
        peer_deepspeed.start()
