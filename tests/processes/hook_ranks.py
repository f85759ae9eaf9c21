"""What ranks under torchrun do with DistributedDataParallel and `onebit.ddp_hook`."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from example_ranks import run_example
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit import comm
from onebit.comm import IdentityCodec


class Net(nn.Module):
    """unused: of this rank's number, a layer takes no part."""

    def __init__(self, unused: int = -1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(20, 300), nn.Linear(300, 30), nn.Linear(30, 3)
        self.unused = unused

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x[:, :30] if self.unused == dist.get_rank() else self.middle(x))


class Training:
    """A model in DDP with a hook's state, and any optimizer."""

    def __init__(
        self, *, codec: comm.Codec | None = None, start_step: int = 3, unused: int = -1, hook: bool = True, **ddp: Any
    ):
        ddp.setdefault("find_unused_parameters", unused >= 0)
        self.model = DistributedDataParallel(Net(unused), bucket_cap_mb=0.01, **ddp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        self.state = onebit.DDPHookState(self.model, start_step=start_step, codec=codec)
        if hook:
            self.model.register_comm_hook(self.state, onebit.ddp_hook)

    def loss(self, step: int, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * micro + 10 * step + dist.get_rank())
        return self.model(torch.randn(8, 20, generator=generator)).square().mean()

    def train(self, steps: range, passes: int = 1, scaled: bool = False, spoil: int = -1) -> Training:
        for step in steps:
            self.optimizer.zero_grad()
            for micro in range(passes - 1):
                with self.model.no_sync():
                    (self.loss(step, micro + 1) / passes).backward()
            loss = self.loss(step) / passes
            loss = loss * float("inf") if step == spoil and dist.get_rank() == 1 else loss
            if scaled:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                self.optimizer.step()
        return self

    def digest(self) -> str:
        held = b"".join(p.detach().float().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(held).hexdigest()


def far(one: Training, other: Training) -> float:
    """The largest difference between parameters."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)


def resumed() -> list[str]:
    """The bits of a training, and of one that went on from its state in a new wrapper, whose buckets are rebuilt."""
    first = Training().train(range(7))
    saved = copy.deepcopy([each.state_dict() for each in (first.model, first.optimizer, first.state)])
    second = Training()
    for each, state in zip((second.model, second.optimizer, second.state), saved, strict=True):
        each.load_state_dict(state)
    return [each.train(range(7, 12)).digest() for each in (first, second)]


def with_our_optimizer() -> str:
    model = DistributedDataParallel(Net())
    model.register_comm_hook(onebit.DDPHookState(model), onebit.ddp_hook)
    optimizer = onebit.OnebitAdam(model.parameters(), transport=comm.init())
    try:
        for step in range(2):
            generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
            model(torch.randn(4, 20, generator=generator)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


def example(folder: str) -> dict[str, Any]:
    return run_example("ddp_hook", Path(folder), "--steps", "120", "--warmup", "40")


def everything() -> dict[str, Any]:
    comm.init()
    lossless = {"codec": IdentityCodec(), "start_step": 0}
    cases: dict[str, Callable[[], Training]] = {
        "plain": lambda: Training().train(range(9)),
        "from the first step": lambda: Training(start_step=0).train(range(9)),
        "views": lambda: Training(gradient_as_bucket_view=True).train(range(9)),
        "accumulated": lambda: Training().train(range(9), passes=3),
        "static graph": lambda: Training(static_graph=True).train(range(9)),
        "unused": lambda: Training(unused=1).train(range(9)),
        "scaled": lambda: Training().train(range(9), scaled=True),
        "overflow": lambda: Training().train(range(9), scaled=True, spoil=6),
    }
    found: dict[str, Any] = {name: case().digest() for name, case in cases.items()}
    found["resumed"] = resumed()
    found["with OnebitAdam"] = with_our_optimizer()
    for name, passes in (("lossless", 1), ("lossless, accumulated", 3)):
        ddp = Training(hook=False).train(range(6), passes=passes)
        found[name] = far(Training(**lossless).train(range(6), passes=passes), ddp)  # type: ignore[arg-type]
    found["warm-up"] = far(Training(start_step=99).train(range(6)), Training(hook=False).train(range(6)))
    return found
