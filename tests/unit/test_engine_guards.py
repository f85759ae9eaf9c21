"""What a script does past the engine is an error or a warning, and never a run that trains something else."""

from __future__ import annotations

import copy
import io
import itertools
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from errors import refused
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from onebit import zero
from onebit.checkpoint.files import CheckpointError
from onebit.comm import SimTransport
from onebit.zero.parallel.fsdp import blocks_of

GAS = 4
SHARDED = {"zero_optimization": {"stage": 2}}
FORMS: dict[str, dict] = {
    "dense": {},
    "dense, stage 1": {"zero_optimization": {"stage": 1}},
    "dense, stage 3": {"zero_optimization": {"stage": 3}},
    "one bit": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}}},
    "one bit, stage 2": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}}, **SHARDED},
    "across nodes": {
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        "onebit": {"sharding": "inter_node"},
    },
    "local": {"onebit": {"local_steps": {"every": 4}}},
    "offloaded": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.is_headless = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return hidden if self.is_headless else self.head(hidden)


def full(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p.detach()


Started = tuple[zero.Engine, torch.optim.Optimizer, object]


@pytest.fixture
def start() -> Iterator[object]:
    engines = []

    def started(form: str = "dense", model: nn.Module | None = None, gas: int = 1, **more: object) -> Started:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": gas,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            **FORMS[form],
            **more.pop("config", {}),
        }
        if "scheduler" in more:
            config["scheduler"] = more.pop("scheduler")
        engine, optimizer, _, scheduler = zero.initialize(model=model or Net(), config=config, **more)
        engines.append(engine)
        return engine, optimizer, scheduler

    yield started
    for engine in engines:
        engine.close()
    if not engines and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def batch(k: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(k))


def step(engine: zero.Engine, k: int = 0) -> None:
    engine.backward(engine(batch(k)).square().mean())
    engine.step()


# ---------------------------------------------------------------- optimizer and schedule


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_without_checkpoints_leaves_the_optimizer_as_it_was(start: object, form: str, tmp_path: Path) -> None:
    engine, optimizer, _ = start(form)
    before = {key: len(entry) for key, entry in optimizer.state_dict()["state"].items()}
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert {key: len(entry) for key, entry in optimizer.state_dict()["state"].items()} == before


def in_groups(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """As transformers groups an adapter's parameters, none of which goes without decay."""
    groups = [{"params": list(params)}, {"params": [], "weight_decay": 0}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1)


FIRST_STEPS = {  # the first step of each differs from a step with a state of zeros
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01, t0=2),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "SGD in groups": in_groups,
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [*itertools.product(FIRST_STEPS, ("dense", "in files")), ("NAdam", "dense, stage 3"), ("AdamW", "in files")],
)
def test_a_checkpoint_leaves_first_steps_to_parameters_that_have_taken_none(
    start: object, kind: str, form: str, tmp_path: Path
) -> None:
    """Taken before the first step, and after one in which the head had no gradient; or refused there."""

    def begun() -> zero.Engine:
        if form == "in files":  # a dense optimizer's state there
            device = {"device": "nvme", "nvme_path": str(tmp_path / "files")}
            more = {"config": {"zero_optimization": {"stage": 1, "offload_optimizer": device}}}
            if kind in FIRST_STEPS:
                more["config"] |= {"optimizer": None}
                more["optimizer"] = FIRST_STEPS[kind]
            return start(**more)[0]
        return start(form, optimizer=FIRST_STEPS[kind], config={"optimizer": None})[0]

    def trained(engine: zero.Engine, first: int = 0, saved: tuple[int, ...] = (), refuses: bool = False) -> Tensor:
        for k in range(first, 6):
            if k in saved:
                engine.save_checkpoint(tmp_path, k)
            if refuses and k < 2:
                with pytest.raises(CheckpointError, match="form is replicated"):
                    engine.load_checkpoint(tmp_path / "of another form")
            engine.module.is_headless = k == 0
            step(engine, k)
        return torch.cat([full(p).flatten() for p in engine.module.parameters()])

    clean = trained(begun())
    assert torch.equal(trained(begun(), saved=(0, 1)), clean)
    start("one bit")[0].save_checkpoint(tmp_path / "of another form")
    assert torch.equal(trained(begun(), refuses=True), clean)
    for k in (0, 1):
        engine = begun()
        step(engine, 7)  # a state that the checkpoint replaces
        engine.load_checkpoint(tmp_path, k)
        assert torch.equal(trained(engine, k), clean)


@pytest.mark.parametrize("form", ["dense", "dense, stage 1", "dense, stage 3", "offloaded"])
def test_a_schedule_of_the_same_groups_goes_on_after_a_load(start: object, form: str, tmp_path: Path) -> None:
    """As accelerate's, which makes a `DeepSpeedCPUAdam` of the groups of the optimizer that a schedule sets."""
    net = Net()
    first = torch.optim.AdamW(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda k: 2.0**-k)
    other = torch.optim.AdamW(first.param_groups)
    engine, optimizer, _ = start(form, net, optimizer=other, config={"optimizer": None})
    step(engine)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    first.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("form", FORMS)
def test_tied_weights_are_one_tensor_in_a_state_dict(start: object, form: str) -> None:
    model = Net()
    model.again = model.head  # as transformers ties embeddings: it writes what shares memory once
    engine = start(form, model)[0]
    for whole in (engine.module_state_dict(), engine._consolidated_16bit_state_dict()):
        assert whole["again.weight"] is whole["head.weight"] and whole["again.bias"] is not whole["again.weight"]


def test_the_engine_stays_on_its_device_and_in_its_dtype(start: object) -> None:
    engine = start(config={"bf16": {"enabled": True}})[0]
    assert engine.to("cpu:0", dtype=torch.bfloat16) is engine.to(dtype=torch.bfloat16) is engine
    with pytest.raises(RuntimeError, match=r"computes in torch.bfloat16, asked for torch.float16: the configuration"):
        engine.to(dtype=torch.float16)


@pytest.mark.parametrize("form", FORMS)
def test_a_module_keeps_the_name_of_its_class(start: object, form: str) -> None:
    engine = start(form)[0]
    names = [type(module).__name__ for module in engine.module.modules()]
    assert names == [type(module).__name__ for module in Net().modules()]


class Counted(Net):
    """Keeps its extra state as a number: writing into the tensor that shows it changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.calls])

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


@pytest.mark.parametrize("form", FORMS)
def test_extra_state_comes_back(start: object, form: str, tmp_path: Path) -> None:
    """From a checkpoint, a file, a folder of weights, and as `load_state_dict` has it."""
    engine, other = (start(form, nn.Sequential(Counted()))[0] for _ in range(2))
    step(engine)
    step(engine)
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path, "weights/model.safetensors")
    for load in (
        lambda: other.load_checkpoint(tmp_path),
        lambda: zero.import_weights(other.module, tmp_path / "weights/model.safetensors", SimTransport()),
        lambda: zero.import_weights(other.module, tmp_path / "weights", SimTransport()),
        lambda: other.load_state_dict(engine.module_state_dict()),
    ):
        other.module[0].calls = 7
        load()
        assert other.module[0].calls == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_the_optimizer_past_the_engine_is_refused(start: object, form: str) -> None:
    engine, optimizer, _ = start(form)
    step(engine)
    engine.backward(engine(batch()).square().mean())
    refused(RuntimeError, r"engine\.step\(\)", optimizer.step)
    engine.step()
    assert engine.global_steps == 2


def test_an_optimizer_of_the_scripts_own_is_guarded_as_well(start: object) -> None:
    for form in ("dense", "dense, stage 1", "local"):
        net = Net()
        mine = torch.optim.SGD(net.parameters(), lr=0.1)
        engine, _, _ = start(form, net, optimizer=mine)
        engine.backward(engine(batch()).square().mean())
        refused(RuntimeError, r"engine\.step\(\)", mine.step)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_step_under_way_are_not_dropped_by_habit(start: object, form: str) -> None:
    engine, optimizer, _ = start(form, gas=GAS)
    optimizer.zero_grad()  # there are none
    step(engine)
    refused(RuntimeError, "1 of 4 micro-batches", optimizer.zero_grad)
    engine.zero_grad()
    for k in range(GAS - 1):
        step(engine, k)
    optimizer.zero_grad()
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [1, 2])
def test_whole_gradients_stay_between_micro_batches_at_stage_1_alone(start: object, stage: int) -> None:
    engine, *_ = start(gas=2, config={"zero_optimization": {"stage": stage}})
    step(engine)
    assert (engine.module.body.weight.grad is None) == (stage == 2)


def test_a_schedule_that_is_stepped_twice_is_refused(start: object) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 50}}
    engine, _, scheduler = start(scheduler=warmup)
    with pytest.raises(RuntimeError, match=r"leave scheduler\.step\(\) out|Leave\s+scheduler\.step\(\) out"):
        for k in range(3):
            step(engine, k)
            scheduler.step()


def test_a_schedule_may_be_set_back(start: object, tmp_path: Path) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 50}}
    engine, _, scheduler = start(scheduler=warmup)
    step(engine)
    state = scheduler.state_dict()
    engine.save_checkpoint(tmp_path)
    step(engine)
    scheduler.load_state_dict(state)
    step(engine)
    step(engine)
    engine.load_checkpoint(tmp_path)
    step(engine)
    assert engine.global_steps == 2


@pytest.mark.parametrize(("form", "micro"), [*((form, 1) for form in FORMS), ("dense", 0), ("one bit", 0)])
def test_gradients_of_a_plain_backward_pass_are_refused(start: object, form: str, micro: int) -> None:
    engine, *_ = start(form, gas=GAS)
    for k in range(GAS + micro):
        step(engine, k)
    engine(batch()).square().mean().backward()
    refused(RuntimeError, r"engine\.backward\(loss\)", engine.step)
    if form != "one bit, stage 2":  # whose gradients have left
        engine.zero_grad()
        step(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_a_plain_backward_pass_are_refused_after_a_look_at_them(start: object, stage: int) -> None:
    """Without the loss scale, they would be divided by it in the step."""
    engine, *_ = start(config={"zero_optimization": {"stage": stage}, "fp16": {"enabled": True}})
    engine(batch()).square().mean().backward()
    zero.utils.safe_get_full_grad(next(engine.module.parameters()))
    refused(RuntimeError, r"engine\.backward\(loss\)", engine.step)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "dense, stage 3"])
def test_the_model_of_a_closed_engine_trains_in_another(start: object, form: str) -> None:
    first, *_ = start(form)
    step(first)
    first.close()
    second, *_ = start(form, first.module)
    for k in range(3):
        step(second, k)
    assert second.global_steps == 3


ACROSS = {**FORMS["across nodes"], "zero_optimization": {"stage": 2}}


def test_gradients_that_have_left_across_nodes_name_the_other_engine_and_cannot_be_given_up(start: object) -> None:
    first, *_ = start("across nodes", config=ACROSS)
    step(first)
    first.backward(first(batch()).square().mean())
    with pytest.raises(RuntimeError, match=r"owners have stepped .* call step\(\) first.*no_sync\(\).*stage=1"):
        first.zero_grad()
    first.step()
    second, *_ = start("across nodes", first.module, config=ACROSS)
    step(second)
    with pytest.raises(RuntimeError, match=r"another engine .* close the first one"):
        step(second)
    first.close()
    step(second)


def test_data_sampling_without_a_loader_of_the_engines_is_noticed(
    start: object, caplog: pytest.LogCaptureFixture
) -> None:
    batching = {"enabled": True, "max_tokens_per_batch": 64, "lr_scaling_method": "none"}
    sampling = {"enabled": True, "dynamic_batching": batching}
    config = {"data_efficiency": {"enabled": True, "data_sampling": sampling}}
    start(config=config)
    assert "data_sampling chooses samples" in caplog.text and "training_data=dataset" in caplog.text
    caplog.clear()
    start()
    assert "data_sampling" not in caplog.text


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(("form", "steps"), [*((form, 5) for form in FORMS), ("dense", 0), ("one bit", 0)])
def test_a_parameter_that_is_unfrozen_later_is_noticed(start: object, form: str, steps: int) -> None:
    net = Net()
    net.body.requires_grad_(False)
    engine, *_ = start(form, net)
    for k in range(steps):
        step(engine, k)
    net.body.weight.requires_grad_(True)
    refused(RuntimeError, r"body\.weight.*initialize\(\)", step, engine)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_is_added_later_is_noticed(start: object, form: str) -> None:
    net = Net()
    engine, *_ = start(form, net)
    for k in range(5):
        step(engine, k)
    net.head = nn.Sequential(net.head, nn.Linear(1, 1))
    refused(RuntimeError, r"head\.1\.weight", step, engine)


def test_a_group_that_is_added_to_a_one_bit_optimizer_trains(start: object) -> None:
    net = Net()
    net.body.requires_grad_(False)
    engine, optimizer, _ = start("one bit", net)
    step(engine)
    before = net.body.weight.detach().clone()
    net.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.body.parameters())})
    for k in range(3):
        step(engine, k)
    assert not torch.equal(net.body.weight, before)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_out_on_purpose_stays_out(start: object, form: str) -> None:
    net = Net()
    engine, *_ = start(form, net, model_parameters=net.head.parameters())
    before = engine.module_state_dict()
    for k in range(5):
        step(engine, k)
    after = engine.module_state_dict()
    assert torch.equal(before["body.weight"], after["body.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_frozen_after_initialize_trains_again(start: object, form: str) -> None:
    net = Net()
    engine, *_ = start(form, net)
    values = []
    for is_trained in (False, True):
        net.body.requires_grad_(is_trained)
        values.append(engine.module_state_dict()["body.weight"])
        for k in range(5):
            step(engine, k)
    values.append(engine.module_state_dict()["body.weight"])
    assert torch.equal(values[0], values[1]) and not torch.equal(values[1], values[2])


@pytest.mark.parametrize("form", ["dense", "dense, stage 1", "dense, stage 3", "one bit", "local", "offloaded"])
def test_what_is_frozen_has_no_moments(start: object, form: str) -> None:
    """Scripts ask for the moments of every parameter, as DeepSpeed's page on them does."""
    net = Net()
    net.body.requires_grad_(False)
    engine, *_ = start(form, net)
    step(engine)
    for ask in (zero.utils.safe_get_full_optimizer_state, zero.utils.safe_get_local_optimizer_state):
        found = {name: ask(p, "exp_avg") for name, p in engine.module.named_parameters()}
        assert [name for name, moment in found.items() if moment is None] == ["body.weight", "body.bias"]
    if form == "dense, stage 3":
        p = next(engine.module.parameters())
        part = zero.utils.safe_get_local_fp32_param(p)
        setting = zero.utils.safe_set_local_optimizer_state
        refused(KeyError, "it has nothing of a frozen parameter", setting, p, part, "exp_avg")


# ---------------------------------------------------------------- micro-batches


def test_a_step_for_every_fourth_backward_pass_is_warned_of(start: object, caplog: pytest.LogCaptureFixture) -> None:
    engine, *_ = start(gas=GAS)
    with caplog.at_level(logging.WARNING, logger="onebit"):
        for k in range(3 * GAS):
            engine.backward(engine(batch(k)).square().mean())
            if (k + 1) % GAS == 0:
                engine.step()
    assert len([r for r in caplog.records if "engine.step() after every" in r.getMessage()]) == 1


def test_two_losses_of_one_micro_batch_are_not_warned_of(start: object, caplog: pytest.LogCaptureFixture) -> None:
    engine, *_ = start(gas=2)
    with caplog.at_level(logging.WARNING, logger="onebit"):
        for k in range(8):
            out = engine(batch(k))
            engine.backward(out.square().mean(), retain_graph=True)
            engine.backward(out.abs().mean())
            engine.step()
    assert not caplog.records and engine.global_steps == 4


def test_stage_2_across_nodes_clips_as_stage_1(start: object, caplog: pytest.LogCaptureFixture) -> None:
    config = {**FORMS["across nodes"], "zero_optimization": {"stage": 2}, "gradient_clipping": 0.01}
    with caplog.at_level(logging.WARNING, logger="onebit"):
        engine, *_ = start("dense", **{"config": config})
    assert ["stage 2 across nodes runs as stage 1" in r.getMessage() for r in caplog.records] == [True]
    step(engine)
    assert engine.get_global_grad_norm() > 0.01


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("form", FORMS)
def test_one_ranks_state_dict_is_whole_and_plain(start: object, form: str) -> None:
    engine, *_ = start(form)
    step(engine)
    whole = engine.module_state_dict()
    file = io.BytesIO()
    torch.save(engine.module.state_dict(), file)
    twin = Net()
    twin.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert all(torch.equal(x.float(), whole[name].float()) for name, x in twin.state_dict().items())
    assert engine.module.head.state_dict().keys() == {"weight", "bias"}


def test_a_model_that_is_not_sharded_can_be_copied(start: object) -> None:
    engine, *_ = start()
    twin = copy.deepcopy(engine.module)
    pickled = io.BytesIO()
    torch.save(engine.module, pickled)
    engine.backward(engine(batch()).square().mean())
    twin.zero_grad()
    engine.step()
    assert not torch.equal(twin.state_dict()["head.weight"], engine.module.state_dict()["head.weight"])


# ---------------------------------------------------------------- names of DeepSpeed's scripts


class Encoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.body(x)))

    def generate(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_only_a_model_without_anything_to_train_is_warned_of(
    start: object, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="onebit"):
        start(form)
        assert not caplog.records
        _, optimizer, _ = start(form, Net().requires_grad_(False))
    assert optimizer is None and "nothing to train" in caplog.records[0].getMessage()


class InDicts(nn.Module):
    """Layers without a forward pass of their own, as in a list of dicts of modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 8), "heads": nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            up = layer["up"](x).relu()
            x = torch.cat([head(up) for head in layer["heads"]], dim=1)
        return x


class Chain(nn.ModuleList):
    """A list with a forward pass, which is one layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x).relu()
        return x


class Scaled(nn.Module):
    """A layer without a forward pass, with a parameter, and lists of both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))


class InLists(nn.Module):
    """The list has two names, but its layers are the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [Chain([nn.Linear(8, 8), nn.Linear(8, 8)]), Scaled(), nn.ParameterList([torch.ones(8)])]
        )
        self.blocks = self.layers

    def forward(self, x: Tensor) -> Tensor:
        chain, scaled, shifts = self.blocks
        return scaled.up(chain(x)) * scaled.scale + shifts[0]


@pytest.mark.parametrize(("model", "blocks"), [(InDicts, 6), (InLists, 2)])
def test_layers_in_containers_are_sharded_one_by_one(start: object, model: type[nn.Module], blocks: int) -> None:
    engines = [start(form, model())[0] for form in ("dense", "dense, stage 3")]
    assert len(blocks_of(model())) == blocks
    for engine in engines:
        for k in range(3):
            step(engine, k)
    plain, sharded = (engine.module_state_dict() for engine in engines)
    assert all(torch.equal(plain[name], sharded[name]) for name in plain)


class Pair(InDicts):
    pass


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()


@pytest.mark.parametrize(
    ("kinds", "marked", "blocks"),
    [([Pair], 1, 1), ([InDicts], 1, 1), (["Pair"], 1, 1), ([f"{__name__}.Pair"], 1, 1), ([nn.ModuleDict], 2, 0)],
)
def test_modules_of_a_class_are_gathered_as_one(kinds: list, marked: int, blocks: int) -> None:
    net = Wrapped()
    assert len(zero.utils.set_z3_leaf_modules(net, kinds)) == marked and len(blocks_of(net)) == blocks
    refused(ValueError, "Wrapped has no module of the classes", zero.utils.set_z3_leaf_modules, net, [nn.Conv2d])
    assert zero.utils.set_z3_leaf_modules(net, [nn.Conv2d], raise_if_not_found=False) == []


def test_leaf_modules_are_named_in_other_ways_and_unmarked() -> None:
    net, utils = Wrapped(), zero.utils
    assert utils.set_z3_leaf_modules_by_name(net, ["pair", "xyzzy"], raise_if_not_found=False) == (
        [net.pair],
        ["xyzzy"],
    )
    assert utils.get_z3_leaf_modules(net) == [net.pair] and utils.z3_leaf_module(net.pair)
    assert utils.unset_z3_leaf_modules(net, [Pair]) == [net.pair] and not utils.get_z3_leaf_modules(net)
    found, missing = utils.set_z3_leaf_modules_by_suffix(net, ["air"])
    assert (found, missing) == ([net.pair], []) and len(blocks_of(net)) == 1
    assert utils.set_z3_leaf_modules_by_suffix(net, "air") == ([net.pair], [])
    assert utils.set_z3_leaf_modules(net, "Pair") == [net.pair]
    utils.set_z3_leaf_modules_by_name(net, "pair", flag=False)
    utils.set_z3_leaf_module(net, True)
    assert utils.get_z3_leaf_modules(net) == [net]
    refused(ValueError, r"has no module named \['xyzzy'\]", utils.set_z3_leaf_modules_by_name, net, ["xyzzy"])
    refused(ValueError, r"whose names end in \['x'\]", utils.set_z3_leaf_modules_by_suffix, net, ["x", "pair"])


@pytest.mark.parametrize(
    ("leaf", "blocks", "warned"),
    [
        ({"classes": ["Pair", "Absent"]}, 1, ""),
        ({"classes": "Pair"}, 1, ""),
        ({"names": ["pair"]}, 1, ""),
        ({"name_suffixes": "air"}, 1, ""),
        ({"names": ["pair", "xyzzy"]}, 1, "no module of the model has the name xyzzy"),
        ({"classes": ["Absent"]}, 6, "the model has no module of these classes"),
    ],
)
def test_a_configuration_names_leaf_modules(
    start: object, leaf: dict, blocks: int, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    zero_optimization = {"stage": 3, "leaf_module": leaf}
    engine, *_ = start(model=Wrapped(), config={"zero_optimization": zero_optimization})
    sharded = [module for module in engine.module.modules() if isinstance(module, FSDPModule)]
    assert len(sharded) == 1 + blocks
    lines = [record.getMessage() for record in caplog.records if "leaf_module" in record.getMessage()]
    assert len(lines) == bool(warned) and all(warned in text for text in lines)
    caplog.clear()
    zero.utils.set_z3_leaf_modules(engine.module, [nn.ModuleDict], raise_if_not_found=False)
    assert "set them before initialize()" in caplog.text


def test_leaf_modules_of_other_stages_are_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    model = zero.PipelineModule([nn.Linear(8, 1)], loss_fn=nn.functional.mse_loss)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "steps_per_print": None}
    zero_optimization = {"stage": 3, "leaf_module": {"names": ["layers.7"]}}
    engine, *_ = zero.initialize(model=model, config={**config, "zero_optimization": zero_optimization})
    assert not [record for record in caplog.records if "leaf_module" in record.getMessage()]
    engine.close()


def test_a_method_that_meets_shards_names_the_option(start: object) -> None:
    engine, *_ = start("dense, stage 3", Encoder())
    assert engine.size() == 81
    refused(RuntimeError, r'engine.encode\(\) .* "onebit": {"forward_methods": \["encode"\]}', engine.encode, batch())
    assert engine.module.generate(batch()).shape == (4, 1)  # the one that transformers calls
    engine, *_ = start("dense, stage 1", Encoder())
    assert engine.encode(batch()).shape == (4, 1)


def test_an_epochs_end_is_counted(start: object) -> None:
    engine, optimizer, _ = start()
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    with pytest.raises(RuntimeError, match=r"check_overflow\(\) is not here: .*was_step_applied"):
        optimizer.check_overflow(external=True)


def test_settings_are_the_files() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 7,
        "wall_clock_breakdown": True,
        "dump_state": True,
        "dataloader_drop_last": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "zero_optimization": {"stage": 2, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}},
        "flops_profiler": {"enabled": True},
    }
    engine, *_ = zero.initialize(model=Net(), config=config)
    expected = {
        "train_batch_size": 6, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
        "get_batch_info": (6, 3, 2), "gradient_clipping": 0.5, "steps_per_print": 7, "wall_clock_breakdown": True,
        "dump_state": True, "dataloader_drop_last": True, "optimizer_name": "adamw", "scheduler_name": "WarmupLR",
        "get_mom": [(0.8, 0.9)], "get_type": [None], "fp16_enabled": True, "bfloat16_enabled": False, "loss_scale": 0,
        "dynamic_loss_scale": True, "initial_dynamic_scale": 16.0, "torch_autocast_enabled": False,
        "get_data_types": (torch.float16, torch.float32), "zero_optimization": True, "zero_optimization_stage": 2,
        "zero_optimization_partition_gradients": True, "zero_optimization_partition_weights": False,
        "zero_overlap_comm": False, "zero_cpu_offload": True, "zero_nvme_offload_optimizer": False,
        "zero_partial_offload": 1.0, "zero_gather_16bit_weights_on_model_save": False, "flops_profiler_enabled": True,
        "elasticity_enabled": False, "pld_enabled": False, "get_pld_theta": None, "random_ltd_enabled": False,
        "data_efficiency_enabled": False, "curriculum_learning_enabled": False, "curriculum_enabled_legacy": False,
    }  # fmt: skip
    assert {name: getattr(engine, name)() for name in expected} == expected
    assert engine.optimizer_params()["lr"] == 0.01 and engine.scheduler_params()["warmup_num_steps"] == 5
    engine.close()
    elastic = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "min_gpus": 1, "max_gpus": 4}
    of_others = {"fp16": {"enabled": True, "loss_scale": 8.0}, "elasticity": {**elastic, "version": 0.1}}
    engine, *_ = zero.initialize(model=Net(), config={"optimizer": config["optimizer"], **of_others})
    assert engine.elasticity_enabled() and not engine.dynamic_loss_scale() and engine.loss_scale() == 8.0
    assert not engine.zero_optimization() and not engine.zero_cpu_offload()
    engine.close()


def test_a_latest_that_is_lost_among_tags_is_an_error(start: object, tmp_path: Path) -> None:
    engine, *_ = start()
    engine.save_checkpoint(tmp_path, tag="first")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match=r"latest names no checkpoint that exists; .* holds first: name one"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, tag="first")[0] == str(next((tmp_path / "first").glob("step_*")))


def test_messages_without_a_line_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = zero.PipelineModule([nn.Linear(8, 1)], loss_fn=nn.functional.mse_loss)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "steps_per_print": None}
    with caplog.at_level(logging.WARNING, logger="onebit"):
        engine, *_ = zero.initialize(model=model, config={**config, "comms_logger": {"enabled": True}})
    assert ["comms_logger has no effect" in r.getMessage() for r in caplog.records] == [True]
    engine.train_batch(iter([(batch(), torch.zeros(4, 1))]))
    assert engine.global_steps == 1
    engine.close()


def test_the_mode_is_the_modules(start: object) -> None:
    engine, *_ = start()
    assert engine.eval() is engine and not engine.training and not engine.module.training
    assert engine.train() is engine and engine.training and engine.module.training


REFUSED_ARGUMENTS: dict[str, tuple] = {
    "a sampler": (lambda engine: engine.deepspeed_io([0], data_sampler=[0]), ValueError, "data_sampler= is not"),
    "parameters": (lambda engine: engine.module_state_dict(keep_vars=True), ValueError, "keep_vars=True: .* copies"),
    "a function": (lambda engine: engine.load_module_state_dict({}, custom_load_fn=print), ValueError, "custom_load"),
    "without frozen": (
        lambda engine: engine.save_16bit_model(".", exclude_frozen_parameters=True), ValueError, "is for save_check",
    ),
    "a save nowhere": (lambda engine: engine.save_checkpoint(""), ValueError, 'the working directory is "."'),
    "a load from nowhere": (lambda engine: engine.load_checkpoint(None), ValueError, "expected a folder, got None"),
    "weights nowhere": (lambda engine: engine.save_16bit_model(""), ValueError, "expected a folder, got ''"),
    "no curriculum": (lambda engine: engine.set_data_post_process_func(print), RuntimeError, "loader of a curriculum"),
    "another device": (lambda engine: engine.to("cpu:1"), RuntimeError, "on cpu and stays there, asked for cpu:1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_ARGUMENTS)
def test_what_is_not_done_is_refused(start: object, case: str) -> None:
    act, error, text = REFUSED_ARGUMENTS[case]
    engine, *_ = start()
    refused(error, text, act, engine)


def test_a_model_that_deepspeed_has_taken_apart_is_refused(start: object) -> None:
    net = Net()
    net.body.weight.ds_id = 0
    refused(TypeError, r"Linear has been built by DeepSpeed's zero.Init, .*HfDeepSpeedConfig", start, model=net)


def test_engines_of_one_process_close_in_any_order(tmp_path: Path) -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    first, second = (zero.initialize(model=Net(), config=config)[0] for _ in range(2))
    second.save_checkpoint(tmp_path)
    first.close()
    second.save_checkpoint(tmp_path)
    second.close()
    refused(RuntimeError, "the process group has been destroyed", second.save_checkpoint, tmp_path)
