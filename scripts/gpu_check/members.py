"""Members that come and go, on the device: of three one is lost as another comes, and all end with the same bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence

import torch
from faults.member_runs import Hub, Killed, founded
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from gpu_check.checks import assert_same
from gpu_check.forms import FORMS, Make, Regression
from gpu_check.section import Outcome, Setting, outcome
from onebit import AveragedSteps
from onebit.comm import SignCodec
from onebit.membership import Members, begin, end

NAMED = ("OnebitAdam, clipped", "OnebitAdam, delay=1", "OnebitMuon", "local steps in one bit")


def _averaged(params: Sequence[nn.Parameter], transport: Members, codec: SignCodec) -> torch.optim.Optimizer:
    return AveragedSteps(torch.optim.AdamW(params, lr=1e-2), transport=transport, bucket_cap_mb=0.01)


TRIED: dict[str, Make] = {name: FORMS[name] for name in NAMED} | {"AveragedSteps": _averaged}
STEPS, CHANGE = 24, 10  # the change comes after a warm-up of 8 steps


def check(make: Make, device: torch.device, codec: SignCodec) -> None:
    hub = Hub(founders=3)

    def work(members: Members) -> tuple[Tensor, tuple[int, int]]:
        task = Regression(ord(members.rendezvous.name), device)
        optimizer = make(task.params, members, codec)
        begin(optimizer)
        while optimizer.steps_taken() < STEPS:
            if optimizer.steps_taken() >= CHANGE:
                hub.holds.set()
                # A loss leaves the newcomer of local steps out: it has to have come again before the run ends.
                while members.rank == 0 and not (members.joined or members.is_awaited()):
                    time.sleep(0.01)
                if members.rendezvous.name == "b":
                    raise Killed
            task.step(optimizer)
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        end(optimizer)
        return parameters_to_vector(task.params).detach(), (members.lost, members.joined)

    run = founded(hub, work, [float("inf")] * 3)
    if hub.holds.wait(30):
        run.start("n")
    run.join()
    if set(run.results) != {"a", "c", "n"} or run.results["a"][1] != (1, 1):
        raise AssertionError(f"expected members a, c and n, one lost and one come, got {run.results}")
    for name, (params, _) in run.results.items():
        assert_same(f"parameters of member {name} against member a's", params, run.results["a"][0])


def member_checks(setting: Setting) -> Iterator[Outcome]:
    for name, make in TRIED.items():
        yield outcome(f"members: {name}", functools.partial(check, make, setting.device, SignCodec(setting.block)))
