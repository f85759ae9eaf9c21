"""What older versions of torch need, run on this one: each way gives what the other gives."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.utils import _create_file_view
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.testing._internal.distributed.fake_pg import FakeStore

from onebit.comm import torch_versions

ROOT = Path(__file__).parents[2]
both = pytest.mark.parametrize("version", [torch_versions.OLDEST, torch_versions.TORCH], ids=["oldest", "this"])


def test_the_oldest_is_the_packages_bound() -> None:
    named = re.findall(r"torch>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert len(named) == 2 and {tuple(map(int, one.split("."))) for one in named} == {torch_versions.OLDEST}


def test_a_feature_that_needs_a_newer_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_versions.require("this test", at_least=torch_versions.OLDEST)
    monkeypatch.setattr(torch_versions, "TORCH", (2, 6))
    with pytest.raises(
        ImportError, match=r"^FSDP2, .* needs torch 2\.7 or later, this is \d.*; pip install 'torch>=2\.7'"
    ):
        torch_versions.require_fsdp2()


@both
@pytest.mark.parametrize("before", [0, 100])
def test_records_are_counted_in_a_part_of_a_file(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], before: int
) -> None:
    monkeypatch.setattr(torch_versions, "TORCH", version)
    archive = io.BytesIO()
    torch.save({"x": torch.ones(1000), "y": torch.ones(3)}, archive)
    with zipfile.ZipFile(archive) as table:
        expected = sum(one.file_size for one in table.infolist())
    whole = io.BytesIO(bytes(before) + archive.getvalue() + bytes(before))
    part = _create_file_view(whole, before, len(archive.getvalue()))
    archive.seek(0)
    assert torch_versions.record_bytes(part, torch._C.PyTorchFileReader(archive)) == expected


@both
def test_hooks_in_use_are_the_innermost(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    inner = torch._C._autograd
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(inner, name, getattr(inner, name))  # puts back what `watch_hooks` replaces
    monkeypatch.setattr(torch_versions, "TORCH", version)
    torch_versions.watch_hooks()
    torch_versions.watch_hooks()

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    assert torch_versions.hooks_in_use() is None
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        with torch.autograd.graph.save_on_cpu():
            assert torch_versions.hooks_in_use() not in (None, (same, same))
        assert torch_versions.hooks_in_use() == (same, same)
    assert torch_versions.hooks_in_use() is None


@both
def test_one_rank_loads_a_checkpoint_of_torchs(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch_versions, "TORCH", version)
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    state = {"x": torch.zeros(3)}
    torch_versions.load_alone(state, dcp.FileSystemReader(tmp_path))
    assert state["x"].tolist() == [1.0] * 3


@both
def test_the_state_of_tied_weights_is_loaded_by_one_name(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch_versions, "TORCH", version)
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def started(rate: float) -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [*model.parameters()][1:]}], lr=rate)
        model(torch.rand(5, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, others) = started(0.1), started(0.2)
    written = get_optimizer_state_dict(model, optimizer, options=options)
    flat = {name: x for name, x in written.items() if not name.endswith("decoupled_weight_decay")}  # as by torch 2.6
    torch_versions.load_flat_state(other, others, flat)
    loaded = get_optimizer_state_dict(other, others, options=options)
    assert loaded.keys() == written.keys() and all(torch.as_tensor(flat[k] == loaded[k]).all() for k in flat)


@both
def test_embeddings_of_one_shape_have_their_own_masks(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(_redistribute, "_gen_transform_infos", _redistribute._gen_transform_infos)
    monkeypatch.setattr(torch_versions, "TORCH", version)
    torch_versions.keep_masks_apart()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for padding in (None, 0):
        weight, words = torch.rand(8, 4), torch.arange(8)
        divided = DTensor.from_local(weight, mesh, [Shard(0)])
        out: Any = torch.nn.functional.embedding(DTensor.from_local(words, mesh, [Replicate()]), divided, padding)
        assert torch.equal(out.to_local(), weight)
        out.full_tensor()  # uses up the mask; the fake group adds nothing up
    torch.distributed.destroy_process_group()
