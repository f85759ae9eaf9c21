"""Checkpoints of the engine: what comes back, what a kill or a truncation leaves, what is refused."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from errors import error_of
from faults.filesystem import Faults
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_torchrun
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from onebit.comm import SimTransport, init, run_ranks
from onebit.comm.messages import gather_texts
from onebit.zero.checkpoint.files import CheckpointError, Checkpoints, _check_model
from onebit.zero.checkpoint.tree import pack, select, unpack

keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
trees = st.recursive(
    leaves,
    lambda t: st.one_of(
        st.lists(t, max_size=3), st.tuples(t, t), st.dictionaries(keys, t, max_size=3)
    ),
    max_leaves=12,
)  # fmt: skip


@given(trees)
def test_what_is_packed_comes_back(tree: object) -> None:
    assert unpack(*pack(tree)) == tree


def test_tensors_come_back_as_they_are() -> None:
    x, tree = torch.arange(3), {"a": [(torch.ones(2), None)], 3: torch.tensor(1.5), "t": torch.bfloat16}
    tree["x"] = x
    back = unpack(*pack(tree))
    assert isinstance(back, dict) and back["x"] is not x and torch.equal(back["x"], x)
    assert back["t"] is torch.bfloat16 and torch.equal(back["a"][0][0], torch.ones(2))


def test_some_entries_come_back_with_their_tensors_alone() -> None:
    tensors = [torch.full((1,), float(k)) for k in range(4)]
    tree = {"a": tensors[0], "b": [(tensors[1], {"c": torch.bfloat16})], "d": 7, "e": {"a": tensors[2]}}
    text, numbers = select(pack(tree)[0], ("e", "b", "d", "none"))
    assert numbers == [1, 2]
    assert unpack(text, ["x", "y"]) == {"b": [("x", {"c": torch.bfloat16})], "d": 7, "e": {"a": "y"}}


def test_an_object_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match="cannot hold a set, found at /a/0"):
        pack({"a": [{1}]})


def net(fill: float = 0.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    for p in model.parameters():
        nn.init.constant_(p, fill)
    return model


def save(checkpoints: Checkpoints, step: int, fill: float, **options: bool) -> None:
    own = {"x": torch.full((4,), fill), "empty": torch.empty(0), "scalar": torch.tensor(fill), "list": [1, (2.5, None)]}
    checkpoints.save(step, net(fill).state_dict(), own, {"stage": 2}, **options)


def fill_of(checkpoints: Checkpoints, tag: str | None = None) -> float:
    model = net(-1.0)
    loaded = checkpoints.load(model.state_dict(), tag)
    assert loaded is not None and loaded.stamp["stage"] == 2
    own = loaded.own[0]
    values = {float(p) for q in model.parameters() for p in q.detach().view(-1)} | {float(own["scalar"])}
    assert len(values) == 1 and own["list"] == [1, (2.5, None)] and own["empty"].numel() == 0
    return values.pop()


def test_nothing_is_loaded_where_there_is_nothing(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "new", SimTransport()).load(net().state_dict()) is None


def test_latest_is_loaded_or_any_by_its_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, SimTransport())
    for step in (1, 2, 3):
        save(checkpoints, step, float(step))
    assert fill_of(checkpoints) == 3.0 and fill_of(checkpoints, "step_00000002") == 2.0
    with pytest.raises(CheckpointError, match=r"step_00000004/stamp.json is missing: .*; step_00000003 is whole: load"):
        fill_of(checkpoints, "step_00000004")


def test_a_step_may_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, SimTransport())
    save(checkpoints, 1, 1.0)
    save(checkpoints, 1, 2.0)
    assert fill_of(checkpoints) == 2.0


@pytest.mark.parametrize(
    ("model", "why"),
    [(nn.Linear(5, 3), "of another model: the (checkpoint|model) has no"), (nn.Linear(3, 5), "of another model")],
)
def test_another_model_is_refused(tmp_path: Path, model: nn.Module, why: str) -> None:
    checkpoints = Checkpoints(tmp_path, SimTransport())
    save(checkpoints, 1, 1.0)
    with pytest.raises(CheckpointError, match=why):
        checkpoints.load(model.state_dict())
    wide = nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3))
    with pytest.raises(CheckpointError, match=r"0.weight has shape \(3, 5\) there and \(3, 6\) here"):
        checkpoints.load(wide.state_dict())


def test_part_of_what_is_a_ranks_own_is_read_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, SimTransport())
    save(checkpoints, 1, 1.5)
    loaded = checkpoints.load(net().state_dict())
    assert loaded is not None
    part = loaded.own.read(0, "scalar", "list")
    assert part.keys() == {"scalar", "list"} and float(part["scalar"]) == 1.5 and part["list"] == [1, (2.5, None)]
    outline = loaded.own.outline(0)
    assert isinstance(outline, dict) and outline["x"].device.type == "meta" and outline["x"].shape == (4,)
    assert outline["list"] == [1, (2.5, None)]
    with pytest.raises(IndexError):
        loaded.own.read(1, "list")


def test_ranks_may_hold_different_layers_of_one_model(tmp_path: Path) -> None:
    """The names are those of all ranks together; one that no rank has, and one too many, are refused on all."""
    save(Checkpoints(tmp_path, SimTransport()), 1, 1.0)
    metadata = dcp.FileSystemReader(tmp_path / "step_00000001").read_metadata()
    state = {name: x for name, x in net().state_dict().items()}
    halves = [{name: x for name, x in state.items() if name.startswith(f"{k}.")} for k in range(2)]

    def check(transport: SimTransport, model: dict) -> str:
        names = {name for text in gather_texts(transport, "\n".join(model)) for name in text.splitlines()}
        return error_of(CheckpointError, _check_model, tmp_path, metadata, model, names)

    assert run_ranks(2, lambda transport: check(transport, halves[transport.rank])) == ["", ""]
    found = run_ranks(2, lambda transport: check(transport, halves[0]))
    assert all("the model has no 1." in text for text in found)
    more = [halves[0], halves[1] | {"2.weight": torch.zeros(1)}]
    found = run_ranks(2, lambda transport: check(transport, more[transport.rank]))
    assert all("the checkpoint has no 2.weight" in text for text in found)


def test_what_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0: TypeError: a checkpoint holds tensors, extra_state is a dict"):
        Checkpoints(tmp_path, SimTransport()).save(1, {"extra_state": {}}, {})
    with pytest.raises(CheckpointError, match=r"rank 0: TypeError: a checkpoint cannot hold a set, found at /a"):
        Checkpoints(tmp_path, SimTransport()).save(1, {}, {"a": {1}})


def test_a_kill_between_removing_and_renaming_loses_nothing(tmp_path: Path) -> None:
    """As earlier versions wrote a step again: the old folder went before the new one, whole by then, had its name."""
    checkpoints = Checkpoints(tmp_path, SimTransport())
    save(checkpoints, 1, 1.0)
    (tmp_path / "step_00000001").rename(tmp_path / ".step_00000001.partial")
    assert fill_of(Checkpoints(tmp_path, SimTransport())) == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


def save_for_ever(folder: Path) -> None:
    checkpoints = Checkpoints(folder, SimTransport())
    for step in range(1, 10**6):
        save(checkpoints, step, float(step))


@pytest.mark.processes
def test_kill_9_during_a_checkpoint_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_ in range(6):
        folder = tmp_path / str(round_)
        process = context.Process(target=save_for_ever, args=(folder,))
        process.start()
        deadline = time.monotonic() + 60
        while not (folder / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.0037 * round_)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        checkpoints = Checkpoints(folder, SimTransport())
        step = int((folder / "latest").read_text()[5:])
        assert fill_of(checkpoints) >= step >= 1
        save(checkpoints, 10**7, 0.5)
        assert fill_of(checkpoints) == 0.5
        shutil.rmtree(folder)


def rank_of_many(folder: str) -> dict[str, object]:
    """Save sharded over all ranks, in the background too; load sharded and whole; fail and refuse together."""
    transport, place = init("gloo", levels=1), Path(folder)
    checkpoints, facts = Checkpoints(place, transport), {}
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    expected = {name: p.detach().clone() for name, p in whole.named_parameters()}
    fully_shard(whole, mesh=init_device_mesh("cpu", (transport.world_size,)))

    def save(step: int, *, in_background: bool = False) -> None:
        checkpoints.save(step, whole.state_dict(), {"rank": transport.rank}, in_background=in_background)

    save(1)
    for step in (2, 3, 3):
        save(step, in_background=True)
    checkpoints.wait()
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    sharded = fully_shard(
        nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), mesh=init_device_mesh("cpu", (transport.world_size,))
    )
    for kind, model in {"plain": plain, "sharded": sharded}.items():
        loaded = checkpoints.load(model.state_dict())
        values = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
        is_same = all(torch.equal(values[name].detach(), x) for name, x in expected.items())
        facts[kind] = [loaded.step, [own["rank"] for own in loaded.own], is_same]

    with Faults(place, at=0 if transport.rank == 1 else None, fault=errno.ENOSPC):
        facts["full disk"] = error_of(CheckpointError, save, 4)
    with Faults(place, at=0 if transport.rank == 1 else None, fault=errno.ENOSPC):
        save(4, in_background=True)
        facts["full disk in the background"] = error_of(CheckpointError, checkpoints.wait)
    facts["left"] = sorted(path.name for path in place.iterdir())
    damaged = place / "step_00000003" / "__1_0.distcp"
    for damage in ("flipped", "missing"):
        if transport.rank == 1 and damage == "flipped":
            damaged.write_bytes(damaged.read_bytes()[:-9] + b"\xff" * 9)
        elif transport.rank == 1:
            damaged.unlink()
        facts[damage] = error_of(CheckpointError, checkpoints.load, plain.state_dict())
    transport.close()
    return facts


@pytest.mark.processes
def test_sharded_models_load_sharded_and_whole_and_all_ranks_refuse_together(tmp_path: Path) -> None:
    results = run_torchrun(3, rank_of_many, str(tmp_path), timeout_s=100).check().results
    assert results[0] == results[1] == results[2]
    facts = results[0]
    assert facts["plain"] == facts["sharded"] == [3, [0, 1, 2], True]
    for case in ("full disk", "full disk in the background"):
        assert (
            facts[case].startswith("CheckpointError: rank 1: No space left on device: ")
            and "__1_0.distcp" in facts[case]
        )
    assert facts["left"] == ["latest", "step_00000001", "step_00000002", "step_00000003"]
    for case in ("flipped", "missing"):
        assert "__1_0.distcp is " in facts[case] and "; step_00000002 is whole: load it with tag=" in facts[case]
