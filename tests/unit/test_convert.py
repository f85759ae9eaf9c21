"""`onebit convert`: what comes out is what was saved, and nothing that a file says is run."""

from __future__ import annotations

import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onebit import OnebitAdam, ZeroOneAdam, zero
from onebit.cli import main
from onebit.cli.convert import adamw_state, read_weights
from onebit.comm import SimTransport, run_ranks
from onebit.zero.checkpoint.files import Checkpoints

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES = OrderedDict([("first.weight", torch.Size([5, 7])), ("first.bias", torch.Size([5])), ("last", torch.Size([3]))])


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())


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


# ---------------------------------------------------------------- DeepSpeed


class Evil:
    """Unpickled by pickle, it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.folder,)


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


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3, 11])
def test_deepspeeds_masters_become_weights(tmp_path: Path, stage: int, ranks: int) -> None:
    expected = save_as_deepspeed(tmp_path / "global_step5", stage, ranks)
    (tmp_path / "latest").write_text("global_step5\n")
    target = tmp_path / "model.safetensors"
    assert main(["convert", str(tmp_path), str(target)]) == 0
    assert same(load_file(target), expected)


@pytest.mark.parametrize("case", ["0-fp32", "1-fp32", "2-bf16", "3-fp32", "3-bf16"])
@pytest.mark.parametrize("tag", [[], ["--tag", "t3"]], ids=["newest", "by tag"])
def test_what_deepspeed_itself_wrote_is_what_its_own_tool_reads(tmp_path: Path, case: str, tag: list[str]) -> None:
    """golden/write_deepspeed.py wrote them. Its tool turns buffers of integers into float32, which ours are not."""
    with zipfile.ZipFile(GOLDEN / "deepspeed_0.19.6.zip") as archive:
        archive.extractall(tmp_path)
    assert main(["convert", *tag, str(tmp_path / case), str(tmp_path / "ours.pt")]) == 0
    ours, expected = (torch.load(tmp_path / name) for name in ("ours.pt", f"{case}/expected.pt"))
    counts = {name for name, x in ours.items() if not x.is_floating_point()}
    assert counts == {"table", "norm.num_batches_tracked"} & set(expected)
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
    expected = save_as_deepspeed(tmp_path / "c", 2, 2, extra=[held, Evil(evil)])
    monkeypatch.delitem(sys.modules, "deepspeed_of_yore")
    assert same(read_weights(tmp_path / "c"), expected) and not evil.exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bare_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """torch reads files of its first format by pickle_module.load, not by the Unpickler."""
    folder = tmp_path / "global_step1"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Evil(tmp_path / "made"), protocol=protocol))
    with pytest.raises(ValueError, match="cannot be read"):
        read_weights(folder)
    assert not (tmp_path / "made").exists()


def test_files_of_torchs_first_format_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "global_step1"
    folder.mkdir()
    content = {"module": weights(), "other": types.SimpleNamespace(x=1)}
    torch.save(content, folder / "mp_rank_00_model_states.pt", _use_new_zipfile_serialization=False)
    assert same(read_weights(folder), weights())


# ---------------------------------------------------------------- torch's files


def test_torchs_files_there_and_back(tmp_path: Path) -> None:
    model = weights()
    torch.save({"model": model, "step": 3}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]) == 0
    assert main(["convert", str(tmp_path / "b.safetensors"), str(tmp_path / "c.pt")]) == 0
    assert same(torch.load(tmp_path / "c.pt", weights_only=True), model)


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["a.pt", "b.txt"], 2, "ends in .safetensors or .pt"),
        (["a.pt", "b.pt", "c.pt"], 2, "weights come from one folder or file"),
        (["a.pt", "a.pt"], 1, "is there already"),
        (["none", "b.pt"], 1, "is not there"),
        (["empty", "b.pt"], 1, "holds no checkpoint that this knows"),
        (["empty", "b.pt", "--tag", "x"], 1, "has no checkpoint 'x'; it holds none"),
        (["evil.pt", "b.pt"], 1, "cannot be read"),
        (["a.pt", "b.pt", "--adamw"], 1, "holds no state of OnebitAdam"),
    ],
)
def test_what_cannot_be_converted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, complaint: str
) -> None:
    torch.save(weights(), tmp_path / "a.pt")
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
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
