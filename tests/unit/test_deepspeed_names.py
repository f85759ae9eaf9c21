"""DeepSpeed's names: every public one is here, or says what to do instead; docs/deepspeed.md is made from the code."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import logging
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import deepspeed_names
import pytest
import torch
from deepspeed_table import MODULES as PATHS_OF_THE_PAGE
from deepspeed_table import NAMES, TABLES, rows, shown, used_patterns
from errors import refused
from torch import Tensor, nn

import onebit.zero as deepspeed
from onebit import HostAdam, Lamb, Lion, OnebitAdam
from onebit.comm import SimTransport
from onebit.zero import initializing
from onebit.zero.compression.helper import convert_conv1d_to_linear, recursive_getattr
from onebit.zero.deepspeed.engine import DeepSpeedEngine
from onebit.zero.deepspeed.initializing import add_config_arguments, check_mpu
from onebit.zero.deepspeed.names import ENGINE, MODULE, REFUSED, SWITCHED_OFF, why_not
from onebit.zero.given import check_fits, check_optimizer, optimizer_for, scheduler_for
from onebit.zero.grid import GridShape
from onebit.zero.moe.utils import split_params_into_different_moe_groups_for_optimizer
from onebit.zero.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from onebit.zero.pipeline.layers import unmarked
from onebit.zero.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_tables_of_the_code(name: str) -> None:
    assert shown(PAGE.read_text(), name) == TABLES[name](), "python tests/unit/deepspeed_table.py writes it"


def test_every_name_is_in_one_row_and_no_reason_is_missing() -> None:
    listed = [name for _, names in rows() for name in names]
    assert sorted(listed) == NAMES and len(NAMES) > 250
    assert not [here for here, _ in rows() if here.endswith("?")]
    assert set(ENGINE) - used_patterns() <= {
        "disable_allreduce",
        "disable_need_reduction",
        "enable_allreduce",
        "enable_need_reduction",
        "summary_writer",
    }  # fmt: skip  (those of older releases)


# ---------------------------------------------------------------- signatures


@pytest.mark.parametrize(("_", "module", "name", "theirs"), list(deepspeed_names.signatures()))
def test_arguments_have_deepspeeds_names_and_order(_: str, module: str, name: str, theirs: list[str]) -> None:
    """So that a call by position means the same. What is here alone is passed by name."""
    place: object = import_module(f"onebit.zero.{module}" if module else "onebit.zero")
    for part in name.removesuffix(".__init__").split("."):
        place = DeepSpeedEngine if part == "PipelineEngine" else getattr(place, part)
    shown = list(inspect.signature(place).parameters.values())  # type: ignore[arg-type]
    ours = [p.name for p in shown if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    absent = deepspeed_names.ABSENT.get(name, ())
    by_place = list(itertools.takewhile(lambda argument: not argument.startswith("*"), theirs))
    assert (*ours, *absent) == tuple(by_place)
    assert {argument for argument in theirs if not argument.startswith("*")} <= {p.name for p in shown} | set(absent)
    kinds = {p.kind for p in shown}
    assert (inspect.Parameter.VAR_KEYWORD in kinds) >= any(argument.startswith("**") for argument in theirs)


def test_the_table_of_signatures_is_deepspeeds() -> None:
    found = importlib.util.find_spec("deepspeed")
    version = importlib.metadata.version("deepspeed") if found else "none"
    if found is None or not version.startswith("0.19.6"):
        pytest.skip(
            f"compares the table with the source of DeepSpeed 0.19.6, which is not installed (found: {version})"
        )
    root = Path(str(found.origin)).parent
    for source, _, name, theirs in deepspeed_names.signatures():
        assert deepspeed_names.arguments_in((root / source).read_text(), name) == theirs, (source, name)


class Bare(DeepSpeedEngine):
    """An engine of which only the module is there."""

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.module.generate = lambda: "generated"  # type: ignore[assignment]


def test_names_are_answered_as_the_table_says() -> None:
    engine = Bare()
    for here, names in rows():
        kind, _, why = here.partition(": ")
        for name in names:
            if name in SWITCHED_OFF:
                assert getattr(engine, name)() is False
            elif name in REFUSED:
                refused(RuntimeError, "is not here", getattr(engine, name))
            elif kind != "yes":
                with pytest.raises(AttributeError) as error:
                    getattr(engine, name)
                assert str(error.value).endswith(why)


def test_what_else_is_asked_is_the_modules() -> None:
    engine = Bare()
    assert engine.generate() == "generated" and engine.weight is engine.module.weight
    assert [name for name, _ in engine.named_parameters()] == ["weight", "bias"] and not hasattr(engine, "xyzzy")
    with pytest.raises(
        AttributeError, match="neither the engine nor its Linear has an attribute 'get_lrs'; did you mean"
    ):
        _ = engine.get_lrs
    for name in ("half", "float", "compile"):
        refused(RuntimeError, f"engine.{name}.. is not here", getattr(engine, name))


def test_the_modules_names() -> None:
    for name in deepspeed_names.MODULE:
        if why_not(name, MODULE) is None:
            assert getattr(deepspeed, name) is not None
        else:
            refused(AttributeError, f"DeepSpeed's {name} is not here: ", getattr, deepspeed, name)
    assert {name for name in MODULE if name not in deepspeed_names.MODULE} <= {
        "autotuning",
        "compression",
        "monitor",
        "profiling",
        "sequence",
    }  # fmt: skip  (packages)
    assert deepspeed.__version__


@pytest.mark.parametrize("name", PATHS_OF_THE_PAGE)
def test_modules_by_deepspeeds_names(name: str) -> None:
    found = importlib.import_module(f"onebit.zero.{name}")
    assert found.__doc__ and "DeepSpeed" in found.__doc__
    assert all(hasattr(found, public) for public in getattr(found, "__all__", ()))
    step: object = deepspeed
    for part in name.split("."):
        step = getattr(step, part)
    assert step is found


def test_the_states_of_a_parameter_can_be_imported() -> None:
    status = import_module("onebit.zero.runtime.zero.partition_parameters").ZeroParamStatus
    assert [state.name for state in status] == ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"]
    assert not hasattr(nn.Linear(1, 1).weight, "ds_status")


# ---------------------------------------------------------------- arguments


def test_arguments_are_added() -> None:
    parser = argparse.ArgumentParser()
    assert add_config_arguments(parser) is parser
    assert parser.parse_args([]) == argparse.Namespace(deepspeed=False, deepspeed_config=None)
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"]).deepspeed_config == "x.json"


def test_slices_are_those_of_the_configuration(tmp_path: Path) -> None:
    """DeepSpeed's callers name them twice."""
    net, config = nn.Linear(2, 2), {"tensor_parallel": {"autotp_size": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    for given in (config, tmp_path / "ds.json", {"onebit": {"tensor": 2}}):
        assert deepspeed.tp_model_init(net, 2, torch.bfloat16, config=given) is net
    for other in (None, {}, {"tensor_parallel": {"autotp_size": 4}}):
        given = net, 2, torch.float32, other
        refused(ValueError, "tp_size is 2, and the configuration has", deepspeed.tp_model_init, *given)


class Mpu:
    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            setattr(self, f"get_{name}_world_size", lambda size=size: size)


def test_an_mpu_is_taken_where_every_rank_holds_the_whole_model() -> None:
    check_mpu(Mpu(model_parallel=1, data_parallel=4), 4)
    check_mpu(Mpu(tensor_model_parallel=1, pipeline_model_parallel=1, data_parallel=4), 4)
    with pytest.raises(ValueError, match=r"mpu says that 2 ranks share a model .*tensor_plan.*\"tensor\": 2"):
        check_mpu(Mpu(model_parallel=2, data_parallel=2), 4)
    with pytest.raises(ValueError, match="2 data-parallel ranks of 4, and one model-parallel"):
        check_mpu(Mpu(model_parallel=1, data_parallel=2), 4)
    for other in (object(), Mpu(data_parallel=4), Mpu(model_parallel=1)):
        refused(TypeError, "leave it out if every rank holds the whole model", check_mpu, other, 4)


@pytest.mark.parametrize(
    ("name", "said"), [("grid", r"onebit\.zero\.grid\.start\(\)"), ("tensor_plan", "a dict from names")]
)
def test_a_wrong_grid_or_plan_is_named(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be .*{said}.*, got 'colwise'"):
        deepspeed.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 1}, **{name: "colwise"})


def test_an_optimizer_keeps_its_groups_and_is_given_the_sharded_parameters() -> None:
    net, sharded = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)) for _ in range(2))
    groups = [{"params": [net[1].bias], "lr": 0.5}, {"params": list(net[0].parameters())}]
    given = torch.optim.SGD(groups, lr=0.1)
    make, find = optimizer_for(given, net)
    assert find is not None and make(find(sharded)) is given  # type: ignore[arg-type]
    assert [group["lr"] for group in given.param_groups] == [0.5, 0.1]
    found = [[id(p) for p in group["params"]] for group in given.param_groups]
    assert found == [[id(sharded[1].bias)], [id(p) for p in sharded[0].parameters()]]
    make, find = optimizer_for(lambda params: torch.optim.SGD(params, lr=0.1), net)
    assert find is None and isinstance(make(sharded.parameters()), torch.optim.SGD)


def test_optimizers_that_cannot_be_taken_over() -> None:
    net = nn.Linear(3, 2)
    stepped = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    stepped.step()
    refused(ValueError, "has a state, of parameters that sharding replaces", optimizer_for, stepped, net)
    with pytest.raises(ValueError, match="optimizer= was made of other parameters than model='s"):
        optimizer_for(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), net)
    onebit = OnebitAdam(nn.Linear(3, 2).parameters(), transport=SimTransport())
    for given in (onebit, deepspeed.ShardedOnebitAdam(nn.Linear(3, 2).parameters(), transport=SimTransport())):
        with pytest.raises(TypeError, match="sends its own gradients, and the engine would average them once more"):
            check_optimizer(given)
    make, _ = optimizer_for(lambda params: onebit, net)
    refused(TypeError, "sends its own gradients", make, net.parameters())
    for wrong in (3, "AdamW"):
        with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, or a function that makes one"):
            optimizer_for(wrong, net)
    with pytest.raises(ValueError, match=r"has a state.* optimizer=lambda params: Adagrad\(params, \.\.\.\)"):
        optimizer_for(torch.optim.Adagrad(net.parameters()), net)
    with pytest.raises(TypeError, match="LBFGS evaluates a closure several times in a step"):
        optimizer_for(torch.optim.LBFGS(net.parameters()), net)
    lamb = Lamb(net.parameters())
    check_fits(lamb, GridShape((1, 4, 1, 1)))
    with pytest.raises(ValueError, match="needs the norms of whole layers, of which 2 ranks hold a part each"):
        check_fits(lamb, GridShape((1, 2, 2, 1)))


def test_an_optimizer_that_torch_cannot_step_on_shards_is_named() -> None:
    net = nn.Linear(4, 4)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=net, config=config, optimizer=torch.optim.Adafactor(net.parameters()))
    engine.backward(engine(torch.ones(1, 4)).sum())
    refused(RuntimeError, r"Adafactor\.step\(\) does .* stage 0 in float32", engine.step)
    engine.close()


def test_a_schedule_is_that_of_the_engines_optimizer() -> None:
    here, there = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2))
    mine = torch.optim.lr_scheduler.StepLR(here, 3)
    assert scheduler_for(mine, here) is mine
    assert scheduler_for(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3), here).optimizer is here
    with pytest.raises(ValueError, match="sets the rates of another SGD than the engine's SGD; pass a function"):
        scheduler_for(mine, there)
    for wrong, message in (
        (3, "expected a schedule, or a function"),
        (lambda optimizer: 3, "a function that gave a int"),
    ):
        refused(TypeError, message, scheduler_for, wrong, here)


def test_a_schedule_by_a_loss_gets_it_from_the_step() -> None:
    """Without it nothing is written: the same gradients can be stepped with it."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    given = {"optimizer": optimizer, "lr_scheduler": plateau}
    engine, *_ = deepspeed.initialize(model=net, config={"train_batch_size": 1}, **given)
    before = net.weight.clone()
    for loss, rate in ((1.0, 0.1), (2.0, 0.01)):
        engine.backward(engine(torch.ones(1, 1)).square().sum())
        refused(TypeError, r"engine\.step\(lr_kwargs=\{'metrics': mean_loss\}\)", engine.step)
        assert torch.equal(net.weight, before)
        engine.step(lr_kwargs={"metrics": loss})
        assert not torch.equal(net.weight, before) and engine.get_lr() == pytest.approx([rate])
        before = net.weight.clone()
    assert engine.global_steps == engine.micro_steps == 2
    refused(TypeError, "leave it out of initialize", engine.train_batch, iter([(torch.ones(1, 1), torch.ones(1, 1))]))
    engine.close()


@pytest.mark.parametrize(("scale_wrt_gas", "share"), [(True, 0.25), (False, 1.0)])
def test_backward_returns_the_share_of_a_micro_batch_in_the_loss_of_its_step(scale_wrt_gas: bool, share: float) -> None:
    """Scripts add up what it returns over the micro-batches, to log the loss of a step."""
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 4, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 1), config=config)
    loss = engine(torch.ones(1, 3)).square().sum()
    returned = engine.backward(loss, scale_wrt_gas=scale_wrt_gas)
    assert torch.equal(returned, share * loss)
    engine.close()


def test_what_initialize_refuses_before_any_rank_is_asked() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "OneBitAdam"}}
    net = nn.Linear(1, 1)
    for arguments, kind, message in (
        ({}, TypeError, "expected model=, a torch.nn.Module or a PipelineModule, got NoneType"),
        ({"model": net}, ValueError, "no configuration: pass config="),
        ({"model": net, "config": config, "config_params": config}, ValueError, "as config and as config_params"),
        ({"model": net, "config": config, "mesh_param": (1, 2)}, ValueError, "product is the 1 ranks"),
        (
            {"model": net, "config": config, "model_parameters": net},
            TypeError,
            r"model_parameters=model.parameters\(\)",
        ),
        ({"model": net, "config": config, "mpu": object()}, TypeError, "mpu is a object without"),
        ({"model": net, "config": config, "training_data": iter("x")}, TypeError, "expected a map-style dataset"),
        (
            {"model": net, "config": config, "dist_init_required": False},
            RuntimeError,
            "call torch.distributed.init_pro",
        ),
        (
            {"model": net, "config": config, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)},
            ValueError,
            r"given twice, as optimizer= and as OneBitAdam in the configuration, .* what the first does \(SGD\)",
        ),
    ):
        with pytest.raises(kind, match=message):
            deepspeed.initialize(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 0), (2, 1)])
def test_a_table_that_is_renormalised_in_forward_is_refused(
    ranks: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 3 would drop what forward writes, and every replica would write the rows of its own batch."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    config = {"train_batch_size": ranks, "zero_optimization": {"stage": stage}}
    with pytest.raises(ValueError, match=r"rank 0: 1 renormalises rows of its table in forward \(max_norm\)"):
        deepspeed.initialize(model=nn.Sequential(nn.Linear(1, 1), nn.Embedding(4, 4, max_norm=1.0)), config=config)


def test_a_table_may_be_renormalised_where_replicas_differ_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """At stage 0 with local steps: all checks pass, and the grid comes next."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(initializing.grids, "start", Mock(side_effect=NotImplementedError))
    config = {"train_batch_size": 2, "onebit": {"local_steps": {"every": 4}}, "optimizer": {"type": "AdamW"}}
    with pytest.raises(NotImplementedError):
        deepspeed.initialize(model=nn.Embedding(4, 4, max_norm=1.0), config=config)


# ---------------------------------------------------------------- modules


def test_a_loader_is_begun_again() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    refused(ValueError, "the loader is empty", next, deepspeed.utils.RepeatingLoader([]))


def test_lines_of_some_ranks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.INFO, "onebit"):
        for ranks in ([0], [1], None, [-1]):
            deepspeed.log_dist(f"of {ranks}", ranks=ranks)
    assert caplog.messages == ["[Rank 1] of [1]", "[Rank 1] of None", "[Rank 1] of [-1]"]


def test_the_accelerator_of_a_machine_without_cuda() -> None:
    device = deepspeed.get_accelerator()
    if device.is_cuda:
        pytest.skip("CUDA is here: its names are torch.cuda's")
    assert torch.device(device.device_name(3)) == device.device() == torch.device("cpu")
    assert device.communication_backend_name() == "gloo" and device.on_accelerator(torch.zeros(1))
    assert device.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    device.manual_seed(4)
    state, drawn = device.get_rng_state(), torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn) and device.memory_allocated() == 0 and device.device_count() == 1


def test_optimizers_by_deepspeeds_names() -> None:
    net = nn.Linear(3, 2)
    adamw = deepspeed.ops.adam.FusedAdam(net.parameters(), lr=0.1, betas=[0.8, 0.9], weight_decay=0.01)
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["betas"] == (0.8, 0.9)
    assert type(deepspeed.ops.lamb.FusedLamb(net.parameters(), max_coeff=5.0)) is Lamb
    lion = deepspeed.ops.lion.FusedLion(net.parameters(), betas=[0.8, 0.9], weight_decay=0.01)
    assert type(lion) is type(deepspeed.ops.lion.DeepSpeedCPULion(net.parameters())) is Lion
    assert (lion.param_groups[0]["betas"], lion.param_groups[0]["weight_decay"]) == ((0.8, 0.9), 0.01)
    with pytest.raises(ValueError, match="fp32_optimizer_states=False is not supported"):
        deepspeed.ops.lion.DeepSpeedCPULion(net.parameters(), fp32_optimizer_states=False)


def test_deepspeeds_cpu_adam_is_ours_where_parameters_lie_in_host_memory() -> None:
    made, net = deepspeed.ops.adam.DeepSpeedCPUAdam, nn.Linear(3, 2)
    groups = [{"params": iter([net.weight]), "lr": 0.5}, {"params": net.bias}]
    adam = made(groups, lr=0.1, adamw_mode=False, bias_correction=False, weight_decay=0.3)
    assert type(adam) is HostAdam and not adam.bias_correction
    assert [(g["lr"], g["weight_decay"], g["decoupled_weight_decay"]) for g in adam.param_groups] == [
        (0.5, 0.3, False),
        (0.1, 0.3, False),
    ]
    small = made(net.parameters(), fp32_optimizer_states=False)
    assert (small.moment_dtype, small.variance_dtype) == (torch.bfloat16, torch.uint8)
    elsewhere = nn.Linear(3, 2, device="meta")
    assert type(made(elsewhere.parameters())) is type(made(net.parameters(), amsgrad=True)) is torch.optim.AdamW
    refused(ValueError, "needs parameters in host memory", made, elsewhere.parameters(), fp32_optimizer_states=False)


def test_activations_are_computed_again() -> None:
    x, calls = torch.ones(3, requires_grad=True), []

    def square(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * x

    deepspeed.checkpointing.configure(None, num_checkpoints=2)
    deepspeed.checkpointing.checkpoint(square, x).sum().backward()  # type: ignore[attr-defined]
    assert len(calls) == 2 and torch.equal(x.grad, 2 * torch.ones(3)) and deepspeed.checkpointing.is_configured()


def test_groups_of_a_model_without_experts() -> None:
    net = nn.Linear(3, 2)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": net.parameters(), "name": "all"})
    assert [len(group["params"]) for group in groups] == [2] and groups[0]["name"] == "all"
    net.bias.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="is marked as an expert's"):
        split_params_into_different_moe_groups_for_optimizer({"params": net.parameters()})
    with pytest.raises(AttributeError, match="there are no experts"):
        _ = deepspeed.moe.layer


# ---------------------------------------------------------------- pipelines


def layers() -> list[object]:
    return [TiedLayerSpec("ends", nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 4), nn.ReLU, nn.Linear(4, 3),
            TiedLayerSpec("ends", nn.Linear, 3, 3)]  # fmt: skip


class Topology:
    def __init__(self, **sizes: int) -> None:
        self.get_dim = sizes.get


def test_parameters_of_a_list_of_layers_stand_for_those_of_its_stages() -> None:
    given = layers()
    given[2] = nn.ReLU()
    net = PipelineModule(given, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
    names = [name for name, _ in net.named_parameters()]
    assert names == ["layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.3.bias", "tied.ends.weight",
                     "tied.ends.bias"]  # fmt: skip
    assert (
        next(net.parameters()).device.type == "meta" and dict(net.named_parameters())["layers.3.bias"] is given[3].bias
    )
    dict(net.named_parameters())["layers.1.bias"].requires_grad_(False)
    (last,) = net.stages([range(1, 5)])
    assert {name for name, p in last.named_parameters() if not p.requires_grad} == {"layers.1.bias"}
    refused(AttributeError, "it is a list of layers, and each rank builds its own", getattr, net, "apply")


def pair(inputs: tuple) -> tuple:
    x, mask = inputs
    return 2 * x, mask


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, scale: float = 3.0) -> tuple[Tensor, Tensor]:
        return scale * x * mask, mask


def scaled_by(factor: nn.Module, inputs: tuple) -> tuple:
    return factor(inputs[0]), inputs[1]


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_a_layer_gets_a_tuple_as_its_signature_asks(interval: int) -> None:
    """Whole, as DeepSpeed passes it, to one parameter; by element to several; and never as one of two readings."""
    tied = TiedLayerSpec("a", nn.Linear, 2, 2, forward_fn=scaled_by)
    given = [pair, Masked(), nn.Identity(), tied, torch.autocast("cpu")(pair), lambda x, mask: (x, mask),
             lambda inputs: (inputs[0],), lambda inputs: inputs[0].relu()]  # fmt: skip
    recompute = deepspeed.checkpointing.checkpoint if interval == 3 else None
    options = {"loss_fn": nn.functional.mse_loss, "activation_checkpoint_interval": interval,
               "activation_checkpoint_func": recompute}  # fmt: skip
    (stage,) = PipelineModule(given, **options).stages([range(len(given))])  # type: ignore[arg-type]
    x, mask = torch.randn(5, 2), torch.rand(5, 2) > 0.5
    assert torch.equal(stage(x, mask), (2 * stage.tied["a"](6 * x * mask)).relu())
    for unclear in (lambda *inputs: inputs, lambda x, mask=None: x, torch.add):
        (stage,) = PipelineModule([pair, unclear], loss_fn=nn.functional.mse_loss).stages([range(2)])
        refused(TypeError, r"layer 1 \(.*\) gets a tuple of 2, and could take it as one argument or", stage, x, mask)


def of_one(inputs: tuple) -> tuple:
    (x,) = inputs
    return (x + 1,)


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_a_tuple_of_one_stays_a_tuple(interval: int) -> None:
    """As in DeepSpeed, and over the border of two stages as well: a batch of one would unpack a tensor silently."""
    given = [lambda x: (2 * x,), of_one, nn.Identity(), of_one]
    net = PipelineModule(given, loss_fn=nn.functional.mse_loss, activation_checkpoint_interval=interval)
    x = torch.randn(1, 3, requires_grad=True)
    for borders in ((4,), (1, 4), (2, 4), (3, 4), (1, 2, 3, 4)):
        value: tuple = (x,)
        for stage in net.stages([range(first, last) for first, last in zip((0, *borders), borders, strict=False)]):
            given_on = stage(*value)
            value = given_on if isinstance(given_on, tuple) else (given_on,)
        (last,) = unmarked(given_on)  # type: ignore[misc]
        assert torch.equal(last, 2 * x + 1 + 1)


@pytest.mark.parametrize(
    ("names", "interval", "expected"),
    [(None, 1, [1, 1]), (None, 2, [2, 2]), (["Linear"], 1, [1, 1]), (["Linear"], 2, []),
     (["Linear", "ReLU"], 2, [2, 2]), (["ReLU"], 0, [])],
)  # fmt: skip
def test_only_checkpointable_layers_are_recomputed(names: list[str] | None, interval: int, expected: list[int]) -> None:
    """As DeepSpeed has it: an interval with any other layer keeps its activations, and one without parameters."""
    given = [nn.Linear(2, 2), nn.ReLU(), LayerSpec(nn.Linear, 2, 2), nn.ReLU()]
    recomputed = []

    def recompute(function: partial, *inputs: Tensor) -> object:
        recomputed.append(len(function.args[0]))
        return function(*inputs)

    net = PipelineModule(given, loss_fn=nn.functional.mse_loss, activation_checkpoint_interval=interval,
                         activation_checkpoint_func=recompute, checkpointable_layers=names)  # fmt: skip
    (stage,) = net.stages([range(4)])
    x = torch.randn(3, 2)
    assert torch.equal(stage(x), stage.layers["2"](given[0](x).relu()).relu())
    assert recomputed == expected


def test_a_stage_may_begin_with_a_layer_that_writes_its_input() -> None:
    """What a stage receives is a leaf of autograd, which no layer may write. The copy leaves it as it was."""
    layers = [nn.ReLU(inplace=True), nn.Linear(2, 2)]
    (stage,) = PipelineModule(layers, loss_fn=nn.functional.mse_loss).stages([range(2)])
    received = torch.randn(5, 2, requires_grad=True)
    before = received.detach().clone()
    stage(received).sum().backward()
    assert torch.equal(received, before)
    assert torch.equal(received.grad, (before > 0) * stage.layers["1"].weight.sum(0))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"seed_fn": print}, "seed_fn=.* is not here: pass base_seed="),
        ({"dynamic_shape": True}, "dynamic_shape=True is not here"),
        ({"checkpointable_layers": ["Block"]}, "are the classes of no layer: Linear"),
        ({"topology": Topology(pipe=2, data=2, model=2)}, "the topology divides layers over 2 ranks"),
        ({"topology": Topology(pipe=2, data=2), "num_stages": 4}, "num_stages is 4, but the topology has 2 stages"),
    ],
)
def test_what_a_list_of_layers_does_not_take(arguments: dict, message: str) -> None:
    refused(ValueError, message, PipelineModule, [nn.Linear(1, 1)], loss_fn=nn.functional.mse_loss, **arguments)


@pytest.mark.parametrize(
    "topology", [PipeModelDataParallelTopology(2, 3, 4), PipeDataParallelTopology(3, 2), ProcessTopology(["x"], [5])]
)
def test_a_topology_is_row_major(topology: ProcessTopology) -> None:
    """The oracle is torch.arange in the topology's shape."""
    axes, ranks = topology.get_axis_names(), torch.arange(topology.world_size()).view(topology.dims)
    assert topology.get_dim("none") == 0 and topology.get_axis_comm_lists("none") == []
    for rank in range(topology.world_size()):
        place = topology.get_coord(rank)._asdict()
        assert ranks[tuple(place.values())] == rank == topology.get_rank(**place)
    for k, axis in enumerate(axes):
        assert topology.get_axis_comm_lists(axis) == ranks.movedim(k, -1).reshape(-1, topology.get_dim(axis)).tolist()
        for place in range(topology.get_dim(axis)):
            at = ranks.select(k, place).flatten().tolist()
            assert topology.get_axis_list(axis, place) == topology.filter_match(**{axis: place}) == at
    refused(ValueError, "expected a place on each of the axes", topology.get_rank)
    refused(ValueError, "there is no rank 99", topology.get_coord, 99)


def test_a_rank_of_a_topology_has_a_name() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_rank_repr(3) == "model_01" and topology.get_rank_repr(3, ["model"]) == "pipe_00-data_01"
    assert PipelineModule([nn.Linear(1, 1)], topology=PipeDataParallelTopology(1, 2), loss_fn=pair).num_stages == 1


def test_a_transposed_layer_becomes_a_linear_one() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    net, x = nn.Sequential(nn.ReLU(), nn.Sequential(Transposed())), torch.randn(4, 3)
    expected = net(x)
    assert convert_conv1d_to_linear(net, Transposed) is net and type(net[1][0]) is nn.Linear
    torch.testing.assert_close(net(x), expected)
    assert recursive_getattr(net, "1.0.weight") is net[1][0].weight


def test_a_topology_says_how_many_stages() -> None:
    net = PipelineModule([nn.Linear(1, 1)], None, Topology(pipe=1, data=2), nn.functional.mse_loss)
    assert net.num_stages == 1
