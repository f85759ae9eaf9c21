"""Every key that is taken acts, in every form; what an engine does is what one machine would do with one big batch."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_keys import MORE, SAVED, keys, resumes_with_two
from engine_ranks import config_of, net
from errors import refused
from ranks import run_torchrun

import onebit
from onebit import zero
from onebit.comm import SimTransport, run_ranks
from onebit.comm.launch import Launch
from onebit.comm.messages import gather_bytes
from onebit.zero.config.sections import Monitor
from onebit.zero.forms import FORMS, choose, shard_ranks
from onebit.zero.forms.offloaded import Offloaded
from onebit.zero.grid import GridShape
from onebit.zero.monitor import open_monitors
from onebit.zero.parallel.groups import remembered


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict]:
    """Of all four ranks, of one start of processes."""
    return list(run_torchrun(4, keys, str(folder), timeout_s=110).check().results)  # type: ignore[arg-type]


def test_freeze_step_ends_the_warm_up_of_every_form(ranks: list[dict]) -> None:
    for facts in ranks:
        assert facts["phases"] == dict.fromkeys(("replicated", "inter_node", "intra_node"), "compressed")


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: list[dict]) -> None:
    assert ranks[0]["overflow"].keys() == {"inter_node 1", "inter_node 2", "intra_node 3", "dense 2"}
    for form in ranks[0]["overflow"]:
        for facts in ranks:
            _, before, skipped, after = facts["overflow"][form]["seen"]
            assert before[:2] == [256.0, 0], form
            assert skipped[:2] == [128.0, 1] and skipped[2:] == before[2:], f"{form}: schedule or parameters moved"
            assert after[:2] == [128.0, 1] and after[2] > skipped[2] and after[3] != skipped[3], form
            assert facts["overflow"][form] == ranks[0]["overflow"][form]


def test_dense_sums_and_clips_as_one_big_batch_does(ranks: list[dict]) -> None:
    """float32 against float64, differences of updates of up to 1: 1e-6 is a few roundings."""
    assert len(ranks[0]["big batch"]) == 4
    for facts in ranks:
        for case, (norm, seen, *gaps) in facts["big batch"].items():
            assert norm > 0.05 and len(gaps) == 2 and max(gaps) < 2e-6, f"{case}: {gaps}"
            assert seen is None if case.endswith("clip 0.0") else seen == pytest.approx(norm, rel=1e-5)


def test_the_update_is_the_mean_of_what_was_not_dropped(ranks: list[dict]) -> None:
    """More passes than micro-batches, and windows that were abandoned, at every stage."""
    for facts in ranks:
        assert len(facts["passes"]) == 30
        gaps = {case: gap for case, gap in facts["passes"].items() if gap > (2e-2 if "bf16" in case else 1e-5)}
        assert gaps == {}


def test_no_checkpoint_is_taken_within_a_step_and_loading_there_drops_it(ranks: list[dict]) -> None:
    for facts in ranks:
        refused = facts["within a step"].pop("refused")
        asked = [text.partition("asked for ")[2].partition(";")[0] for text in refused]
        assert asked == [f"{when} the step() of micro-batch 1 of 2" for when in ("before", "after", "before")]
        assert all(text.startswith("rank 0: checkpoints hold no gradients") for text in refused)
        assert facts["within a step"] == {"kept": ["latest", "step_00000004"], "loaded": True}


def test_statistics_are_the_mean_of_the_ranks_in_evaluation_and_checkpoints(ranks: list[dict]) -> None:
    for facts in ranks:
        assert facts["buffers"] == dict.fromkeys(
            ("replicated", "inter_node", "intra_node", "dense", "stages"), [True] * 6
        )


def test_a_first_step_with_stages_leaves_what_any_step_leaves(ranks: list[dict]) -> None:
    """Before it torch runs the stages on memory as it comes, to learn the shapes of what they send each other."""
    for facts in ranks:
        found = facts["first steps"]
        assert found["alike"] and found["finite"]
        first, second = found["counts"]
        assert first and set(first) == {2} and set(second) == {4}  # two micro-batches a step


def test_evaluations_and_checkpoints_land_a_step_under_way(ranks: list[dict]) -> None:
    for facts in ranks:
        assert facts["delay"] == {"eval": [True, True], "save": [True, True], "loaded": True}


def test_offload_changes_no_bit(ranks: list[dict]) -> None:
    assert all(facts["offload"] == {"intra_node": True, "dense": True} for facts in ranks)


def test_parameters_given_before_sharding_are_trained_behind_it(ranks: list[dict]) -> None:
    for facts in ranks:
        groups = facts["groups"]
        assert groups["found"] == groups["asked"] and groups["decays"] == [0.1, 0.0] and groups["moves"]


def test_the_monitors_hold_what_happened(ranks: list[dict]) -> None:
    first = ranks[0]["monitors"]
    rows, samples = first["rows"], ["32", "64", "96"]
    for tag, values in (("train_loss", first["losses"]), ("lr", first["rates"]), ("loss_scale", [256.0] * 3)):
        assert rows[tag][0] == ["step", tag] and [row[0] for row in rows[tag][1:]] == samples
        assert [float(row[1]) for row in rows[tag][1:]] == pytest.approx(values, rel=1e-6)
    assert [float(row[1]) for row in rows["skipped_steps"][1:]] == [0.0, 0.0, 0.0]
    assert len(first["events"]) == 1
    assert sum(line.startswith("milliseconds per step: forward ") for line in first["lines"]) == 1
    assert sum(line.startswith("configuration: {") and '"OneBitAdam"' in line for line in first["lines"]) == 1
    for facts in ranks[1:]:
        assert not any("milliseconds" in line or "configuration: {" in line for line in facts["monitors"]["lines"])
    # The file is in float16, the masters are float32.
    assert all(0 < facts["monitors"]["weights are off by"] < 1e-2 for facts in ranks)


def test_two_ranks_go_on_from_where_four_were(folder: Path, ranks: list[dict]) -> None:
    for facts in run_torchrun(2, resumes_with_two, str(folder), timeout_s=60).check().results:
        refused, in_files = facts.pop("refused"), facts.pop("parameters in files")
        assert len(in_files) == 12 and all(in_files.values()), in_files
        for forms, (loaded, resumed, steps) in facts.items():
            saved, uninterrupted = ranks[0]["ends"][forms.split()[0]]
            assert steps == SAVED + MORE
            assert loaded == pytest.approx(saved, rel=1e-6)
            assert uninterrupted < 0.8 * saved
            assert abs(resumed - uninterrupted) < 0.03 * saved, f"{forms}: {resumed}, not {uninterrupted}"
        assert len(facts) == 4
        assert "form is inter_node, this run's is replicated" in refused and "import_weights" in refused


# ---------------------------------------------------------------- without processes


def config(name: str = "OneBitAdam", params: dict | None = None, **blocks: object) -> zero.Config:
    return zero.read_config(config_of(name, params, **blocks), world_size=1)


@pytest.mark.parametrize(
    ("read", "form", "words"),
    [
        (config(), "replicated", []),
        (config(onebit={"differences": "sign"}), "replicated", ["onebit.differences"]),
        (config(onebit={"error_dtype": "bf16"}), "inter_node", ["onebit.error_dtype"]),
        (config(onebit={"delay": 1}), "inter_node", ["onebit.delay"]),
        (config(onebit={"delay": 1}), "intra_node", []),
        (config("AdamW", onebit={"delay": 1}), "dense", ["onebit.delay"]),
        (config(onebit={"bucket_cap_mb": 1, "block": 64}), "intra_node", []),
        (config("AdamW", onebit={"block": 64}), "dense", ["onebit.block"]),
        (config(params={"freeze_step": 9, "bias_correction": False}), "inter_node", ["bias_correction"]),
        (config("OneBitLamb", {"coeff_beta": 0.8, "factor_max": 2.0}), "inter_node", ["factor_max"]),
        (config("ZeroOneAdam", {"var_update_scaler": 8}), "inter_node", ["var_update_scaler"]),
        (config("ZeroOneAdam", {"var_freeze_step": 800}), "inter_node", ["var_freeze_step"]),
        (config("ZeroOneAdam", {"var_freeze_step": 8}), "inter_node", []),
        (config(params={"freeze_step": 23000}), "inter_node", ["freeze_step"]),
        (config(params={"momentum_of": "moves"}), "inter_node", ["momentum_of"]),
        (config(params={"momentum_of": "moves"}), "intra_node", []),
        (config(onebit={"warmup_codec": "log4"}), "inter_node", []),
        (config(onebit={"codec": "log4"}), "inter_node", ["onebit.codec"]),
        (config(communication_data_type="bf16"), "inter_node", ["communication_data_type"]),
        (config("ZeroOneAdam", {"var_freeze_step": 8, "local_step_scaler": 4}), "inter_node", []),
        (config("AdamW", communication_data_type="bf16"), "dense", ["communication_data_type"]),
        (config("AdamW", communication_data_type="fp32"), "dense", []),
        (config(communication_data_type="bf16"), "intra_node", []),
        (config(data_types={"grad_accum_dtype": "fp32"}), "intra_node", []),
        (config(data_types={"grad_accum_dtype": "fp32"}, bf16={"enabled": True}), "inter_node", ["grad_accum_dtype"]),
        (config(data_types={"grad_accum_dtype": "bf16"}, bf16={"enabled": True}), "intra_node", ["grad_accum_dtype"]),
        (config("AdamW", zero_optimization={"overlap_comm": False}), "dense", ["overlap_comm"]),
    ],
)
def test_what_a_form_does_not_do_is_said(read: zero.Config, form: str, words: list[str]) -> None:
    (made,) = [each for each in FORMS if each.name == form and each is not Offloaded]
    lines = made.without_effect(read, GridShape((1, 1, 1, 1)))
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True)), lines


@pytest.mark.parametrize(
    ("sizes", "stage", "more", "form"),
    [
        ((1, 1, 1, 1), 3, {}, "intra_node"),  # one rank takes the path of several
        ((1, 1, 1, 1), 1, {}, "inter_node"),
        ((1, 1, 1, 1), 2, {"onebit": {"sharding": "intra_node"}}, "intra_node"),
        ((2, 1, 1, 1), 1, {"pipeline": {"stages": 2}}, "intra_node"),
        ((2, 1, 2, 1), 1, {"pipeline": {"stages": 2}}, "intra_node"),
        ((2, 2, 1, 1), 1, {"pipeline": {"stages": 2}}, "knows of no other stages"),
        ((1, 2, 1, 1), 3, {}, "a slow network cannot carry"),
        ((1, 2, 1, 1), 1, {"onebit": {"sharding": "intra_node"}}, "there is nobody to shard with"),
    ],
)
def test_the_form_follows_from_who_shares_what(sizes: tuple, stage: int, more: dict, form: str) -> None:
    shape = GridShape(sizes)
    blocks = {"zero_optimization": {"stage": stage}, **more}
    read = zero.read_config(config_of("OneBitAdam", **blocks), world_size=shape.world_size, stages=sizes[0])
    if form in {each.name for each in FORMS}:
        assert choose(read, shape).name == form
    else:
        refused(ValueError, form, choose, read, shape)


@pytest.mark.parametrize(
    ("world_size", "name", "ours", "stages", "shards"),
    [
        (4, "OneBitAdam", {}, 2, 2),
        (4, "AdamW", {}, 2, 2),
        (2, "OneBitAdam", {}, 2, 1),
        (8, "OneBitAdam", {"tensor": 2}, 2, 2),
        (8, "OneBitAdam", {"ranks_per_node": 2}, 2, 2),
        (8, "OneBitAdam", {"ranks_per_node": 4}, 4, 2),
        (6, "OneBitAdam", {"ranks_per_node": 4}, 1, 4),  # refused later, by the grid
    ],
)
def test_shards_are_those_of_a_stage(world_size: int, name: str, ours: dict, stages: int, shards: int) -> None:
    read = zero.read_config(
        config_of(name, zero_optimization={"stage": 1}, onebit=ours, pipeline={"stages": stages}),
        world_size=world_size, stages=stages,
    )  # fmt: skip
    assert shard_ranks(read, Launch("torchrun", 0, world_size, 0, world_size)) == shards


@pytest.mark.parametrize("kind", [onebit.OnebitAdam, zero.ShardedOnebitAdam])
def test_the_norm_that_clips_is_told(kind: type) -> None:
    """Exact while gradients travel (the estimate of a first step, with nothing to compare: as if independent)."""

    def work(transport: SimTransport) -> list[float | None]:
        p = torch.nn.Parameter(torch.zeros(128))
        optimizer = kind([p], transport=transport, max_grad_norm=1.0)
        told = [optimizer.stats.grad_norm]
        for value in (3.0 + transport.rank, float("inf"), 3.0):
            p.grad = torch.full((128,), value)
            optimizer.step()
            told.append(optimizer.stats.grad_norm)
        return told

    exact = 3.5 * 128**0.5 if kind is onebit.OnebitAdam else ((9 + 16) / 2 * 128 / 2) ** 0.5
    for before, first, skipped, after in run_ranks(2, work):
        assert before is None and skipped is None and after > 1.0
        assert first == pytest.approx(exact, rel=2e-3)  # eight bits in the warm-up


@pytest.mark.parametrize("rank", [0, 3])
def test_a_missing_tensorboard_names_what_to_install(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=rf"rank {rank}: .*onebit\[train\]"):
        open_monitors(config(tensorboard={"enabled": True}), rank=rank)


def test_csv_files_are_appended_to_by_rank_0_alone(tmp_path: Path) -> None:
    asked = config(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    assert asked.csv_monitor == Monitor(True, str(tmp_path), "job") and open_monitors(asked, rank=1) == []
    for samples in (8, 16):  # a writer each: the second is that of a resumed run
        (write,) = open_monitors(asked, rank=0)
        write({"lr": 0.5 / samples}, samples)
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text().split() == ["step,lr", "8,0.0625", "16,0.03125"]


def test_a_training_goes_on_if_a_monitor_cannot_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full disk: the step is whole, the schedule included."""
    asked = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    asked |= {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    (tmp_path / "job" / "Train_Samples_lr.csv").mkdir(parents=True)
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    engine, *_ = onebit.zero.initialize(model=torch.nn.Linear(1, 1), config=asked, lr_scheduler=halved)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
    assert engine.global_steps == 3 and engine.get_lr() == [0.125]
    engine.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "step 1" in warning and "Is a directory" in warning and "Train_Samples_lr.csv" in warning


class Hosted:
    """Stands for wandb and comet_ml, which log into accounts: it notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name: str) -> Callable:
        def note(*args: object, **named: object) -> Hosted:
            self.calls.append((name, *args, named))
            return self

        return note


def test_hosted_monitors_get_the_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {
        "wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"},
        "comet": {"enabled": True, "project": "p", "experiment_name": "e", "samples_log_interval": 8},
    }
    for name, block in (("wandb", "wandb"), ("comet_ml", "comet")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"rank 1: the block {block} is enabled and {name} is missing"):
            open_monitors(config(**{block: blocks[block]}), rank=1)
    wandb, comet = Hosted(), Hosted()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    assert open_monitors(config(**blocks), rank=1) == []
    writers = open_monitors(config(**blocks), rank=0)
    for samples in (4, 8, 12):
        for write in writers:
            write({"lr": 0.5}, samples)
    shown = {"Train/Samples/lr": 0.5}
    assert wandb.calls == [
        ("init", {"project": "p", "group": "g", "entity": "t"}),
        *(("log", shown, {"step": samples}) for samples in (4, 8, 12)),
    ]
    unset = dict.fromkeys(("api_key", "workspace", "experiment_key", "mode", "online"))
    assert comet.calls == [("start", unset | {"project": "p"}), ("set_name", "e", {}),
                           *(("log_metrics", shown, {"step": samples}) for samples in (4, 12))]  # fmt: skip


def test_names_find_tied_weights_and_pairs_again() -> None:
    model = net()
    model.head.weight = torch.nn.Parameter(torch.zeros(5, 8))
    find = remembered(model, [{"params": model.head.weight, "lr": 1.0}, *list(model.named_parameters())[:1]])
    other = net()
    group, pair = find(other)
    assert group == {"params": [other.head.weight], "lr": 1.0} and group["params"][0] is other.head.weight
    assert pair[0] == "embed.weight" and pair[1] is other.embed.weight


def test_what_cannot_be_trained_is_refused() -> None:
    refused(ValueError, "no parameter of the model", remembered, net(), net().parameters())
    refused(TypeError, "got str", remembered, net(), ["embed.weight"])
    model = net()
    made = torch.optim.AdamW(net().parameters())
    with pytest.raises(
        ValueError, match="optimizer= was made of other parameters than model='s: model_parameters holds"
    ):
        zero.initialize(model=model, config=config_of("AdamW"), optimizer=made)
    with pytest.raises(ValueError, match="the optimizer is given twice, as optimizer= and as OneBitAdam"):
        zero.initialize(model=model, config=config_of("OneBitAdam"), optimizer=torch.optim.AdamW)
    named = Namespace(deepspeed_config="ds.json")
    refused(ValueError, "given twice", zero.initialize, model=model, config=config_of("AdamW"), args=named)
    refused(ValueError, "no configuration", zero.initialize, model=model, args=Namespace())


def test_inputs_are_cast_whatever_auto_cast_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config(fp16={"enabled": True, "auto_cast": True})
    assert caplog.records == []
    config(fp16={"enabled": True, "auto_cast": False})
    assert [("fp16.auto_cast" in r.message, "always cast" in r.message) for r in caplog.records] == [(True, True)]


def test_small_messages_travel_in_memory_that_the_link_serves() -> None:
    """NCCL alone serves no host tensors; "meta" stands for CUDA here."""

    class Link:
        rank, world_size, device = 0, 1, torch.device("meta")

        def all_gather(self, out_WB: torch.Tensor, in_B: torch.Tensor) -> object:
            raise RuntimeError(f"seen: {out_WB.device.type} and {in_B.device.type}")

    with pytest.raises(RuntimeError, match="seen: meta and meta"):
        gather_bytes(Link(), b"1")  # type: ignore[arg-type]
