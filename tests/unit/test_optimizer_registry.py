"""Every optimizer of the registry: its file reads and writes, builds, trains, and is known where optimizers are."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from config_files import optimizer
from headless import Headless
from train.methods import choice_of
from train.run import parse_args

from onebit.cli.plan import table
from onebit.comm import SimTransport, run_ranks
from onebit.zero.config import optimizers
from onebit.zero.config.optimizers import OPTIMIZERS, OptimizerChoice, build_optimizer, optimizer_flags
from onebit.zero.config.schema import keys_of
from onebit.zero.config.whole import read_config
from onebit.zero.forms import choose
from onebit.zero.grid import GridShape
from onebit.zero.plan import Run, plan
from onebit.zero.plan import optimizers as planned

ENTRIES = list(OPTIMIZERS.values())


def build(name: str, transport: SimTransport, model: torch.nn.Module) -> torch.optim.Optimizer:
    choice = OptimizerChoice(name, OPTIMIZERS[name].params())
    return build_optimizer(choice, model.parameters(), transport=transport, model=model)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_its_block_is_read_in_any_letter_case_and_written_as_it_was(entry: optimizers.OptimizerEntry) -> None:
    config = optimizer(entry.name.upper(), lr=3e-4)
    assert config.optimizer == OptimizerChoice(entry.name, entry.params(lr=3e-4))
    assert read_config(config.to_dict(), world_size=config.world_size) == config


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_it_trains_two_ranks_alike(entry: optimizers.OptimizerEntry) -> None:
    def train(transport: SimTransport) -> torch.Tensor:
        model = Headless()
        p, made = model.matrix, build(entry.name, transport, model)
        for step in range(5):
            gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            p.grad = gradient + p.detach()
            if not entry.is_one_bit:
                transport.all_reduce(p.grad).wait()
            made.step()
        assert hasattr(made, "no_sync") == entry.is_one_bit  # it sends, so it can wait
        return p.detach().clone()

    first, second = run_ranks(2, train)
    assert torch.equal(first, second) and not torch.equal(first, Headless().matrix)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_sharded_form_names_keys_that_it_has(entry: optimizers.OptimizerEntry) -> None:
    if entry.sharded is None:  # Muon's matrices are orthogonalised whole: a node gathers them, a network cannot
        assert not entry.is_one_bit or entry.name == "OneBitMuon"
        return
    assert {entry.sharded.warmup, *entry.sharded.without_effect} <= keys_of(entry.params).keys()


@pytest.mark.parametrize("flag", optimizer_flags())
def test_the_training_script_passes_its_flags_on(flag: str) -> None:
    entry = optimizer_flags()[flag]
    assert choice_of(parse_args(["--optimizer", flag])) == OptimizerChoice(entry.name, entry.params())
    rules = keys_of(entry.params)
    values = {key: rules[key].choices[-1] if rules[key].choices else 7 for key in entry.flag_keys}
    words = [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    given = choice_of(parse_args(["--optimizer", flag, "--lr", "0.5", *words])).params
    expected = {"lr": 0.5, **values}
    assert {f.name: getattr(given, f.name) for f in fields(given) if f.name in expected} == expected


def test_the_order_of_the_averages_reaches_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    choice = choice_of(parse_args(["--optimizer", "onebit-adam", "--momentum-of", "moves"]))
    assert build_optimizer(choice, [Headless().matrix], transport=SimTransport()).rule.momentum_of == "moves"
    with pytest.raises(SystemExit):
        parse_args(["--momentum-of", "laprop"])
    assert 'one of "gradients", "moves"' in capsys.readouterr().err


def test_an_entry_is_all_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(OPTIMIZERS["OneBitAdam"], name="Mine", flag="mine", sharded=None)
    monkeypatch.setitem(OPTIMIZERS, "Mine", mine)
    config = read_config(
        {"optimizer": {"type": "mine", "params": {"freeze_step": 5}}, "train_batch_size": 2}, world_size=2
    )
    assert config.optimizer == OptimizerChoice("Mine", mine.params(freeze_step=5)) and config.optimizer.is_one_bit
    assert type(build("Mine", SimTransport(), Headless())).__name__ == "OnebitAdam"
    assert choice_of(parse_args(["--optimizer", "mine", "--freeze-step", "5"])) == config.optimizer
    run = Run(1e9, 4, 2)
    theirs, ours = plan(run, "OneBitAdam", 0), plan(run, "Mine", 0)
    assert theirs is not None and ours == replace(theirs, optimizer="Mine")
    assert any(row[:2] == ["Mine", "0"] for row in table(run).rows)


def test_an_optimizer_without_a_sharded_form_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "Mine", replace(OPTIMIZERS["OneBitAdam"], name="Mine", sharded=None))
    blocks = {"optimizer": {"type": "Mine"}, "train_batch_size": 2, "zero_optimization": {"stage": 1}}
    with pytest.raises(ValueError, match="Mine has no form that is sharded across nodes; use stage 0"):
        choose(read_config(blocks, world_size=2), GridShape((1, 2, 1, 1)))


def test_the_plan_has_a_row_for_whoever_holds_other_state() -> None:
    assert planned() == [
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
        "OneBitMuon",
        "sharded int4",
        "sharded sign",
        "local steps",
        "AdamW",
    ]
    with pytest.raises(ValueError, match="Lamb has no row of its own"):
        plan(Run(1e9, 4), "Lamb", 0)


class Headed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.out = torch.nn.Embedding(5, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)


def muon_of_headed(head: str | None, model: torch.nn.Module) -> torch.optim.Optimizer:
    params = OPTIMIZERS["OneBitMuon"].params(head=head)
    groups = [{"params": list(model.parameters())[:3], "weight_decay": 0.1}, {"params": list(model.parameters())[3:]}]
    return build_optimizer(OptimizerChoice("OneBitMuon", params), groups, transport=SimTransport(), model=model)


def test_muon_asks_which_module_makes_the_outputs() -> None:
    model = Headed()
    made = muon_of_headed("out", model)
    held = [(group["use_muon"], group["weight_decay"], len(group["params"])) for group in made.param_groups]
    assert held == [(True, 0.1, 1), (False, 0.1, 2), (False, 0.0, 2)]
    assert made.param_groups[0]["params"] == [model.hidden.weight]
    model.get_output_embeddings = lambda: model.out
    assert [len(g["params"]) for g in muon_of_headed(None, model).param_groups] == [1, 2, 2]
    assert [g["use_muon"] for g in muon_of_headed("", model).param_groups] == [True, False, True, False]
    with pytest.raises(
        ValueError, match=r"params\.head: OneBitMuon must know which module .* Headed has no get_output"
    ):
        muon_of_headed(None, Headed())
    with pytest.raises(ValueError, match=r"params\.head: .*otu.*named_modules"):
        muon_of_headed("otu", Headed())
