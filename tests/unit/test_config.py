"""DeepSpeed's JSON as it stands is read to the letter; what is not meant is refused with its place and what to write.

The files in deepspeed_configs/ are written for these tests, in the manner of those that are public.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from config_files import FILES, SMALL, optimizer, read, small
from errors import refused
from hypothesis import example, given
from hypothesis import strategies as st

from onebit.comm import Bf16Codec, Log4Codec
from onebit.zero.config.entries.onebit_adam import OnebitAdamParams
from onebit.zero.config.lr_schedules import Warmup, WarmupDecay
from onebit.zero.config.optimizers import OPTIMIZERS
from onebit.zero.config.schema import blocks_of, keys_of
from onebit.zero.config.sections import Bf16, Fp16, OffloadOptimizer, OffloadParam, Onebit, ZeroOptimization
from onebit.zero.config.whole import Fills, _TopLevel, batch_triangle, read_config
from onebit.zero.lr_schedulers import SCHEDULERS

# ---------------------------------------------------------------- files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_read_and_written_and_read_is_the_same(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And what is written warns of nothing."""
    config = read(path.name)
    caplog.clear()
    for written in (json.loads(json.dumps(config.to_dict())), config.to_dict()):
        assert read_config(written, world_size=4) == config
    assert [r.message for r in caplog.records if "fp16 is taken" not in r.message] == []


def known_paths(cls: type, where: str = "") -> Iterator[str]:
    yield from (where + name for name in keys_of(cls))
    for name, inner in blocks_of(cls).items():
        yield from known_paths(inner, f"{where}{name}.")
    yield from inert_paths({name: rule.kind for name, rule in getattr(cls, "inert", {}).items()}, where)


def inert_paths(kinds: Mapping[str, object], where: str) -> Iterator[str]:
    for name, kind in kinds.items():
        yield where + name
        if isinstance(kind, Mapping):
            yield from inert_paths(kind, f"{where}{name}.")


def paths_in(data: object, where: str = "") -> Iterator[str]:
    if isinstance(data, dict):
        for name, item in data.items():
            yield where + name
            yield from paths_in(item, f"{where}{name}.")


def test_the_files_together_hold_every_known_key() -> None:
    contents = [json.loads(path.read_text()) for path in FILES]
    found = {place for content in contents for place in paths_in(content)}
    known = set(known_paths(_TopLevel))
    optimizers = {name: entry.params for name, entry in OPTIMIZERS.items()}
    for kind, choices in (("optimizer", optimizers), ("scheduler", {n: c.kind for n, c in SCHEDULERS.items()})):
        named = {content[kind]["type"].lower() for content in contents if kind in content}
        assert named == {name.lower() for name in choices}
        known |= {place for cls in choices.values() for place in known_paths(cls, f"{kind}.params.")}
    assert known - found == set()


def leaves_of(data: object, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(data, dict):
        for name, item in data.items():
            yield from leaves_of(item, (*where, name))
    else:
        yield where, data


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_holds_what_its_file_holds(path: Path) -> None:
    """Every value under its name; those that are "auto", and blocks that are null, are the next tests'."""
    written = dict(leaves_of(json.loads(json.dumps(read(path.name).to_dict()))))
    given = {where: value for where, value in leaves_of(json.loads(path.read_text())) if where in written}
    assert len(given) > 2
    for where, expected in given.items():
        found = written[where]
        if where[-1] == "type":  # names are taken in any case
            expected, found = expected.lower(), found.lower()
        assert expected in ("auto", found), where


def test_a_file_s_types_are_torch_s_and_its_codecs_ours() -> None:
    config = read("bert_onebit_adam.json")
    assert config.dtype == torch.float16 and config.optimizer.is_one_bit and config.gradient_accumulation_steps == 64
    assert type(config.optimizer.params) is OnebitAdamParams and config.scheduler is None
    assert read("gpt_adamw_bf16_cosine.json").dtype == torch.bfloat16
    options = read("bert_onebit_lamb.json", world_size=64).optimizer_options()
    assert (options["codec"], options["gradient_codec"]) == (Log4Codec(block=256), Bf16Codec(block=256))
    assert read("onebit_adam_sharded.json").ranks_per_shard_group == 1
    assert read("mics_zero_one_adam.json").ranks_per_shard_group == 2


def test_sparse_attention_without_a_mode_is_fixed() -> None:
    sparsity = read("bert_sparse_attention.json", world_size=8).sparse_attention
    assert sparsity.mode == "fixed" and not sparsity.is_causal and sparsity.local_window_blocks == (4,)
    assert small(sparse_attention={"block": 32}).sparse_attention.mode == "fixed"
    assert small().sparse_attention.mode is None and small(sparse_attention=None).sparse_attention.mode is None


def test_auto_values_are_the_callers() -> None:
    config = read("hf_zero2_auto.json")
    assert config.fp16.enabled and not config.bf16.enabled
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 1)
    params = config.optimizer.params
    assert (params.lr, params.betas, params.weight_decay, params.eps) == (2e-4, (0.9, 0.98), 0.05, 1e-8)
    assert config.scheduler.params == Warmup(warmup_max_lr=2e-4, warmup_num_steps=20)
    assert config.gradient_clipping == 1.0
    params = read("hf_zero3_offload_auto.json").scheduler.params
    assert params == WarmupDecay(total_num_steps=200, warmup_num_steps=20, warmup_max_lr=2e-4)


def test_tensor_ranks_read_the_same_batches() -> None:
    """DeepSpeed's name for it is taken too. A grid that is there already says how many read each batch."""
    for blocks in ({"onebit": {"tensor": 2}}, {"tensor_parallel": {"autotp_size": 2}}):
        config = read_config(SMALL | blocks, world_size=8)
        assert (config.onebit.tensor, config.world_size, config.train_batch_size) == (2, 4, 4)
        assert read_config(config.to_dict(), world_size=8) == config
    assert read_config(SMALL | {"tensor_parallel": {"autotp_size": 0}}, world_size=8).onebit == Onebit()
    assert read_config(SMALL, world_size=8, ranks_per_batch=4).train_batch_size == 2
    both = {"onebit": {"tensor": 4, "block": 128}, "tensor_parallel": {"autotp_size": 4, "tp_overlap_comm": False}}
    assert read_config(SMALL | both, world_size=8).onebit == Onebit(block=128, tensor=4)
    for blocks, says in (
        ({"onebit": {"tensor": 3}}, "8 ranks cannot be divided by the 3 that read each batch together"),
        ({"onebit": {"tensor": 2}, "tensor_parallel": {"autotp_size": 4}}, "is 4, but onebit.tensor is 2"),
        ({"onebit": {"tensor": 0}}, "onebit.tensor"),
        ({"tensor_parallel": {"autotp_size": -1}}, "tensor_parallel.autotp_size"),
    ):
        refused(ValueError, says, read_config, SMALL | blocks, world_size=8)


@pytest.mark.parametrize("given, read", [(32, 16), (16, 16)])
def test_a_batch_may_count_the_ranks_of_slices(given: int, read: int, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers does, which fills in all three sizes."""
    sizes = {"train_batch_size": given, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config = read_config({**sizes, "tensor_parallel": {"autotp_size": 2}}, world_size=8)
    assert (config.train_batch_size, config.world_size) == (read, 4)
    assert ("they read the same samples, 16 in a step" in caplog.text) == (given != read)
    refused(ValueError, "data-parallel ranks = 8", read_config, {**sizes, "train_batch_size": 64}, world_size=8)


def test_old_names_mean_todays(caplog: pytest.LogCaptureFixture) -> None:
    config = read("old_names.json")
    assert config.bf16 == Bf16(True) and config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert config.zero_optimization.offload_optimizer.device == config.zero_optimization.offload_param.device == "cpu"
    for old in ("cpu_offload ", "cpu_offload_params ", "bfloat16 ", "stage3_gather_fp16_weights_on_model_save "):
        assert sum(old in record.message for record in caplog.records) == 1
    assert small(zero_optimization=True).zero_optimization.stage == 1


# ---------------------------------------------------------------- what has no effect


def test_a_key_without_effect_is_warned_about_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    given = SMALL | {"comms_logger": {"enabled": True, "debug": True}, "zero_optimization": {"reduce_bucket_size": 5e8}}
    read_config(given, world_size=1, rank=1)
    assert caplog.records == []
    read_config(given, world_size=1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    for place, why in (
        ("comms_logger.debug", "torch.profiler"),
        ("zero_optimization.reduce_bucket_size", "bucket_cap_mb"),
    ):
        assert sum(place in r.message and why in r.message for r in caplog.records) == 1


def test_keys_of_stage_3_have_two_names(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed's models take both; the second is the first with stage3_ before it."""
    config = small(
        zero_optimization={"stage": 3, "gather_16bit_weights_on_model_save": True, "prefetch_bucket_size": 9}
    )
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert sum('prefetch_bucket_size is another name: write "stage3_p' in text for text in caplog.messages) == 1
    with pytest.raises(ValueError, match='is another name of "stage3_max_live_parameters", which is also there'):
        small(zero_optimization={"max_live_parameters": 1, "stage3_max_live_parameters": 1})


@pytest.mark.parametrize(
    ("stage", "name", "made"),
    [
        (2, "offload_param", OffloadParam),
        (0, "offload_param", OffloadParam),
        (0, "offload_optimizer", OffloadOptimizer),
    ],
)
def test_an_offload_below_its_stage_has_no_effect(
    stage: int, name: str, made: type, caplog: pytest.LogCaptureFixture
) -> None:
    """As in DeepSpeed, whose scripts write both blocks at every stage."""
    config = small(zero_optimization={"stage": stage, name: {"device": "cpu"}})
    assert getattr(config.zero_optimization, name).device == "none"
    assert len(caplog.messages) == 1 and f"{name} has no effect at stage {stage}: " in caplog.messages[0]
    refused(ValueError, f"got stage {stage}", ZeroOptimization, stage=stage, **{name: made(device="cpu")})


def test_what_older_releases_read_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    config = read("older_releases.json")
    assert config.bf16.enabled and len(caplog.messages) == 9
    for key, why in (
        ("compile", "torch.compile before initialize"),
        ("hybrid_engine", "the model's own generate"),
        ("bf16.loss_scale", "needs no loss scale"),
        ("fp16.opt_level", "one form of mixed precision"),
    ):
        assert sum(f": {key} has no effect" in text and why in text for text in caplog.messages) == 1, caplog.messages


def test_a_block_in_the_wrong_place_is_told_its_own() -> None:
    with pytest.raises(ValueError, match='unknown key "offload_optimizer"; it belongs in "zero_optimization"'):
        small(offload_optimizer={"device": "cpu"})


def test_a_key_that_asks_for_what_happens_anyway_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    small(
        prescale_gradients=False,
        wandb={"enabled": False, "project": "p"},
        zero_optimization={"reduce_scatter": True},
        activation_checkpointing={"partition_activations": False, "number_checkpoints": None},
        amp={"enabled": False},
        bf16={"enabled": True, "check_grad_overflow": True},
    )
    assert caplog.records == []


@pytest.mark.parametrize(
    "blocks",
    [
        {"gradient_allreduce_op": "sum"},
        {"data_types": {"buffer_dtype": "bf16"}},
        {"tensor_parallel": {"tp_size": 2}},
        {"amp": {"enabled": True, "opt_level": "O1"}},
        {"expert_parallel": {"enabled": True}},
        {"quantize_training": {"enabled": True}},
        {"sparse_gradients": True},
        {"eigenvalue": {"enabled": True}},
        {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}},
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 7}}},
    ],
    ids=str,
)
def test_what_would_train_something_else_is_refused(blocks: dict) -> None:
    refused(ValueError, "is not supported", small, **blocks)


@pytest.mark.parametrize("value", ["unknown", "refused"])
def test_of_several_wrong_keys_the_file_s_first_is_named(value: str) -> None:
    """Read in both orders: with strings in a set the order would be that of this process's hashes."""
    wrong = {"unknown": {"abc": 1, "xyz": 2}, "refused": {"sparse_gradients": True, "gradient_allreduce_op": "sum"}}
    for keys in (list(wrong[value]), list(wrong[value])[::-1]):
        with pytest.raises(ValueError, match=f"config: .*{keys[0]}"):
            read_config(SMALL | {name: wrong[value][name] for name in keys}, world_size=1)


def test_warnings_come_in_the_order_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    inert = {"prescale_gradients": True, "memory_breakdown": True, "disable_allgather": True}
    for keys in (list(inert), list(inert)[::-1]):
        caplog.clear()
        read_config(SMALL | {name: inert[name] for name in keys}, world_size=1)
        assert [record.message.split()[1] for record in caplog.records] == keys


# ---------------------------------------------------------------- what is wrong


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    """One letter is missing from a known key, in every block there is: refused, with the place and the key."""
    for where, cls in [("", _TopLevel), *((f"{name}", c) for name, c in blocks_of(_TopLevel).items())]:
        known = [*keys_of(cls), *blocks_of(cls), *getattr(cls, "inert", {})]
        for name in known:
            wrong = name[:2] + name[3:]
            if wrong in known or len(name) < 4:
                continue
            given = SMALL | ({where: {wrong: 1}} if where else {wrong: 1})
            with pytest.raises(ValueError, match=f'unknown key "{wrong}"; did you mean "') as error:
                read_config(given, world_size=1)
            assert f"config: {where or 'top level'}: " in str(error.value)
    for wrong, right in (("optimzer", "optimizer"), ("schedulr", "scheduler")):
        with pytest.raises(ValueError, match=f'top level: unknown key "{wrong}"; did you mean "{right}"'):
            small(**{wrong: {"type": "AdamW"}})
    with pytest.raises(ValueError, match='did you mean "stage3_prefetch_bucket_size"'):
        small(zero_optimization={"stage3_prefetch_bucketsize": 1})
    refused(ValueError, r"known here: .*freeze_step", optimizer, "OneBitAdam", xyzzy=1)


def test_notes_and_what_other_programs_read_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """In every place, and by rank 0 alone; a key that is nearly a known one is still refused."""
    notes = {"_comment": "warm up first", "//": [1], "comment": {"by": "me"}, "$schema": "none"}
    blocks = {
        **notes,
        "comms_config": {"enabled": True},
        "zero_optimization.stage3_prefetch_bucket_size": 921.6,
        "cuda_visible_devices": "0,1",
        "optimizer": {"type": "Adam", **notes, "params": {"lr": 0.5, **notes}},
        "zero_optimization": {"stage": 1, **notes, "offload_optimizer": {"device": "none", **notes}},
        "flops_profiler": {"enabled": False, **notes},
    }
    config = read_config({**SMALL, **blocks}, world_size=2, rank=1)
    assert config.optimizer is not None and config.optimizer.params.lr == 0.5 and not caplog.messages
    assert read_config(config.to_dict(), world_size=2) == config
    caplog.clear()
    read_config({**SMALL, **blocks}, world_size=2)
    places = ("", "optimizer.", "optimizer.params.", "zero_optimization.", "zero_optimization.offload_optimizer.")
    for place in (*places, "flops_profiler."):
        assert f"config: {place}_comment has no effect: it is read as a comment" in caplog.messages
    assert "config: cuda_visible_devices has no effect: set CUDA_VISIBLE_DEVICES in the environment" in caplog.messages
    assert len(caplog.messages) == 6 * len(notes) + 3
    for wrong in ({"cuda_visible_device": "0"}, {"zero_optimization": {"comms_config": {}}}, {"xyzzy": 1}):
        refused(ValueError, r"unknown key .*; a note of yours begins with an underscore", small, **wrong)


def _ltd(**keys: object) -> dict:
    return {
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True, **keys}}}
    }


def _metric(**keys: object) -> dict:
    inside = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": {"rare": keys}}}
    return {"data_efficiency": {"enabled": True, "data_sampling": inside}}


_KEPT = {"min_value": 4, "max_value": 8, "schedule_config": {"require_steps": 3, "seq_per_step": 2}}
_LINE = {
    "min_difficulty": 1,
    "max_difficulty": 9,
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
}
DATA_EFFICIENCY = [
    ({"data_efficiency": {"data_routing": {"enabled": True}}}, "data_routing is enabled and data_efficiency around it"),
    (
        {"data_efficiency": {"enabled": True, "data_routing": {"random_ltd": {"enabled": True}}}},
        "random_ltd_schedule does not set how many tokens are kept",
    ),
    (_ltd(random_ltd_schedule=_KEPT), 'total_layer_num is missing: write it, or the layers\' names as "layer_name"'),
    (
        _ltd(random_ltd_schedule=_KEPT, total_layer_num=4, random_ltd_layer_id=[1, 4]),
        "random_ltd_layer_id: expected numbers below total_layer_num = 4, got 4",
    ),
    (
        _ltd(random_ltd_schedule=_KEPT, total_layer_num=4, random_ltd_layer_id=[1, 2], random_ltd_layer_num=3),
        "random_ltd_layer_num is 3, and random_ltd_layer_id names 2 layers",
    ),
    (
        _ltd(random_ltd_schedule=_KEPT | {"min_value": 9}, total_layer_num=4),
        "expected min_value at most max_value, got 9 and 8",
    ),
    (_metric(**_LINE), r"curriculum_metrics\.rare: index_to_metric_path is missing: a schedule_based metric"),
    (_metric(**_LINE, difficulty_typ="value"), r'curriculum_metrics\.rare: unknown key "difficulty_typ"; did you mean'),
    (
        _metric(**(_LINE | {"max_difficulty": 101}), index_to_metric_path="a.npy", difficulty_type="percentile"),
        "difficulties are percentiles, at most 100, got 101",
    ),
    (
        _metric(**_LINE, index_to_metric_path="a.npy", schedule_type="fixed_root"),
        "schedule_config.root_degree is missing: the schedule fixed_root needs",
    ),
    (
        _metric(index_to_metric_path="a.npy", schedule_type="fixed_discrete", schedule_config={"difficulty": [1, 2]}),
        "fixed_discrete needs lists difficulty and, of one entry less, max_step, got 2 and 0 entries",
    ),
    ({"curriculum_learning": {"enabled": True, "min_difficulty": 8}}, "max_difficulty is missing"),
    ({"curriculum_learning": {"curriculum_type": "voc"}}, 'expected one of "seqlen", got "voc"'),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True}},
            }
        },
        "curriculum_metrics is empty",
    ),
    (
        {"curriculum_learning": {"enabled": True, **_LINE}, **_metric(**_LINE, index_to_metric_path="a.npy")},
        "curriculum_learning, the older block, and data_efficiency.data_sampling are both enabled",
    ),
]


WRONG_TYPES = [
    ({"train_batch_size": True}, "train_batch_size: expected an integer at least 1 or null, got true"),
    ({"train_batch_size": 2.5}, "got 2.5"),
    ({"fp16": {"enabled": "true"}}, 'fp16.enabled: expected true or false, got "true"'),
    ({"fp16": {"loss_scale": float("nan")}}, "fp16.loss_scale: expected a number at least 0, got NaN"),
    ({"gradient_clipping": "1"}, "gradient_clipping: expected a number at least 0"),
    ({"zero_optimization": 2}, "zero_optimization: expected an object, got 2"),
    ({"zero_optimization": {"reduce_bucket_size": "big"}}, 'reduce_bucket_size: expected an integer, got "big"'),
    ({"wandb": {"enabled": 1}}, "wandb.enabled: expected true or false, got 1"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "betas: expected a list of two numbers"),
    ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": "soon"}}}, 'number of steps or "auto"'),
]


@pytest.mark.parametrize(
    "blocks, message",
    [
        *WRONG_TYPES,
        ({"stage": 2}, 'top level: unknown key "stage"; it belongs in "zero_optimization"'),
        ({"zero_optimization": {"device": "cpu"}}, 'it belongs in "zero_optimization.offload_optimizer"'),
        ({"optimizer": {"type": "Adam", "adam_w_mode": True}}, 'it belongs in "optimizer.params"'),
        ({"optimizer": {"type": "OneBitAdam", "params": {"compression": "always"}}}, 'it belongs in "onebit"'),
        ({"zero_optimization": {"gradient_clipping": 1.0}}, "it belongs at the top level"),
        ({"zero_optimization": {"enabled": True}}, 'unknown key "enabled"; known here: '),
        ({"enabled": True}, 'top level: unknown key "enabled"; known here: '),
        ({"device": "cpu"}, 'in "zero_optimization.offload_optimizer" or in "zero_optimization.offload_param"'),
        ({"pipeline": {"stage": 2}}, 'it belongs in "zero_optimization", or did you mean "stages"?'),
        ({"elasticity": {"micro_batch_size": [1]}}, 'or did you mean "micro_batch_sizes"?'),
        ({"optimizer": {"type": "Adam", "parms": {}}}, 'unknown key "parms"; did you mean "params"'),
        ({"optimizer": {"type": "OnebitAdan"}}, 'got "OnebitAdan"; did you mean "OneBitAdam"'),
        ({"optimizer": {"type": "RMSprop"}}, "expected the name of a known optimizer"),
        ({"optimizer": {"params": {}}}, "expected the name of a known optimizer, got nothing"),
        ({"optimizer": {"type": "AdamW", "params": {"freeze_step": 3}}}, 'unknown key "freeze_step"'),
        ({"scheduler": {"type": "WarmupLr2"}}, 'did you mean "WarmupLR"'),
        ({"scheduler": {"type": "WarmupDecayLR"}}, r"total_num_steps is missing.*pass total_num_steps"),
        ({"wandb": {"enable": True}}, 'wandb: unknown key "enable"; did you mean "enabled"'),
        ({"data_efficiency": {"data_routing": {"random_ldt": {}}}}, 'did you mean "random_ltd"'),
        *DATA_EFFICIENCY,
        ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis: expected an integer at least 1, got 0"),
        ({"fp16": {"initial_scale_power": 2, "min_loss_scale": 8}}, "expected min_loss_scale at most"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected one of 0, 1, 2, 3, got 4"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {}}}, "offload_optimizer.device is missing"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, '"nvme" needs nvme_path'),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "buffer_count": 1}}},
            "offload_optimizer.buffer_count: expected an integer at least 2, got 1",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "buffer_count": 0}}},
            "offload_param.buffer_count: expected an integer at least 2, got 0",
        ),
        ({"zero_optimization": {"mics_shard_size": 2, "zero_hpz_partition_size": 4}}, "keep one"),
        ({"communication_data_type": "int8"}, 'expected one of "fp32", "bf16", "fp16", got "int8"'),
        ({"onebit": {"bucket_cap_mb": 0}}, "bucket_cap_mb: expected a number above 0 or null, got 0"),
        ({"fp16": {"min_loss_scale": 0}}, "min_loss_scale: expected a number above 0, got 0"),
        ({"onebit": {"block": 100}}, "multiple of 64, got 100"),
        ({"onebit": {"delay": 2}}, "onebit.delay: expected an integer at least 0 and at most 1, got 2"),
        ({"onebit": {"shardings": "auto"}}, 'did you mean "sharding"'),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, "betas: expected .* below 1"),
        ({"optimizer": {"type": "Lamb", "params": {"min_coeff": 2, "max_coeff": 1}}}, "min_coeff <= max_coeff"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, r'lr is "auto".*pass lr=\.\.\. to initialize\(\)'),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}}, "freeze_step: expected .* at least 1"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "nesterov needs momentum above 0"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}}, 'unknown key "betas"'),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "float16 needs a loss scale"),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, 'enable neither "fp16" nor "bf16"'),
        ({"optimizer": {"type": "muadam"}}, r"there is no MuAdam here: pass initialize\(optimizer=lambda params"),
        ({"bf16": {}, "bfloat16": {}}, 'bfloat16 is another name of "bf16", which is also there'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_refused_with_its_place(blocks: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as refused:
        small(**blocks)
    assert refused.type is (TypeError if (blocks, message) in WRONG_TYPES else ValueError)


def test_an_argument_must_not_contradict_the_file() -> None:
    data = {**SMALL, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    assert read_config(data, world_size=1, lr=1e-3).optimizer.params.lr == 1e-3
    with pytest.raises(ValueError, match=r"optimizer.params.lr is 0.001, but the argument lr is 0.002; drop one"):
        read_config(data, world_size=1, lr=2e-3)
    refused(ValueError, "unknown argument 'learning'", read_config, data, world_size=1, learning=1)
    with pytest.raises(TypeError, match="argument gradient_clipping: expected a number"):
        read_config(data, world_size=1, gradient_clipping="x")


def test_an_argument_stands_in_for_what_the_file_leaves_out() -> None:
    config = read_config(
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": "auto"}}, "train_batch_size": None},
        world_size=2,
        train_batch_size=8,
        gradient_accumulation_steps=2,
        lr=3e-4,
        freeze_step=50,
        gradient_clipping=0.5,
        bf16=True,
        total_num_steps=7,
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 2)
    assert config.optimizer.params == OnebitAdamParams(lr=3e-4, freeze_step=50)
    assert config.gradient_clipping == 0.5 and config.bf16.enabled and config.scheduler is None


def test_every_argument_belongs_to_a_key() -> None:
    optimizers = [entry.params for entry in OPTIMIZERS.values()]
    classes = [_TopLevel, *blocks_of(_TopLevel).values(), *optimizers, *(c.kind for c in SCHEDULERS.values())]
    fills = {rule.fill for cls in classes for rule in keys_of(cls).values() if rule.fill}
    assert fills == set(Fills.__annotations__)


def test_auto_is_the_default_only_where_that_is_sound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = small(
        optimizer={"type": "AdamW", "params": {"betas": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
        fp16={"enabled": "auto"},
        gradient_clipping="auto",
    )
    assert config.optimizer.params.betas == (0.9, 0.999) and config.optimizer.params.weight_decay == 0.0
    assert config.scheduler.params.warmup_max_lr == 1e-3 == config.optimizer.params.lr
    assert config.gradient_clipping == 1.0 and small().gradient_clipping == 0.0 and not config.fp16.enabled
    assert sum('is "auto"' in record.message for record in caplog.records) == 5
    for params, argument in (
        ({"warmup_num_steps": "auto"}, "warmup_num_steps"),
        ({"warmup_max_lr": "auto"}, "warmup_max_lr"),
    ):
        with pytest.raises(ValueError, match=rf"pass {argument}="):
            small(scheduler={"type": "WarmupLR", "params": params})


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"train_batch_size": 4, "fp16": {"enabled": true, "enabled": false}}')
    refused(ValueError, r"twice.json: fp16.enabled is there twice", read_config, path, world_size=1)
    path.write_text('{"train_batch_size": 4, "train_batch_size": 4}')
    refused(ValueError, r"twice.json: train_batch_size is there twice", read_config, str(path), world_size=1)


def test_what_is_not_json_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{\n  "train_batch_size": 4,\n}')
    refused(ValueError, r"broken.json: not JSON: .* line [23]", read_config, path, world_size=1)
    path.write_text("[1]")
    refused(TypeError, "expected an object", read_config, path, world_size=1)
    refused(ValueError, "got JSON text", read_config, '{"train_batch_size": 4}', world_size=1)
    refused(TypeError, "keys that are strings, got 3", read_config, {3: 4}, world_size=1)
    with pytest.raises(FileNotFoundError):
        read_config(tmp_path / "absent.json", world_size=1)


def test_a_config_made_in_python_is_held_to_the_same_rules() -> None:
    refused(ValueError, r"Fp16.hysteresis: expected an integer at least 1, got 0", Fp16, hysteresis=0)
    refused(ValueError, "change one of them", dataclasses.replace, small(), train_batch_size=3)
    refused(ValueError, "world_size", read_config, SMALL, world_size=0)


def test_steps_per_print_may_be_never() -> None:
    assert small(steps_per_print=float("inf")).steps_per_print is None
    assert small(steps_per_print=None).steps_per_print is None and small().steps_per_print == 10


# ---------------------------------------------------------------- batch sizes

SIZES = st.integers(1, 10**6)


@given(micro=SIZES, steps=SIZES, world=st.integers(1, 4096), known=st.sampled_from(["tm", "ts", "ms", "tms"]))
def test_two_batch_sizes_make_the_third(micro: int, steps: int, world: int, known: str) -> None:
    sizes = {"t": micro * steps * world, "m": micro, "s": steps}
    given_sizes = [size if letter in known else None for letter, size in sizes.items()]
    assert batch_triangle(*given_sizes, world) == tuple(sizes.values())


@given(size=SIZES, world=st.integers(1, 4096))
def test_one_batch_size_means_one_pass(size: int, world: int) -> None:
    assert batch_triangle(None, size, None, world) == (size * world, size, 1)
    assert batch_triangle(size * world, None, None, world) == (size * world, size, 1)


@given(train=SIZES, micro=SIZES, steps=SIZES, world=st.integers(1, 64))
@example(train=1, micro=1, steps=1, world=2)
def test_batch_sizes_that_contradict_are_refused_with_the_three(train: int, micro: int, steps: int, world: int) -> None:
    if train == micro * steps * world:
        train += 1
    with pytest.raises(ValueError) as error:
        batch_triangle(train, micro, steps, world)
    for size in (train, micro, steps, world):
        assert f"= {size}" in str(error.value)
    if train % (micro * world):
        refused(ValueError, "change one of them", batch_triangle, train, micro, None, world)
    if train % (steps * world):
        refused(ValueError, "change one of them", batch_triangle, train, None, steps, world)


def test_no_batch_size_names_the_argument() -> None:
    for steps in (None, 4):
        refused(ValueError, "train_micro_batch_size_per_gpu=", batch_triangle, None, None, steps, 2)
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    refused(ValueError, "pass train_micro_batch_size_per_gpu=", read_config, auto, world_size=2)
