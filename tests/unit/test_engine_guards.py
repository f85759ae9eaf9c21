"""What a script does past the engine is an error or a warning, and never a run that trains something else."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onebit import zero

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

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


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
def test_a_step_of_the_optimizer_past_the_engine_is_refused(start: object, form: str) -> None:
    engine, optimizer, _ = start(form)
    step(engine)
    engine.backward(engine(batch()).square().mean())
    with pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
        optimizer.step()
    engine.step()
    assert engine.global_steps == 2


def test_an_optimizer_of_the_scripts_own_is_guarded_as_well(start: object) -> None:
    for form in ("dense", "dense, stage 1", "local"):
        net = Net()
        mine = torch.optim.SGD(net.parameters(), lr=0.1)
        engine, _, _ = start(form, net, optimizer=mine)
        engine.backward(engine(batch()).square().mean())
        with pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
            mine.step()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_step_under_way_are_not_dropped_by_habit(start: object, form: str) -> None:
    engine, optimizer, _ = start(form, gas=GAS)
    optimizer.zero_grad()  # there are none
    step(engine)
    with pytest.raises(RuntimeError, match="1 of 4 micro-batches"):
        optimizer.zero_grad()
    engine.zero_grad()
    for k in range(GAS - 1):
        step(engine, k)
    optimizer.zero_grad()
    assert engine.global_steps == 1


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
    with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\)"):
        engine.step()
    if form != "one bit, stage 2":  # whose gradients have left
        engine.zero_grad()
        step(engine)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(("form", "steps"), [*((form, 5) for form in FORMS), ("dense", 0), ("one bit", 0)])
def test_a_parameter_that_is_unfrozen_later_is_noticed(start: object, form: str, steps: int) -> None:
    net = Net()
    net.body.requires_grad_(False)
    engine, *_ = start(form, net)
    for k in range(steps):
        step(engine, k)
    net.body.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"body\.weight.*initialize\(\)"):
        step(engine)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_is_added_later_is_noticed(start: object, form: str) -> None:
    net = Net()
    engine, *_ = start(form, net)
    for k in range(5):
        step(engine, k)
    net.head = nn.Sequential(net.head, nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"head\.1\.weight"):
        step(engine)


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

    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())


def test_a_method_that_meets_shards_names_the_option(start: object) -> None:
    engine, *_ = start("dense, stage 3", Encoder())
    assert engine.size() == 81
    with pytest.raises(RuntimeError, match=r'engine.encode\(\) .* "onebit": {"forward_methods": \["encode"\]}'):
        engine.encode(batch())
    engine, *_ = start("dense, stage 1", Encoder())
    assert engine.encode(batch()).shape == (4, 1)


def test_an_epochs_end_is_counted(start: object) -> None:
    engine, optimizer, _ = start()
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    with pytest.raises(RuntimeError, match=r"check_overflow\(\) is not here: .*was_step_applied"):
        optimizer.check_overflow(external=True)


def test_a_model_that_deepspeed_has_taken_apart_is_refused(start: object) -> None:
    net = Net()
    net.body.weight.ds_id = 0
    with pytest.raises(TypeError, match=r"Linear has been built by DeepSpeed's zero.Init, .*HfDeepSpeedConfig"):
        start(model=net)


def test_engines_of_one_process_close_in_any_order(tmp_path: Path) -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    first, second = (zero.initialize(model=Net(), config=config)[0] for _ in range(2))
    second.save_checkpoint(tmp_path)
    first.close()
    second.save_checkpoint(tmp_path)
    second.close()
    with pytest.raises(RuntimeError, match="the process group has been destroyed"):
        second.save_checkpoint(tmp_path)
