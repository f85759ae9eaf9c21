"""One owner of communication: whoever else averages gradients is found, named and refused, or warned of."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from ranks import run_torchrun
from test_torch_contract import ONE_BIT, make
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrapper_ranks import CASES, errors

from onebit.agreement.wrappers import wrapper_of
from onebit.comm import SimTransport, run_ranks


@pytest.mark.processes
def test_a_wrapper_that_averages_is_refused_on_all_ranks_by_name() -> None:
    results = run_torchrun(2, errors, timeout_s=100).check().results
    assert results[0].keys() == CASES.keys()
    for found in results:
        for name, error in found.items():
            if name.startswith("told"):
                assert error == "", (name, error)
            elif name.startswith("FSDP1"):
                assert error.startswith("ValueError: rank ") and "FSDP2" in error, (name, error)
            elif name == "initialize":
                assert error.startswith("TypeError: ") and "DistributedDataParallel" in error, (name, error)
            else:
                wrapper = "Wrapped" if name == "ZeroOneAdam" else "DistributedDataParallel"
                assert error.startswith(f"RuntimeError: rank 0: {wrapper} averages the gradients"), (name, error)


@pytest.mark.parametrize("name", ONE_BIT)
@pytest.mark.parametrize("averages", [True, False])
def test_an_all_reduce_of_the_users_own_is_warned_of_once(
    name: str, averages: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind backward, where no wrapper is to be seen. Zeros on all ranks, and a world of one, say nothing."""

    def ours(transport: SimTransport) -> None:
        params = [nn.Parameter(torch.linspace(-1.0, 1.0, 300)) for _ in range(2)]
        optimizer = make(name, params, transport)
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            for p in params:
                p.grad = torch.randn(300, generator=generator)
                if averages:
                    transport.all_reduce(p.grad).wait()
            if step == 1 and not averages:
                for p in params:
                    p.grad.zero_()
            optimizer.step()

    with caplog.at_level(logging.WARNING):
        run_ranks(3, ours)
        run_ranks(1, ours)
    said = [record.message for record in caplog.records]
    assert len(said) == averages and all("all 3 ranks have the same gradients" in line for line in said)


@pytest.mark.slow
def test_looking_for_a_wrapper_leaves_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuple that is seen before it is whole cannot grow: tuple() raises SystemError in the thread that makes it."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    params, errors, is_over = list(nn.Linear(3, 3).parameters()), [], threading.Event()

    def make_tuples() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(50))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=make_tuples)
    thread.start()
    for _ in range(8):
        assert wrapper_of(params) == ""
    is_over.set()
    thread.join()
    assert not errors


def test_a_wrapper_of_a_small_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    class Part(DistributedDataParallel):
        def __init__(self, module: nn.Module):
            nn.Module.__init__(self)
            self.module, self._comm_hooks = module, []

    layers = [nn.Linear(2, 2) for _ in range(100)]
    params = [p for layer in layers for p in layer.parameters()]
    assert wrapper_of(params) == ""
    kept = [Part(layers[1]), Part(nn.Linear(2, 2))]
    assert wrapper_of(params) == "Part"
    del kept[0]
    assert wrapper_of(params) == ""
