"""`onebit convert`: what comes out is what was saved, and nothing that a file says is run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family import same
from faults.hostile import Hostile, rewrite_zip, write_bomb, write_script, write_tar
from safetensors.torch import load_file
from torch import Tensor, nn
from train.checkpoint import CheckpointFolder

from onebit import OnebitAdam, ZeroOneAdam, zero
from onebit.checkpoint.files import CheckpointError, _crc32
from onebit.cli import main
from onebit.cli.convert import adamw_state, read_weights
from onebit.comm import SimTransport, run_ranks
from onebit.zero.checkpoint.files import Checkpoints

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES = OrderedDict([("first.weight", torch.Size([5, 7])), ("first.bias", torch.Size([5])), ("last", torch.Size([3]))])


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


# ---------------------------------------------------------------- onebit.zero


def test_an_engines_checkpoint_becomes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints, model = Checkpoints(tmp_path / "run", SimTransport()), weights()
    checkpoints.save(3, model, {"optimizer": 1})
    checkpoints.save(7, {name: 2 * x for name, x in model.items()}, {"optimizer": 1})
    target = tmp_path / "model.safetensors"
    assert main(["convert", str(tmp_path / "run"), str(target)]) == 0
    assert "3 tensors" in capsys.readouterr().out
    assert same(load_file(target), {name: 2 * x for name, x in model.items()})
    older = tmp_path / "older.pt"
    assert main(["convert", str(tmp_path / "run"), str(older), "--tag", "step_00000003", "--dtype", "bf16"]) == 0
    assert same(torch.load(older, weights_only=True), {name: x.bfloat16() for name, x in model.items()})


def test_shared_state_of_an_engines_optimizer_is_no_weight(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine = zero.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path / "run", tag="last")
    engine.close()
    target = tmp_path / "model.safetensors"
    assert main(["convert", str(tmp_path / "run"), str(target)]) == 0
    assert same(load_file(target), dict(model.state_dict()))
    zero.import_weights(nn.Linear(4, 3), target, SimTransport())


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpoints(tmp_path, SimTransport()).save(3, weights(), None)
    (file,) = (tmp_path / "step_00000003").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["convert", str(tmp_path), str(tmp_path / "model.safetensors")]) == 1
    assert file.name in capsys.readouterr().err and not (tmp_path / "model.safetensors").exists()


def test_a_run_without_an_engine_is_told_which_file_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CheckpointFolder(tmp_path / "runs" / "gpt", SimTransport(), torch.device("cpu"))
    folder.save(7, {"model": weights()}, {"optimizer": 1})
    target = tmp_path / "model.safetensors"
    assert main(["convert", str(folder.folder), str(target)]) == 1
    assert "holds files of torch.save (rank_00000.pt, shared.pt); name the one" in capsys.readouterr().err
    assert main(["convert", str(folder.folder / "step_00000007" / "shared.pt"), str(target)]) == 0
    assert same(load_file(target), weights())


# ---------------------------------------------------------------- DeepSpeed


def save_as_deepspeed(folder: Path, stage: int, ranks: int, extra: object = None) -> dict[str, Tensor]:
    """The files of its stages, written from what their own reader says of them; the weights that they hold.

    Two groups of parameters, a buffer, a shared parameter, and the frozen one "head".
    """
    folder.mkdir(parents=True)
    model, buffer, head = weights(), torch.arange(4.0), torch.arange(6.0).view(2, 3)
    groups = [OrderedDict(list(SHAPES.items())[:2]), OrderedDict(list(SHAPES.items())[2:])]
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    for shapes in groups:
        if stage == 3:
            shards = [
                torch.cat([nn.functional.pad(model[n].view(-1), (0, -model[n].numel() % ranks)).chunk(ranks)[r]
                           for n in shapes])
                for r in range(ranks)
            ]  # fmt: skip
        else:
            flat = torch.cat([model[name].view(-1) for name in shapes])
            shards = list(nn.functional.pad(flat, (0, -flat.numel() % (2 * ranks))).chunk(ranks))
        for rank, shard in enumerate(shards):
            parts[rank].append(shard)
    cut = nn.functional.pad(head.view(-1), (0, -head.numel() % ranks)).chunk(ranks)
    for rank in range(ranks):
        said = {
            "module": {**{n: x.bfloat16() for n, x in model.items()}, "count": buffer.bfloat16()},
            "buffer_names": ["count"], "param_shapes": groups, "shared_params": {"tied": "last"},
            "frozen_param_shapes": OrderedDict(head=head.shape),
            "frozen_param_fragments": {"head": cut[rank] if stage == 3 else head}, "ds_version": "0.19.6",
            "extra": extra,
        }  # fmt: skip
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(said, folder / f"{name}_model_states.pt")
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {"zero_stage": stage, "partition_count": ranks, key: parts[rank], "loss_scaler": extra}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return model | {"count": buffer, "head": head, "tied": model["last"]}


@pytest.mark.parametrize(("stage", "ranks"), [(1, 11), (2, 3), (3, 1), (3, 11)])
def test_deepspeeds_masters_become_weights(tmp_path: Path, stage: int, ranks: int) -> None:
    expected = save_as_deepspeed(tmp_path / "global_step5", stage, ranks)
    (tmp_path / "latest").write_text("global_step5\n")
    target = tmp_path / "model.safetensors"
    assert main(["convert", str(tmp_path), str(target)]) == 0
    assert same(load_file(target), expected)


@pytest.mark.parametrize("case", ["0-fp32", "1-fp32", "2-bf16", "3-fp32", "3-bf16"])
@pytest.mark.parametrize("tag", [[], ["--tag", "t3"]], ids=["newest", "by tag"])
def test_what_deepspeed_itself_wrote_is_what_its_own_tool_reads(tmp_path: Path, case: str, tag: list[str]) -> None:
    """golden/write_deepspeed.py wrote them. Its tool turns buffers of integers into float32, and at stage 1 it loses
    the frozen weights; ours does neither."""
    with zipfile.ZipFile(GOLDEN / "deepspeed_0.19.6.zip") as archive:
        archive.extractall(tmp_path)
    assert main(["convert", *tag, str(tmp_path / case), str(tmp_path / "ours.pt")]) == 0
    ours, expected = (torch.load(tmp_path / name) for name in ("ours.pt", f"{case}/expected.pt"))
    counts = {name for name, x in ours.items() if not x.is_floating_point()}
    assert counts == {"table", "norm.num_batches_tracked"} & set(expected)
    if case == "1-fp32":
        assert "frozen" not in expected and ours.pop("frozen").shape == (5,)
    assert same(ours, {name: x.to(torch.int64) if name in counts else x for name, x in expected.items()})


def test_without_optimizer_states_the_modules_weights_are_taken(tmp_path: Path) -> None:
    save_as_deepspeed(tmp_path / "c", 1, 2)
    for path in (tmp_path / "c").glob("*_optim_states.pt"):
        path.unlink()
    found = read_weights(tmp_path / "c")
    assert same({name: found[name] for name in SHAPES}, {name: x.bfloat16() for name, x in weights().items()})


def test_a_lost_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_as_deepspeed(tmp_path / "c", 2, 3)
    (tmp_path / "c" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "x.pt")]) == 1
    assert "of 2 ranks, it was written by 3" in capsys.readouterr().err


def test_nothing_in_a_file_is_run_and_unknown_classes_are_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("deepspeed_of_yore")
    scaler = type("LossScaler", (), {"__module__": "deepspeed_of_yore"})
    module.LossScaler = scaler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed_of_yore", module)
    held = scaler()
    held.scale = 8.0  # type: ignore[attr-defined]
    evil = tmp_path / "made by a file"
    expected = save_as_deepspeed(tmp_path / "c", 2, 2, extra=[held, Hostile(evil)])
    monkeypatch.delitem(sys.modules, "deepspeed_of_yore")
    assert same(read_weights(tmp_path / "c"), expected) and not evil.exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bare_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """torch reads files of its first format by pickle_module.load, not by the Unpickler."""
    folder = tmp_path / "global_step1"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Hostile(tmp_path / "made"), protocol=protocol))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights(folder)
    assert not (tmp_path / "made").exists()


def write_script_without_constants(path: Path, victim: Path) -> None:
    """As a reader that looks for constants.pkl alone would miss it."""
    write_script(path, victim)
    rewrite_zip(path, zipfile.ZIP_STORED, lambda name: not name.endswith("constants.pkl"))


def write_legacy(path: Path, victim: Path) -> None:
    torch.save({"module": weights()}, path, _use_new_zipfile_serialization=False)


def write_other_zip(path: Path, victim: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/version", "3")
        archive.writestr("a/b/data.pkl", pickle.dumps(Hostile(victim), protocol=2))


FORMS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "TorchScript": (write_script, "TorchScript archive"),
    "TorchScript without constants": (write_script_without_constants, "TorchScript archive"),
    "tar": (write_tar, "tar file"),
    "legacy": (write_legacy, "bare pickle"),
    "bomb": (write_bomb, "compressed or overlap"),
    "another zip": (write_other_zip, "zip file without data.pkl"),
}
"""What writes a file that is to harm another one, and what the refusal calls it."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "weights.pt", "optimizer.pt"])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_than_torch_saves_zip_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, name: str
) -> None:
    folder, victim = tmp_path / "given", tmp_path / "victim"
    folder.mkdir()
    write, called = FORMS[form]
    write(folder / name, victim)
    victim.write_bytes(bytes(64))
    words = {"weights.pt": [], "optimizer.pt": ["--adamw"]}.get(name)
    source = folder if words is None else folder / name
    assert main(["convert", *(words or []), str(source), str(tmp_path / "out.pt")]) == 1
    said = capsys.readouterr().err
    assert victim.read_bytes() == bytes(64) and re.search(f"{name} cannot be read: .*{called}", said), said
    assert os.listdir(folder) == [name] and len(os.listdir(tmp_path)) == 2


# ---------------------------------------------------------------- folders that are odd


def altered(folder: Path, pattern: str, change: Callable[[Any], object]) -> Path:
    """The folder, with what `change` makes of the content of its first file of that pattern."""
    path = sorted(folder.glob(pattern))[0]
    content = torch.load(path, weights_only=True)
    made = change(content)
    torch.save(content if made is None else made, path)
    return folder


MODEL, OPTIMIZER, STAMP_OF = "*_model_states.pt", "*_optim_states.pt", "step_00000001/stamp.json"
IN_MODEL: dict[str, Callable[[Any], object]] = {
    "a list": lambda content: [1, 2],
    "a tensor": lambda content: torch.ones(2),
    "no module": lambda content: content.pop("module") and None,
    "no shapes": lambda content: content.pop("param_shapes") and None,
    "shapes that are a number": lambda content: content.update(param_shapes=3),
    "a shape of 2^80": lambda content: content["param_shapes"][0].update({"first.bias": (2**40, 2**40)}),
    "ties that are a number": lambda content: content.update(shared_params=3),
    "fragments of other names": lambda content: content.update(frozen_param_fragments={}),
}
IN_OPTIMIZER: dict[str, Callable[[Any], object]] = {
    "no state": lambda state: state.clear(),
    "stage x": lambda state: state.update(zero_stage="x"),
    "another stage than its peer": lambda state: state.update(zero_stage=1),
    "a list of no ranks": lambda state: state.update(partition_count=[]),
    "no masters": lambda state: state.pop("single_partition_of_fp32_groups") and None,
    "masters that are numbers": lambda state: state.update(single_partition_of_fp32_groups=[1, 2]),
    "masters of one group": lambda state: state["single_partition_of_fp32_groups"].pop() is None or None,
    "masters of two dimensions": lambda state: state.update(single_partition_of_fp32_groups=[torch.ones(3, 3)] * 2),
}
IN_FOLDER: dict[str, Callable[[Path], object]] = {
    "a stray rank for a lost one": lambda folder: next(folder.glob("zero_pp_rank_1*")).rename(
        folder / "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    ),
    "a cut file": lambda folder: os.truncate(next(folder.glob(OPTIMIZER)), 1000),
    "an empty file": lambda folder: os.truncate(next(folder.glob(OPTIMIZER)), 0),
    "a pipe": lambda folder: (next(folder.glob(MODEL)).unlink(), os.mkfifo(folder / "mp_rank_00_model_states.pt")),
    "a link out of it": lambda folder: (
        next(folder.glob(MODEL)).rename(folder.parent / "secret.pt"),
        (folder / "mp_rank_00_model_states.pt").symlink_to(folder.parent / "secret.pt"),
    ),
    "a latest that is no text": lambda folder: (folder / "latest").write_bytes(b"\xff\xfe\0"),
    "a latest that leads out": lambda folder: (folder / "latest").write_text("../.."),
    "a latest that names nothing": lambda folder: (folder / "latest").write_text("global_step9"),
    "a latest that is a pipe": lambda folder: os.mkfifo(folder / "latest"),
    "a latest of 5000 letters": lambda folder: (folder / "latest").write_text("a" * 5000),
    "a latest that links to itself": lambda folder: (folder / "latest").symlink_to(folder / "latest"),
}
STAMPS = {
    "a list": "[]",
    "brackets": "[" * 200_000,
    "no UTF-8": "\udcff\udcfe",
    "files that are a list": '{"files": [".metadata"], "step": 1, "world_size": 1, "crc32": {}}',
    "sizes that are text": '{"files": {".metadata": "x"}, "step": 1, "world_size": 1, "crc32": {}}',
    "sums that are a number": '{"files": {}, "step": 1, "world_size": 1, "crc32": 3}',
    "no files": '{"files": {}, "step": 1, "world_size": 1, "crc32": {}}',
    "no sums": '{"files": {}, "step": 1, "world_size": 1}',
}
CONTENTS: dict[str, Callable[[], object]] = {
    "a number": lambda: 3,
    "no names": lambda: {1: torch.ones(2)},
    "a sparse tensor": lambda: {"w": torch.eye(3).to_sparse()},
    "a tensor without values": lambda: {"w": torch.ones(3, device="meta")},
    "a tensor of 10^11 elements in 4 bytes": lambda: {"w": torch.ones(1).expand(10**11)},
}


def odd_sources(case: str, tmp_path: Path) -> Path:
    kind, _, name = case.partition(": ")
    if kind == "stamp":
        Checkpoints(tmp_path / "run", SimTransport()).save(1, weights(), {"a": 1})
        stamp = STAMPS[name]
        if stamp.startswith("{"):  # with a sum of its own that is right
            stamp = stamp[:-1] + f', "stamp_crc32": {_crc32(json.loads(stamp))}}}'
        (tmp_path / "run" / STAMP_OF).write_text(stamp, errors="surrogateescape")
        return tmp_path / "run"
    if kind == "file":
        torch.save(CONTENTS[name](), tmp_path / "given.pt")
        return tmp_path / "given.pt"
    folder = tmp_path / "given"
    save_as_deepspeed(folder, 2, 2)
    if kind == "folder":
        IN_FOLDER[name](folder)
        return folder
    if kind == "model":
        return altered(folder, MODEL, IN_MODEL[name])
    return altered(folder, OPTIMIZER, lambda content: IN_OPTIMIZER[name](content["optimizer_state_dict"]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "case",
    [
        *(f"model: {name}" for name in IN_MODEL),
        *(f"optimizer: {name}" for name in IN_OPTIMIZER),
        *(f"folder: {name}" for name in IN_FOLDER),
        *(f"stamp: {name}" for name in STAMPS),
        *(f"file: {name}" for name in CONTENTS),
    ],
)
def test_an_odd_folder_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    source = odd_sources(case, tmp_path)
    assert main(["convert", str(source), str(tmp_path / "out.safetensors")]) == 1
    said = capsys.readouterr().err
    assert str(source) in said and said.startswith("onebit convert: ") and not (tmp_path / "out.safetensors").exists()


# ---------------------------------------------------------------- torch's files


def test_torchs_files_there_and_back(tmp_path: Path) -> None:
    model = weights()
    torch.save({"model": model, "step": 3}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]) == 0
    assert main(["convert", str(tmp_path / "b.safetensors"), str(tmp_path / "c.pt")]) == 0
    assert same(torch.load(tmp_path / "c.pt", weights_only=True), model)


def test_a_weight_that_would_become_infinite_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = torch.ones(2, dtype=torch.float8_e4m3fn)  # torch cannot tell whether its elements are finite
    torch.save({"fits": small, "large": torch.tensor([1.0, 1e5])}, tmp_path / "old.pt")
    words = ["convert", str(tmp_path / "old.pt"), str(tmp_path / "new.pt"), "--dtype"]
    assert main([*words, "fp16"]) == 1 and not (tmp_path / "new.pt").exists()
    assert "large has elements beyond 65504" in capsys.readouterr().err
    assert main([*words, "bf16"]) == 0


@pytest.mark.parametrize("name", ["new.pt", "new.safetensors"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch.save({"x": torch.ones(4)}, tmp_path / "old.pt")

    def full(tensors: object, file: Any, **options: object) -> None:
        with open(file, "wb") if isinstance(file, Path) else contextlib.nullcontext(file) as out:
            out.write(b"begun")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert main(["convert", str(tmp_path / "old.pt"), str(tmp_path / name)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old.pt"]


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["a.pt", "b.txt"], 2, "ends in .safetensors or .pt"),
        (["a.pt", "b.pt", "c.pt"], 2, "weights come from one folder or file"),
        (["a.pt", "a.pt"], 1, "exists already"),
        (["none", "b.pt"], 1, "does not exist"),
        (["empty", "b.pt"], 1, "holds no checkpoint of a known kind"),
        (["empty", "b.pt", "--tag", "x"], 1, "has no checkpoint 'x', which is no folder there"),
        (["evil.pt", "b.pt"], 1, "cannot be read"),
        (["module.pt", "b.pt"], 1, "it holds torch.nn.modules.linear.Linear, and of Python's objects only tensors and"),
        (["a.pt", "b.pt", "--adamw"], 1, "holds no state of OnebitAdam"),
    ],
)
def test_what_cannot_be_converted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, complaint: str
) -> None:
    torch.save(weights(), tmp_path / "a.pt")
    torch.save({"model": Hostile(tmp_path / "made")}, tmp_path / "evil.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "module.pt")
    (tmp_path / "empty").mkdir()
    arguments = [word if word.startswith("--") or word == "x" else str(tmp_path / word) for word in words]
    if status == 2:
        with pytest.raises(SystemExit):
            main(["convert", *arguments])
    else:
        assert main(["convert", *arguments]) == 1
    assert complaint in capsys.readouterr().err and not (tmp_path / "made").exists()


# ---------------------------------------------------------------- the optimizer's state


def trained(transport: SimTransport, steps: int, make: type = OnebitAdam, **options: object) -> tuple:
    torch.manual_seed(0)
    model = nn.Linear(40, 9)
    optimizer = make(model.parameters(), lr=1e-2, transport=transport, compression="always", **options)
    generator = torch.Generator().manual_seed(transport.rank)
    for _ in range(steps):
        x = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :9] * 3).backward()
        optimizer.step()
    return model, optimizer, optimizer.state_dict()


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return nn.functional.mse_loss(model(torch.eye(40)), torch.eye(40)[:, :9] * 3).item()


@pytest.mark.parametrize("momentum_of", ["gradients", "moves"])
@pytest.mark.parametrize("steps", [5, 30])
def test_adamw_takes_over_momentum_and_variance(tmp_path: Path, steps: int, momentum_of: str) -> None:
    """In warm-up and behind it: m and v as the optimizer itself shows them, on any number of ranks."""
    options = {"freeze_step": 10, "variance_floor": 0.0, "momentum_of": momentum_of}
    every = run_ranks(3, lambda transport: trained(transport, steps, **options))
    files = [tmp_path / f"rank{rank}.pt" for rank in range(3)]
    for file, (_, _, state) in zip(files, every, strict=True):
        torch.save({"optimizer": state, "model": {}}, file)
    target = tmp_path / "adamw.pt"
    assert main(["convert", "--adamw", *map(str, files), str(target)]) == 0
    model, optimizer, _ = every[0]
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0)
    adamw.load_state_dict(torch.load(target, weights_only=True))
    group, (bucket,) = adamw.param_groups[0], optimizer.buckets
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-2, (0.9, 0.999), 1e-2)
    shown = bucket.layout.views(optimizer.rule.momentum(bucket) * (1 - 0.9**steps))  # it is shown without its bias
    moments = {p: m for p, m in zip(bucket.params, shown, strict=True)}
    for p in model.parameters():
        assert float(adamw.state[p]["step"]) == steps
        torch.testing.assert_close(adamw.state[p]["exp_avg"], moments[p], rtol=1e-5, atol=1e-8)
        if steps > 10:
            root = adamw.state[p]["exp_avg_sq"].div(1 - 0.999**steps).sqrt() + 1e-8
            torch.testing.assert_close(root, optimizer.state[p]["denominator"], rtol=1e-4, atol=0)
    before = loss_of(model)
    generator = torch.Generator().manual_seed(9)
    for _ in range(20):
        x = torch.randn(16, 40, generator=generator)
        adamw.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :9] * 3).backward()
        adamw.step()
    assert loss_of(model) < before


def test_states_of_others_and_of_too_few_are_refused() -> None:
    states = [state for _, _, state in run_ranks(2, lambda transport: trained(transport, 3))]
    with pytest.raises(ValueError, match="states of all 2 ranks, got 1"):
        adamw_state(states[:1])
    with pytest.raises(ValueError, match="ranks 0, 1, 2"):
        adamw_state(states[::-1])
    other = [state for _, _, state in run_ranks(1, lambda transport: trained(transport, 3, ZeroOneAdam))]
    with pytest.raises(ValueError, match="that of 0/1 Adam, this is 1-bit Adam"):
        adamw_state(other)
