"""Ranks of test_offload_killed.py: they train an engine with files, from its last checkpoint, until a SIGKILL."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from onebit import zero

STEPS, SAVES_EVERY, SUMS, WIDTH = 4, 2, 2, 16


class Killer:
    """Counts the calls of Python and C functions in each phase of a run, in all threads but autograd's and torch's.

    at: (phase, call) with which this process ends, as by `kill -9`; at the phase's end where it has fewer calls. None:
    never. calls: of each phase.
    """

    def __init__(self, at: tuple[str, int] | None = None):
        self.calls: Counter[str] = Counter()
        self._at, self._phase = at, ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        threading.setprofile(self._count)
        sys.setprofile(self._count)
        try:
            yield
            if self._at is not None and self._at[0] == name:
                _die()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._phase = ""

    def _count(self, frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call") and self._phase:
            self.calls[self._phase] += 1
            if self._at is not None and self._phase == self._at[0] and self.calls[self._phase] > self._at[1]:
                _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def config_of(files: str, folder: str) -> dict:
    """files: which block has them, offload_optimizer or offload_param; or "one bit", in the former."""
    if files == "one bit":
        one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}
        onebit = {"sharding": "intra_node", "block": 64, "compression": "always"}
        return config_of("offload_optimizer", folder) | {"optimizer": one_bit, "onebit": onebit}
    block = {"device": "nvme", "nvme_path": folder, "buffer_count": 3}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": SUMS,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3 if files == "offload_param" else 2, files: block},
    }


def trains(files: str, folder: str, saves: str, victim: int = -1, phase: str = "", call: int = 0) -> dict:
    """To STEPS steps, from the last checkpoint in `saves`. victim: the rank that ends in this call of this phase.

    What has been trained, the steps of the checkpoint that it began with, and the calls of each phase.
    """
    killer = Killer((phase, call) if int(os.environ["RANK"]) == victim else None)
    with killer.phase("start"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU(), nn.Linear(WIDTH, 4))
        engine = zero.initialize(model=model, config=config_of(files, folder))[0]
    with killer.phase("load"):
        engine.load_checkpoint(saves)
    began = engine.global_steps
    for step in range(began, STEPS):
        with killer.phase(f"step {step}"):
            for micro in range(SUMS):
                seed = (step * SUMS + micro) * engine.grid.world.world_size + engine.grid.world.rank
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
                engine.backward(engine(x.bfloat16()).float().square().mean())
                engine.step()
        if (step + 1) % SAVES_EVERY == 0:
            with killer.phase(f"save {step + 1}"):
                engine.save_checkpoint(saves)
    state = engine.module_state_dict()
    weights = b"".join(x.detach().float().numpy().tobytes() for x in state.values())
    found = {"bits": hashlib.sha256(weights).hexdigest(), "began": began, "calls": dict(killer.calls)}
    engine.close()
    return found
