"""A model without values, and what gives it some: folders, files, its own modules; what is wrong is named."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from large_ranks import Net, net, on_meta, write_folder
from ranks import free_port
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from onebit import zero
from onebit.checkpoint.files import CheckpointError
from onebit.comm import SimTransport, run_ranks, torch_versions
from onebit.model_parallel import TENSOR_AXIS
from onebit.zero.checkpoint import weight_folder
from onebit.zero.checkpoint.reshard import boxes_of
from onebit.zero.checkpoint.weight_files import open_weights
from onebit.zero.checkpoint.weights import write_weights
from onebit.zero.parallel.stacked import stack_placement


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in [*model.named_parameters(), *model.named_buffers()]}


def alike(a: nn.Module, b: nn.Module) -> bool:
    first, second = values(a), values(b)
    return first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hf", net())
    return tmp_path / "hf"


# -------------------------------------------------------------------------------- plain models


def test_a_plain_model_takes_a_folder_and_stays_the_same_objects(folder: Path) -> None:
    model = on_meta()
    held = list(model.parameters())
    assert zero.materialize(model, folder) is model
    assert alike(model, net()) and model.head.weight is model.embed.weight
    assert all(p is q for p, q in zip(held, model.parameters(), strict=True))


def test_one_file_is_as_good_as_a_folder_and_dtypes_are_converted(folder: Path, tmp_path: Path) -> None:
    save_file(
        {name: x.half() if x.dim() else x for name, x in net().state_dict().items() if name != "head.weight"},
        tmp_path / "one.safetensors",
    )
    model = on_meta().to(torch.bfloat16)
    zero.materialize(model, tmp_path / "one.safetensors")
    assert model.layers[0].base.weight.dtype == torch.bfloat16
    assert torch.equal(model.layers[0].base.weight, net().layers[0].base.weight.half().bfloat16())


def test_a_model_that_has_values_takes_the_folders(folder: Path) -> None:
    model = Net()
    assert not alike(model, net())
    assert alike(zero.materialize(model, folder), net())


def test_initial_values_follow_the_seed_alone() -> None:
    first, same, other = (zero.materialize(on_meta(), "reset_parameters", seed=seed) for seed in (0, 0, 1))
    state = torch.random.get_rng_state()
    assert alike(first, same) and not alike(first, other)
    assert alike(first, zero.materialize(on_meta(), "reset_parameters"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.rotary.count == 0 and torch.equal(first.rotary.table, net().rotary.table)


@pytest.mark.slow
def test_a_transformers_model_computes_its_rotary_table_itself(tmp_path: Path) -> None:
    """Against the model itself, whose folder it is; in several files, written by transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).eval()
    zero.materialize(empty, tmp_path)
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(empty(tokens).logits, model(tokens).logits)


@pytest.mark.slow
def test_what_is_written_here_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    zero.export_weights(model, tmp_path, SimTransport(), max_file_bytes=4000)
    config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_smaller_model_leaves_nothing_of_a_larger_one(tmp_path: Path) -> None:
    for most in (300, 3000):
        zero.export_weights(net(), tmp_path, SimTransport(), max_file_bytes=most)
        table = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert {path.name for path in tmp_path.glob("*.safetensors")} == set(table.values())
        assert alike(zero.materialize(on_meta(), tmp_path), net())


@pytest.mark.parametrize("most", [(300, None), (None, 300)])
def test_of_a_folder_and_a_file_the_later_one_is_read(tmp_path: Path, most: tuple[int | None, int | None]) -> None:
    """transformers takes model.safetensors if it is there, and looks for no index then."""
    first = net()
    for p in first.parameters():
        nn.init.ones_(p)
    for model, size in zip((first, net()), most, strict=True):
        file = tmp_path / "model.safetensors" if size is None else tmp_path
        zero.export_weights(model, file, SimTransport(), max_file_bytes=size)
    assert alike(zero.materialize(on_meta(), tmp_path), net())
    assert (tmp_path / "model.safetensors").is_file() == (most[1] is None)


@pytest.mark.parametrize("fails", ["write_weights", "_write_index"])
@pytest.mark.parametrize("earlier", [None, 300, 400])
def test_an_export_that_fails_leaves_the_model_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int | None, fails: str
) -> None:
    """Whole, be it one file, files of the same names, or of others; and nothing of the new one."""
    first = net()
    for p in first.parameters():
        nn.init.ones_(p)
    file = tmp_path / "model.safetensors" if earlier is None else tmp_path
    zero.export_weights(first, file, SimTransport(), max_file_bytes=earlier)
    there = sorted(path.name for path in tmp_path.iterdir())
    function, left = getattr(weight_folder, fails), [1] * (fails == "write_weights")

    def full(*given: object) -> None:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        function(*given)

    with monkeypatch.context() as patch:
        patch.setattr(weight_folder, fails, full)
        with pytest.raises(OSError, match=r"(00002-of-\d+\.safetensors|index\.json) cannot be written: No space left"):
            zero.export_weights(net(), tmp_path, SimTransport(), max_file_bytes=300)
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert alike(zero.materialize(on_meta(), tmp_path), first)
    zero.export_weights(net(), tmp_path, SimTransport(), max_file_bytes=300)
    assert alike(zero.materialize(on_meta(), tmp_path), net())


@pytest.mark.parametrize("name", ["..", "", ".", "mine", "../other.txt"])
def test_an_export_removes_nothing_but_the_files_that_an_old_index_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "mine").mkdir(parents=True)
    (tmp_path / "other.txt").write_text("theirs")
    (folder / "mine" / "notes.txt").write_text("theirs")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    zero.export_weights(net(), folder, SimTransport(), max_file_bytes=300)
    assert (tmp_path / "other.txt").exists() and (folder / "mine" / "notes.txt").exists()
    assert alike(zero.materialize(on_meta(), folder), net())


def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path: Path) -> None:
    hidden = tmp_path / ".model.safetensors.index.json.new"
    hidden.mkdir()
    (hidden / "model-00001-of-00009.safetensors").write_bytes(b"half")
    zero.export_weights(net(), tmp_path, SimTransport(), max_file_bytes=300)
    assert not hidden.exists() and alike(zero.materialize(on_meta(), tmp_path), net())


def test_files_that_cannot_be_moved_stay_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero.export_weights(net(), tmp_path, SimTransport(), max_file_bytes=300)

    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if Path(source).name == Path(target).name:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=r"Input/output error; its new files are in \S+\.new: move them"):
            zero.export_weights(net(), tmp_path, SimTransport(), max_file_bytes=300)
    hidden = tmp_path / ".model.safetensors.index.json.new"
    assert alike(zero.materialize(on_meta(), hidden), net())


# -------------------------------------------------------------------------------- what is wrong


def without(name: str, folder: Path) -> None:
    state = {key: x.contiguous() for key, x in net().state_dict().items() if key not in (name, "head.weight")}
    rewrite(folder, state)


def rewrite(folder: Path, state: dict[str, Tensor]) -> None:
    for file in folder.iterdir():
        file.unlink()
    save_file(state, folder / "model.safetensors")


def changed(folder: Path, **tensors: Tensor) -> None:
    state = {key: x.contiguous() for key, x in net().state_dict().items() if key != "head.weight"}
    rewrite(folder, state | {name.replace("__", "."): x for name, x in tensors.items()})


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: without("norm.bias", f), "has no norm.bias, which the model has"),
    "prefix": (
        lambda f: rewrite(
            f, {f"model.{k}": x.contiguous() for k, x in net().state_dict().items() if k != "head.weight"}
        ),
        "has no embed.weight, which the model has; it has model.embed.weight: build the model whose names these are",
    ),
    "strange": (lambda f: changed(f, other=torch.ones(2)), "has other and 0 more, which the model does not"),
    "shape": (lambda f: changed(f, norm__bias=torch.ones(2)), "norm.bias has shape (2,), the model's (12,)"),
    "dtype": (
        lambda f: changed(f, norm__bias=torch.ones(12, dtype=torch.int8)),
        "norm.bias is torch.int8, the model's torch.float32; only floating-point dtypes are converted",
    ),
    "a file of the index": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        "names 'model-00002-of-00002.safetensors', which is no file beside it; fetch the folder whole",
    ),
    "a name twice": (
        lambda f: [
            (f / "model.safetensors.index.json").unlink(),
            save_file({"norm.bias": torch.ones(12)}, f / "b.safetensors"),
        ],
        "norm.bias is in b.safetensors and in model-0000",
    ),
    "damaged": (lambda f: os.truncate(f / "model-00001-of-00002.safetensors", 99), "cannot be read"),
    "empty": (lambda f: [file.unlink() for file in f.iterdir()], "holds no weights: expected a folder with"),
    "index": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "names no files: expected a weight_map"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_before_anything_changes(case: str, folder: Path) -> None:
    """On all ranks, with the one that has found it."""
    spoil, message = WRONG[case]
    spoil(folder)

    def ours(transport: SimTransport) -> bool:
        model = on_meta()
        with pytest.raises((ValueError, CheckpointError), match=f"rank 0: .*{re.escape(message)}"):
            zero.materialize(model, folder, transport=transport)
        return all(p.is_meta for p in model.parameters())

    assert run_ranks(2, ours) == [True, True]


class NoWay(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2), persistent=persistent)


class Around(NoWay):
    def reset_parameters(
        self,
    ) -> None:  # which draws the linear layer's, and is not called for a module without its own
        self.linear.reset_parameters()
        self.table.fill_(1.0)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))

    def _reset_parameters(self) -> None:
        self.table.fill_(1.0)


class Kept(Alone):
    def reset_buffers(self) -> None:
        self.table.fill_(3.0)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(2, 2), torch.ones(2)


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NoWay(False), r"table is a buffer without values, and no file .*NoWay a reset_buffers\(\)"),
        (lambda: NoWay(True), r"table is a buffer without values: give NoWay a reset_buffers\(\)"),
        (lambda: Around(True), r"table is a buffer without values: give Around a reset_buffers\(\)"),
        (Alone, r"table is a buffer without values: give Alone a reset_buffers\(\)"),
        (Loose, r"table is a tensor without values that is neither a parameter nor a buffer"),
        (OwnParameter, r"OwnParameter\) has parameters and no reset_parameters\(\)"),
    ],
)
def test_values_that_nobody_knows_are_errors(build: Callable[[], nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(build())
    with pytest.raises(ValueError, match=message):
        zero.materialize(model, "reset_parameters")


def test_a_saved_buffer_is_computed_if_there_are_no_files() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Kept())
    assert zero.materialize(model, "reset_parameters")[0].table.tolist() == [3.0, 3.0]


def test_an_engine_without_values_says_what_to_pass() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    with pytest.raises(
        ValueError, match=r'rank 0: the model has no values \(device "meta"\): pass initialize\(weights'
    ):
        zero.initialize(model=on_meta(), config=config)


def test_deepspeeds_init_builds_without_values_where_asked() -> None:
    with zero.zero.Init(remote_device="meta"):
        model = Net()
    assert all(p.is_meta for p in model.parameters())


# -------------------------------------------------------------------------------- memory


def damaged_copies(export: Path, copy: Path, count: int) -> Iterator[str]:
    """The export in `copy`, so often with one thing wrong: a bit, a byte of noise, 64 zeros, a cut; what it is."""
    chance = random.Random(14)
    for k in range(count):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(export, copy)
        path = chance.choice(sorted(copy.glob("*.safetensors")))
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content) - 64)
        if k % 4 == 0:
            content[place] ^= 1 << chance.randrange(8)
        elif k % 4 == 1:
            content[place] = (content[place] + chance.randrange(1, 256)) % 256
        elif k % 4 == 2:
            content[place : place + 64] = bytes(64)
        else:
            del content[-chance.randrange(1, 64) :]
        if content != path.read_bytes():
            path.write_bytes(content)
            yield f"{path.name}, {k % 4} at {place}"


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("most", [None, 1500], ids=["one file", "a folder"])
def test_no_damage_to_an_export_changes_a_weight(most: int | None, tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    zero.export_weights(
        net(), export / "model.safetensors" if most is None else export, SimTransport(), max_file_bytes=most
    )
    refused = 0
    for what in damaged_copies(export, tmp_path / "copy", 60):
        try:
            found = zero.materialize(on_meta(), tmp_path / "copy")
        except (CheckpointError, ValueError) as error:
            assert str(tmp_path / "copy") in str(error), what
            refused += 1
        else:
            assert alike(found, net()), what
        try:
            whole = zero.read_checkpoint_weights(tmp_path / "copy")
        except CheckpointError as error:
            assert str(tmp_path / "copy") in str(error), what
        else:
            assert all(torch.equal(x, whole[name]) for name, x in net().state_dict().items() if name in whole), what
    assert refused > 40


@pytest.mark.timeout(60)
def test_an_engine_refuses_a_damaged_export(tmp_path: Path) -> None:
    zero.export_weights(net(), tmp_path / "model.safetensors", SimTransport())
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-5] ^= 16
    (tmp_path / "model.safetensors").write_bytes(content)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}
    try:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .* is damaged"):
            zero.initialize(model=on_meta(), config=config, weights=tmp_path / "model.safetensors")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", [(7, 100_003), (1_000_003,), (300_001, 3), (3, 5, 40_009), (2, 2), (3, 60, 5_003)])
def test_a_rank_checks_the_pieces_that_its_slice_touches(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Slices of any dimension are what was written; damage is found by every rank in whose slice it is."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    write_weights(tmp_path / "x.safetensors", {"x": x})
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    at = x.numel() // 2
    content[len(content) - x.nbytes + 4 * at + 2] ^= 64
    (tmp_path / "damaged.safetensors").write_bytes(content)
    numbers = torch.arange(x.numel()).view(shape)
    placements = [Shard(dim) for dim in range(len(shape))]
    placements += [stack_placement(dim, 2) for dim, size in enumerate(shape) if size % 6 == 0]
    for placement in placements:
        for rank in range(3):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
            try:
                mesh = init_device_mesh("cpu", (3,), mesh_dim_names=(TENSOR_AXIS,))
                out = torch_versions.distribute(torch.zeros(shape), mesh, [placement], source=None)
                held = torch_versions.distribute(numbers, mesh, [placement], source=None).to_local()
                assert sum(x[box.there()].numel() for box in boxes_of(out)) == held.numel()
                open_weights(tmp_path / "x.safetensors").copy_to("x", out)
                assert torch.equal(out.to_local(), x.view(-1)[held])
                try:
                    open_weights(tmp_path / "damaged.safetensors").copy_to("x", out)
                except CheckpointError as error:
                    assert "its tensor x is damaged" in str(error)
                else:
                    assert not (held == at).any() and torch.equal(out.to_local(), x.view(-1)[held])
            finally:
                dist.destroy_process_group()


_PEAK = """
import resource, sys, torch
from torch import nn
from onebit import zero
from onebit.zero import grid as grids
from onebit.comm import init

def build():
    return nn.Sequential(*(nn.Linear(512, 2048, bias=False) for _ in range(24)))

grid = grids.start(shard=init().world_size)
with torch.device("meta"):
    model = build()
zero.fsdp.shard(model, grid, stage=3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
zero.materialize(model, sys.argv[1], transport=grid.world)
grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
held = sum(p.to_local().nbytes for p in model.parameters())
with open(f"{sys.argv[2]}/{init().rank}", "w") as file:  # two ranks' prints may mix
    print(grew * 1024, held, file=file)
grid.close()
"""


@pytest.mark.slow
def test_a_rank_holds_its_shards_and_a_constant_while_it_loads(tmp_path: Path) -> None:
    """96 MiB in 5 files, over 2 ranks, each a fresh process: 48 MiB of shards, 16 of mapped files, at most 16 more."""
    whole = nn.Sequential(*(nn.Linear(512, 2048, bias=False) for _ in range(24)))
    zero.export_weights(whole, tmp_path / "hf", SimTransport(), max_file_bytes=20 * 2**20)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 5
    script, peaks = tmp_path / "peak.py", tmp_path / "peaks"
    peaks.mkdir()
    script.write_text(_PEAK)
    command = [sys.executable, str(script), str(tmp_path / "hf"), str(peaks)]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    names = [{**os.environ, **world, "OMP_NUM_THREADS": "1", "RANK": k, "LOCAL_RANK": k} for k in "01"]
    ranks = [subprocess.Popen(command, env=its, stderr=subprocess.PIPE, text=True) for its in names]
    ended = [(rank.communicate(timeout=100)[1], rank.returncode) for rank in ranks]
    assert [status for _, status in ended] == [0, 0], ended
    for rank in range(2):
        grew, held = map(int, (peaks / str(rank)).read_text().split())
        assert held == 48 * 2**20 and grew < held + 32 * 2**20, (grew, held)
