"""Inputs of checkpointed parts wait elsewhere: the bits of a run that keeps everything, and nothing stays."""

from __future__ import annotations

import copy
import errno
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from onebit import zero
from onebit.zero import activations
from onebit.zero.activations import Keep, checkpoint
from onebit.zero.features import activation_checkpointing
from onebit.zero.grid import Grid

PLACES = ["device", "host", "folder"]


def keep_at(place: str, folder: Path) -> Keep:
    return Keep(place=str(folder) if place == "folder" else place)


class Part(nn.Module):
    """With dropout, a mask that no gradient flows into, and several inputs and outputs in containers."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.3)

    def forward(self, both: dict[str, Tensor], *, mask: Tensor) -> dict[str, Tensor]:
        h = self.drop(self.second(torch.relu(self.first(both["h"])))) * mask
        return {"h": both["h"] + h, "sum": both["sum"] + h.sum()}


def gradients(parts: nn.ModuleList, x: Tensor, mask: Tensor, call: Callable[..., dict[str, Tensor]]) -> list[Tensor]:
    torch.manual_seed(0)
    for p in parts.parameters():
        p.grad = None
    both = {"h": x * 2, "sum": x.sum()}
    for part in parts:
        both = call(part, both, mask=mask)
    (both["h"].square().mean() + both["sum"]).backward()
    return [p.grad for p in parts.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_those_without_checkpoints(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    parts = nn.ModuleList(Part(6) for _ in range(3)).to(dtype)
    x, mask = torch.randn(5, 6, dtype=dtype, requires_grad=True), (torch.rand(5, 6) > 0.5).to(dtype)
    whole = gradients(parts, x, mask, lambda part, both, mask: part(both, mask=mask))
    keep = keep_at(place, tmp_path)
    for _ in range(2):  # extents are used again
        again = gradients(parts, x, mask, lambda part, both, mask: checkpoint(part, both, keep=keep, mask=mask))
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(0, 3),
        torch.randn(()),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(1, 3).expand(4, 3),
    ],
    ids=["empty", "scalar", "channels last", "transposed", "slice", "expanded"],
)
def test_shapes_and_strides_come_back(x: Tensor, place: str, tmp_path: Path) -> None:
    seen = []

    def part(h: Tensor) -> Tensor:
        seen.append((h.shape, h.stride(), h.detach().clone()))
        return h.sin()

    y = checkpoint(part, (x.clone().requires_grad_() if x.is_contiguous() else x.requires_grad_()).view_as(x),
                   keep=keep_at(place, tmp_path))  # fmt: skip
    y.sum().backward()
    (shape, stride, value), (again, stride_again, value_again) = seen
    assert shape == again and torch.equal(value, value_again)
    assert stride == stride_again or torch.empty_like(x).stride() != x.stride()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("of", ["an activation", "a mask"])
def test_an_input_that_was_modified_in_place_is_never_computed_with_again(place: str, of: str, tmp_path: Path) -> None:
    """In a file it is a copy, and gradients are right; elsewhere it is an error."""
    x, mask = torch.ones(3, requires_grad=True), torch.ones(3)
    h = x * 1
    y = checkpoint(lambda h, mask: (h * mask).square(), h, mask, keep=keep_at(place, tmp_path))
    with torch.no_grad():
        (h if of == "an activation" else mask).add_(1.0)
    if place == "folder" and of == "an activation":
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
    else:
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place after)"):
            y.sum().backward()


@pytest.mark.parametrize("place", PLACES)
def test_a_part_that_overwrites_its_input_is_named(place: str, tmp_path: Path) -> None:
    """As nn.ReLU(inplace=True) does at its beginning: in the forward pass, unless a copy of the input was kept."""
    x, part = torch.tensor([-1.0, 2.0], requires_grad=True), nn.Sequential(nn.ReLU(inplace=True), nn.Softplus())
    if place == "folder":
        checkpoint(part, x * 1, keep=keep_at(place, tmp_path)).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(part(x * 1).sum(), x)[0])
    else:
        with pytest.raises(RuntimeError, match=r"overwrites its input.* inplace=False"):
            checkpoint(part, x * 1, keep=keep_at(place, tmp_path))
    with torch.no_grad():
        assert torch.equal(checkpoint(part, x * 1, keep=keep_at(place, tmp_path)), part(x * 1))


def test_another_model_keeps_its_inputs_where_it_did(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    keep = Keep(place=str(tmp_path))
    seen = []
    for module in (first, second):
        module.register_forward_pre_hook(lambda *_: seen.append(activations._defaults[-1]))
    activations.kept_within(first, keep)
    first.register_forward_pre_hook(lambda *_: seen.append(activations._defaults[-1]))
    first(torch.ones(3))
    second(torch.ones(3))
    with pytest.raises(RuntimeError):
        first(torch.ones(4))
    second(torch.ones(3))
    assert [each is keep for each in seen] == [False, True, False, False, True, False]


def test_a_graph_that_is_kept_can_go_backward_twice(tmp_path: Path) -> None:
    x = torch.randn(4, requires_grad=True)
    y = checkpoint(torch.sin, x * 1, keep=Keep(place=str(tmp_path))).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, 2 * x.detach().cos())


def test_the_file_has_no_name_and_does_not_grow_from_step_to_step(tmp_path: Path) -> None:
    keep, sizes = Keep(place=str(tmp_path / "made")), []
    for _ in range(3):
        x = torch.randn(1000, requires_grad=True)
        h = x * 1
        for _ in range(4):
            h = checkpoint(torch.sin, h, keep=keep)
        sizes.append(os.fstat(keep._file._file.fileno()).st_size)  # type: ignore[union-attr]
        h.sum().backward()
        del h
        gc.collect()
    assert sizes == [16_000] * 3
    assert list((tmp_path / "made").iterdir()) == []


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_inputs_in_a_file_are_not_in_memory(tmp_path: Path) -> None:
    """Eight inputs of 32 MB each."""
    held = {}
    for place in ("device", "folder"):
        keep, h = keep_at(place, tmp_path), torch.zeros(2**23, requires_grad=True) * 1
        before = resident_mb()
        for _ in range(8):
            h = checkpoint(torch.sin, h, keep=keep)  # type: ignore[assignment]
        held[place] = resident_mb() - before
        h.sum().backward()
    assert held["device"] > 200 and held["folder"] < 100


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(OSError, match=r"the folder for activations, .*file/inside, cannot be written"):
        checkpoint(torch.sin, x * 1, keep=Keep(place=str(tmp_path / "file" / "inside")))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(activations.os, "pwrite", full)
    with pytest.raises(OSError, match="no room for 12 more bytes of activations: No space left"):
        checkpoint(torch.sin, x * 1, keep=Keep(place=str(tmp_path)))


def test_without_gradients_nothing_is_kept(tmp_path: Path) -> None:
    keep = Keep(place=str(tmp_path))
    with torch.no_grad():
        checkpoint(torch.sin, torch.randn(3), keep=keep)
    assert keep._file is None


def test_configure_reads_a_file_a_dict_and_arguments(tmp_path: Path) -> None:
    from onebit.zero import checkpointing

    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": true}}')
    try:
        for given, options, place in [
            (path, {}, "host"),
            (str(path), {"checkpoint_in_cpu": False}, "device"),
            ({"activation_checkpointing": {"cpu_checkpointing": True}}, {}, "host"),
            (zero.read_config({"train_batch_size": 1}, world_size=1), {"checkpoint_in_cpu": True}, "host"),
            (None, {"partition_activations": True}, "device"),  # without ranks that compute on the same inputs
        ]:
            checkpointing.configure(None, given, **options)  # type: ignore[arg-type]
            assert activations._defaults[0]._place == place and activations._defaults[0]._group is None
        with pytest.raises(ValueError, match=r"ds\.json: activation_checkpointing.*cpu_checkpointin"):
            path.write_text('{"activation_checkpointing": {"cpu_checkpointin": true}}')
            checkpointing.configure(None, path)
    finally:
        activations.kept_by_default(Keep())


@pytest.mark.parametrize(("ranks", "is_asked"), [(1, True), (2, True), (2, False)])
def test_the_engine_divides_inputs_over_tensor_ranks_alone(
    ranks: int, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[object] = []
    monkeypatch.setattr(activation_checkpointing, "Keep", lambda group, place: groups.append(group) or Keep())
    about = {"train_batch_size": 1, "activation_checkpointing": {"partition_activations": is_asked}}
    tensor, world = SimpleNamespace(world_size=ranks, group="of tensor ranks"), SimpleNamespace(rank=0)
    grid = cast(Grid, SimpleNamespace(transports={"tensor": tensor}, world=world))
    feature = activation_checkpointing.ActivationCheckpointing(zero.read_config(about, world_size=1))
    feature.prepare(nn.Linear(3, 3), grid, is_part=False)
    assert groups == ["of tensor ranks" if is_asked and ranks == 2 else None]


def test_the_engine_warns_if_nothing_is_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }

    class Net(nn.Module):
        def __init__(self, checkpoints: bool):
            super().__init__()
            self.layer, self.checkpoints = nn.Linear(3, 3), checkpoints

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return checkpoint(self.layer, h) if self.checkpoints else h  # type: ignore[return-value]

    first = Net(True)
    try:
        for model in (first, Net(False)):
            caplog.clear()
            engine, *_ = zero.initialize(model=copy.deepcopy(model), config=config)
            for _ in range(2):
                engine.backward(engine(torch.randn(1, 3)).sum())
                engine.step()
            engine.close()
            warned = [r for r in caplog.records if r.levelno == logging.WARNING and "has no effect" in r.getMessage()]
            assert len(warned) == (0 if model.checkpoints else 1)
    finally:
        activations.kept_by_default(Keep())
