"""What ranks under torchrun do with accelerate: each case says what came out, or the error."""

from __future__ import annotations

import copy
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from errors import error_of
from example_ranks import run_example
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onebit
from onebit import comm
from onebit.comm.messages import gather_texts
from onebit.integrations.accelerate import Accelerator
from onebit.optimizer import CompressedOptimizer

KINDS: dict[str, tuple[type[CompressedOptimizer], dict]] = {
    "OnebitAdam": (onebit.OnebitAdam, {"freeze_step": 4}),
    "ZeroOneAdam": (
        onebit.ZeroOneAdam,
        {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    ),
}
BATCHES = 12


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))


def optimizer_of(model: nn.Module, name: str = "OnebitAdam", **options: object) -> CompressedOptimizer:
    kind, defaults = KINDS[name]
    return kind(model.parameters(), lr=0.01, compression="always", **defaults | options)


def batches(count: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a loader that does not shuffle gives, in the order of the ranks."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count * ranks)
    ]


def loader(count: int = BATCHES) -> DataLoader:
    x, y = (torch.cat(parts) for parts in zip(*batches(count, comm.init().world_size), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=4)


def sha(model: nn.Module) -> str:
    held = [*model.parameters(), *model.buffers()]
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in held)).hexdigest()


@contextmanager
def fresh_state() -> Iterator[None]:
    """accelerate keeps its state in classes: as at the start of a program."""
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class Loop:
    """The loop that accelerate's users write."""

    def __init__(
        self, name: str = "OnebitAdam", accumulate: int = 2, max_norm: float = 0.5, delay: int = 0, **options: object
    ):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        self.max_norm, model = max_norm, net()
        self.inner = optimizer_of(model, name, delay=delay)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.inner, 0.99)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, self.inner, loader(), scheduler
        )
        self.norms: list[tuple[bool, float, float | None]] = []

    def train(self, first: int = 0, spoil: int | None = None) -> None:
        """All batches from the first on. spoil: the step whose gradient is no number on rank 1."""
        for k, (x, y) in enumerate(self.accelerator.skip_first_batches(self.loader, first)):
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), y)
                if k == spoil and self.accelerator.process_index == 1:
                    loss = loss * math.nan
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients and self.max_norm:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                    was_nan = math.isnan(norm.item())
                self.optimizer.step()
                if norm is not None:
                    self.norms.append((was_nan, norm.item(), self.optimizer.stats.grad_norm))
                self.scheduler.step()
                self.optimizer.zero_grad()


# ---------------------------------------------------------------- cases


def drawn_buffers(folder: Path) -> list[float]:
    """What ranks have of a buffer that each has drawn for itself, one that no state_dict holds."""
    model = net()
    model.register_buffer("features", torch.full((2,), float(comm.init().rank + 3)), persistent=False)
    Accelerator(cpu=True).prepare(model, optimizer_of(model))
    return model.features.tolist()


def plain_loop(folder: Path) -> dict:
    """The prepared loop, and the same by hand: no accelerate, the model and the optimizer alone."""
    loop = Loop()
    loop.train()
    model, ranks, rank = net(), comm.init().world_size, comm.init().rank
    optimizer = optimizer_of(model, max_grad_norm=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    mine = batches(BATCHES, ranks)[rank::ranks]
    for k, (x, y) in enumerate(mine):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        if k % 2:
            optimizer.step()
            for _ in range(ranks):
                schedule.step()
            optimizer.zero_grad()
    same = all(map(torch.equal, model.state_dict().values(), loop.model.state_dict().values()))
    return {
        "same": same,
        "norms": loop.norms,
        "lr": [loop.scheduler.get_last_lr(), schedule.get_last_lr()],
        "resent": loop.inner.stats.resent_steps,
        "wrapped": type(loop.model).__name__,
    }


def overlap(folder: Path) -> dict:
    """Without clipping buckets leave during the last pass of a step, in one bit too."""
    loop, launched = Loop(max_norm=0.0), []
    loop.inner.register_step_pre_hook(lambda optimizer, args, kwargs: launched.append(optimizer._driver.launched))
    loop.train()
    return {"launched": launched, "buckets": len(loop.inner.buckets), "resent": loop.inner.stats.resent_steps}


def resumed(name: str) -> Callable[[Path], dict]:
    """Saved after 8 batches of 12, in the midst of the local steps of 0/1 Adam, and taken up again."""

    def case(folder: Path) -> dict:
        loop = Loop(name, accumulate=1)
        apart, together = [], []
        for k, (x, y) in enumerate(loop.loader):
            loop.accelerator.backward(nn.functional.mse_loss(loop.model(x), y))
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()
            if k == 7:
                apart = gather_texts(loop.inner.transport, sha(loop.model))
                loop.accelerator.save_state(str(folder / name))
                loop.accelerator.wait_for_everyone()
                together = gather_texts(loop.inner.transport, sha(loop.model))
        ended = sha(loop.model)
        again = Loop(name, accumulate=1, max_norm=0.0)
        again.accelerator.load_state(str(folder / name))
        again.train(8)
        return {
            "apart": len(set(apart)),
            "together": len(set(together)),
            "same": sha(again.model) == ended,
            "files": sorted(path.name for path in (folder / name).iterdir()),
        }

    return case


def skipped(folder: Path, delay: int = 0) -> dict:
    """A gradient that is no number on rank 1: all skip, and so does the schedule."""
    loop, rates, spoil = Loop(accumulate=1, delay=delay), [], 6 if delay else 3
    step = loop.scheduler.step

    def and_note() -> None:
        step()
        rates.append((loop.accelerator.optimizer_step_was_skipped, loop.scheduler.get_last_lr()[0]))

    loop.scheduler.step = and_note
    loop.train(spoil=spoil)
    return {"rates": rates, "norm": loop.norms[spoil][1]}


def clipped_now_and_then(folder: Path) -> list[bool]:
    """Whether each step was clipped, of which the even ones ask for it."""
    accelerator, model = Accelerator(cpu=True), net()
    model, optimizer, batches_ = accelerator.prepare(model, optimizer_of(model), loader())
    were_clipped = []
    for k, (x, y) in enumerate(batches_):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if k % 2 == 0:
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        were_clipped.append(optimizer.stats.clip_factor < 1.0)
    return were_clipped


def save_for_one_rank(folder: Path) -> dict:
    """A checkpoint that a world of another size takes up; see `load_in_other_world`."""
    loop = Loop(accumulate=1)
    loop.train()
    loop.accelerator.save_state(str(folder / "world"))
    return {"owed": _owed(loop.inner), "ranks": comm.init().world_size}


def _owed(optimizer: CompressedOptimizer) -> float:
    """The sum of what this rank owes."""
    return sum(float(bucket.ef.worker.double().sum()) for bucket in optimizer.buckets if bucket.ef is not None)


# ---------------------------------------------------------------- natural, but wrong


def stock_accelerator(folder: Path) -> None:
    accelerator, model = accelerate.Accelerator(cpu=True), net()
    model, optimizer, batches_ = accelerator.prepare(model, optimizer_of(model), loader())
    for x, y in batches_:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def wrapped_model(folder: Path) -> None:
    Accelerator(cpu=True).prepare(nn.parallel.DistributedDataParallel(net()))


def stock_optimizer(folder: Path) -> None:
    model = net()
    Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))


def moved_model(folder: Path) -> None:
    """As model.to(device) behind the optimizer's construction: the state is elsewhere."""
    model = net()
    optimizer = optimizer_of(model)
    optimizer.buckets[0].device = torch.device("meta")
    Accelerator(cpu=True).prepare(model, optimizer)


def other_model(folder: Path) -> None:
    """As a conversion behind the optimizer's construction that makes new parameters."""
    optimizer = optimizer_of(net())
    Accelerator(cpu=True).prepare(net(), optimizer)


def sharded(folder: Path) -> None:
    """As a configuration of `accelerate launch` for FSDP."""
    accelerator, model = Accelerator(cpu=True), net()
    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.prepare(model, optimizer_of(model))


def part_of_a_norm(folder: Path) -> None:
    loop = Loop()
    loop.accelerator.clip_grad_norm_(loop.model[0].parameters(), 1.0)


def two_norms(folder: Path) -> None:
    accelerator, model = Accelerator(cpu=True), net()
    accelerator.prepare(model, optimizer_of(model, max_grad_norm=0.5))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def clipped_values(folder: Path) -> None:
    loop = Loop()
    loop.accelerator.clip_grad_value_(loop.model.parameters(), 1.0)


def other_norm(folder: Path) -> None:
    loop = Loop()
    loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0, norm_type=1)


def uneven_inputs(folder: Path) -> None:
    loop = Loop()
    with loop.accelerator.join_uneven_inputs([loop.model]):
        loop.train()


def unsynchronised_weights(folder: Path) -> None:
    loop = Loop("ZeroOneAdam", accumulate=1, max_norm=0.0)
    for x, y in loop.loader:
        loop.accelerator.backward(nn.functional.mse_loss(loop.model(x), y))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if not loop.inner.rule.is_synchronised():
            loop.accelerator.get_state_dict(loop.model)


def weights_that_look_ahead(folder: Path) -> None:
    loop = Loop(accumulate=1, max_norm=0.0, delay=1)
    loop.train()
    assert loop.inner.step_under_way is not None
    loop.accelerator.save_model(loop.model, folder / "ahead")


def missing_file(folder: Path) -> None:
    loop = Loop()
    loop.accelerator.save_state(str(folder / "missing"))
    loop.accelerator.wait_for_everyone()
    if loop.accelerator.is_main_process:
        (folder / "missing" / "optimizer_rank_00001.bin").unlink()
    loop.accelerator.wait_for_everyone()
    loop.accelerator.load_state(str(folder / "missing"))


def main_process_only(folder: Path) -> None:
    """save_state on rank 0 alone; of a model without BatchNorm's statistics, which all ranks must meet for."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(8, 1)
    accelerator.prepare(model, optimizer_of(model))
    if accelerator.is_main_process:
        accelerator.save_state(str(folder / "alone"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder / "alone"))


def other_save(folder: Path) -> None:
    """One rank's file of an earlier save, as a kill between two saves to one folder leaves it."""
    loop, target = Loop(), folder / "other"
    loop.accelerator.save_state(str(target))
    loop.accelerator.wait_for_everyone()
    if loop.accelerator.is_main_process:
        shutil.copy(target / "optimizer_rank_00001.bin", folder / "kept.bin")
    loop.train()
    loop.accelerator.save_state(str(target))
    loop.accelerator.wait_for_everyone()
    if loop.accelerator.is_main_process:
        shutil.copy(folder / "kept.bin", target / "optimizer_rank_00001.bin")
    loop.accelerator.wait_for_everyone()
    loop.accelerator.load_state(str(target))


def clipped_by_hand(folder: Path) -> dict:
    """torch's clip_grad_norm_ clips each rank's own gradient, as written; what backward has sent is sent once more."""

    def train(by_hand: bool, **options: object) -> str:
        accelerator, model = Accelerator(cpu=True), net()
        model, optimizer, batches_ = accelerator.prepare(model, optimizer_of(model, **options), loader())
        for x, y in batches_:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        resent.append(optimizer.stats.resent_steps)
        return sha(model)

    resent: list[int] = []
    same = train(True) == train(True, overlap=False)
    return {"same": same, "resent": resent}


def unprepared_optimizer(folder: Path) -> dict:
    """The model and the loader are prepared, the optimizer is not: as without accelerate."""
    accelerator, model = Accelerator(cpu=True), net()
    optimizer = optimizer_of(model)
    prepared, batches_ = accelerator.prepare(model, loader())
    twin = copy.deepcopy(net())
    other = optimizer_of(twin)
    for x, y in batches_:
        for one, by in ((prepared, optimizer), (twin, other)):
            nn.functional.mse_loss(one(x), y).backward()
            by.step()
            by.zero_grad()
    return {"same": sha(prepared) == sha(twin)}


RIGHT: dict[str, Callable[[Path], object]] = {
    "drawn buffers": drawn_buffers,
    "plain loop": plain_loop,
    "overlap": overlap,
    **{f"resumed {name}": resumed(name) for name in KINDS},
    "skipped": skipped,
    "skipped, delayed": partial(skipped, delay=1),
    "another world": save_for_one_rank,
    "clipped now and then": clipped_now_and_then,
    "clipped by hand": clipped_by_hand,
    "unprepared optimizer": unprepared_optimizer,
}
WRONG: dict[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        stock_accelerator, wrapped_model, stock_optimizer, moved_model, other_model, sharded, part_of_a_norm,
        two_norms, clipped_values, other_norm, uneven_inputs, unsynchronised_weights,
        weights_that_look_ahead, missing_file,
        main_process_only, other_save,
    )
}  # fmt: skip


def cases(folder: str) -> dict:
    """By case: what came out, or the error's text."""
    said: dict[str, object] = {}
    with fresh_state():
        Accelerator(cpu=True)  # accelerate starts the group
    options = ("--steps", "40", "--warmup", "10")
    said["example"] = run_example("accelerate_loop", Path(folder) / "example", *options, around=fresh_state)
    return said | outcomes(Path(folder), RIGHT, WRONG)


def outcomes(folder: Path, right: Mapping[str, Callable[[Path], object]], wrong: Mapping[str, Callable]) -> dict:
    """Each case as at the start of a program: what it found, or its error."""
    said: dict[str, object] = {}
    for name, case in (*right.items(), *wrong.items()):
        with fresh_state():
            said[name] = error_of(Exception, case, folder) if name in wrong else case(folder)
    return said


def load_in_other_world(folder: str) -> dict:
    with fresh_state():
        loop = Loop(accumulate=1)
        loop.accelerator.load_state(f"{folder}/world")
        owed = _owed(loop.inner)
        loop.train()
        return {"owed": owed, "steps": int(loop.inner.steps[0]), "norm": loop.norms[-1][1]}


def without_cpu(folder: str) -> str:
    """What a GPU machine's script says on one without: accelerate knows of one process."""
    with fresh_state():
        accelerator, model = Accelerator(), net()
        return error_of(ValueError, accelerator.prepare, model, optimizer_of(model))
