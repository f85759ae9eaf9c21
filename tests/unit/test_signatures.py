"""help() and notebooks show every option with the default that it has; a share of a run is no number of steps."""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from test_docs import SAMPLES
from torch import nn

import onebit
from onebit.arithmetic.schedule import DenseSteps, Synchronisations, VarianceUpdates
from onebit.comm import SimTransport
from onebit.optimizer import CommonOptions, CompressedOptimizer
from onebit.usage.contract import TorchOptions
from onebit.zero import ShardedOnebitAdam
from onebit.zero.sharded.lamb import ShardedOnebitLamb
from onebit.zero.sharded.optimizer import ShardedOnebitOptimizer, ShardedOptions
from onebit.zero.sharded.zero_one_adam import ShardedZeroOneAdam

ROOT = Path(__file__).parents[2]
REPLICATED = (onebit.OnebitAdam, onebit.OnebitLamb, onebit.ZeroOneAdam, onebit.OnebitMuon)
SHARDED = (ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam)
KINDS = [*((kind, CommonOptions, CompressedOptimizer) for kind in REPLICATED),
         *((kind, ShardedOptions, ShardedOnebitOptimizer) for kind in SHARDED)]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "base"), KINDS)
def test_every_option_is_there_with_its_default(kind: type, options: type, base: type) -> None:
    shown = inspect.signature(kind).parameters
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in shown.values())
    bases = inspect.signature(base.__init__).parameters
    for name in options.__annotations__:
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        if name in bases:
            assert shown[name].default == bases[name].default, name
    adamw = inspect.signature(torch.optim.AdamW).parameters
    for name in TorchOptions.__annotations__:
        assert shown[name].default == adamw[name].default, name
    assert all(p.default is not inspect.Parameter.empty for p in list(shown.values())[1:])


@pytest.mark.parametrize("kind", REPLICATED[:3])
def test_the_defaults_that_are_shown_may_be_given(kind: type) -> None:
    shown = inspect.signature(kind).parameters
    given = {name: p.default for name, p in shown.items() if name not in ("params", "transport")}
    optimizer = kind(nn.Linear(3, 2).parameters(), transport=SimTransport(), **given)
    plain = kind(nn.Linear(3, 2).parameters(), transport=SimTransport())
    assert optimizer.option_lines() == plain.option_lines()


def test_help_says_what_the_options_are() -> None:
    text = pydoc.render_doc(onebit.OnebitAdam, renderer=pydoc.plaintext).replace(
        "'", ""
    )  # 3.14 shows none around types
    assert "bucket_cap_mb: float | None = None" in text and "overlap: bool = True" in text
    assert "Options of the whole family." in text and "max_consecutive_skips: this many skipped steps" in text
    assert "foreach, fused: how torch runs the same mathematics" in text
    assert onebit.OnebitAdam.__doc__ is not None and onebit.OnebitAdam.__doc__.startswith("AdamW whose data-parallel")


def test_an_unknown_option_is_still_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'overlapp'"):
        onebit.OnebitAdam(nn.Linear(3, 2).parameters(), transport=SimTransport(), overlapp=True)


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_a_share_of_a_run_is_told_what_to_write(share: float) -> None:
    with pytest.raises(ValueError, match=rf"freeze_step=round\({share:g} \* total_steps\)"):
        onebit.OnebitAdam(nn.Linear(3, 2).parameters(), transport=SimTransport(), freeze_step=share)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"var_freeze_step=round\({share:g} \* total_steps\)"):
        onebit.ZeroOneAdam(nn.Linear(3, 2).parameters(), transport=SimTransport(), var_freeze_step=share)  # type: ignore[arg-type]


def test_numbers_of_steps_are_whole() -> None:
    assert DenseSteps(numpy.int64(7)).freeze_step == 7 and DenseSteps(numpy.int64(7)).is_dense(6)  # type: ignore[arg-type]
    assert not DenseSteps(numpy.int64(7)).is_dense(7)  # type: ignore[arg-type]
    assert type(VarianceUpdates(16, numpy.int32(5)).var_freeze_step) is int  # type: ignore[arg-type]
    doubled = Synchronisations(numpy.int64(10), numpy.int64(8))  # type: ignore[arg-type]
    assert [doubled.interval(step, lr=1.0, peak_lr=1.0) for step in (0, 10, 20, 40)] == [1, 2, 4, 8]
    for name in ("var_update_scaler", "local_step_scaler", "local_step_clipper"):
        with pytest.raises(ValueError, match=f"write {name}=16"):
            onebit.ZeroOneAdam(nn.Linear(3, 2).parameters(), transport=SimTransport(), **{name: 16.0})
    with pytest.raises(ValueError, match="write freeze_step=150"):
        DenseSteps(150.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a number of steps, got None"):
        DenseSteps(None)  # type: ignore[arg-type]


def test_checkers_still_read_the_typed_dict() -> None:
    assert inspect.get_annotations(onebit.OnebitAdam.__init__)["common"] == "Unpack[CommonOptions]"


USER = """
import torch

import onebit

net = torch.nn.Linear(8, 1)
adam = onebit.OnebitAdam(net.parameters(), lr=1e-3, freeze_step="auto", max_grad_norm=1.0, bucket_cap_mb=4.0)
zero_one = onebit.ZeroOneAdam(net.parameters(), local_step_clipper="auto", compression="always", fused=True)
muon = onebit.OnebitMuon(onebit.muon_groups(net, head=None), momentum=0.9)
bits: float = adam.stats.bits_per_parameter
scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
adam.load_state_dict(adam.state_dict())
engine, optimizer, loader, schedule = onebit.zero.initialize(model=net, config={"train_batch_size": 1})
"""
WRONG = {
    "bucket_cap=4.0": 'Unexpected keyword argument "bucket_cap" for "OnebitAdam"; did you mean "bucket_cap_mb"?',
    'max_grad_norm="1"': 'Argument "max_grad_norm" to "OnebitAdam" has incompatible type "str"; expected "float"',
    "local_step_clipper=4": 'Unexpected keyword argument "local_step_clipper" for "OnebitAdam"',
}


@pytest.mark.processes
@pytest.mark.thorough
def test_a_users_code_is_checked(tmp_path: Path) -> None:
    """By mypy; wrong options are found, right ones pass, and so do the README's samples."""
    lines = [f"onebit.OnebitAdam(net.parameters(), {words})" for words in WRONG]
    for name, code in {"user.py": USER + "\n".join(lines), **SAMPLES}.items():
        (tmp_path / name).write_text(code)
    # torch's own Tensor.backward has no types, which --strict minds.
    options = ["--strict", "--untyped-calls-exclude=torch", "--follow-imports=silent", f"--config-file={os.devnull}"]
    command = [sys.executable, "-m", "mypy", *options, "user.py", *SAMPLES]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110, check=False)
    said = [line for line in done.stdout.splitlines() if ": error: " in line]
    first = USER.count("\n") + 1
    assert len(said) == len(WRONG), done.stdout + done.stderr
    for k, (message, line) in enumerate(zip(WRONG.values(), said, strict=True)):
        assert line.startswith(f"user.py:{first + k}: error: {message}"), line
