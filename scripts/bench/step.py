"""Whole training steps of a GPT, one rank's part: our optimizers, and what DistributedDataParallel offers.

    python scripts/bench.py step --worker --method onebit-adam --size 25m-short --steps 5 --out step.json

Started on every host, by `suite/main.py` or any launcher that sets RANK, WORLD_SIZE and MASTER_ADDR. Three things are
timed, the slowest rank of each, all ranks starting together: forward and backward of the bare model (compute_seconds),
the optimizer's own work without traffic (local_seconds), and whole steps (seconds). What a whole step takes beyond the
other two is traffic that was not hidden.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from train.model import GPT, SIZES, VOCABULARY, WithLoss, build_model, decay_groups

import onebit
from bench.timing import measure
from onebit import comm
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates
from onebit.cli.doctor.contenders import bfloat16_hook
from onebit.comm import Transport, torch_versions
from onebit.comm.transports.torch_distributed import TorchTransport
from onebit.onebit_adam import AdamRule
from onebit.optimizer import CompressedOptimizer
from onebit.zero import ShardedOnebitAdam
from onebit.zero.parallel import fsdp

LR = 1e-4
WEIGHT_DECAY = 0.01
H = 8  # steps per exchange of "zero-one-adam, H = 8"; what local_step_clipper="auto" ends in

# ---------------------------------------------------------------- transports


class SameStart(TorchTransport):
    """The default process group. Replicas built from one seed need no broadcast, 100 MB at the emulated rate."""

    def broadcast(self, x: Tensor, src: int) -> _Done:
        return _Done()


class Silent(Transport):
    """A transport that moves nothing: what a step costs beside its traffic. Received frames are this rank's own."""

    sent_bytes = 0
    timeout_s = 1.0

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> _Done:
        out_WB.copy_(in_WB)
        return _Done()

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> _Done:
        out_WB.copy_(in_B.clone().expand_as(out_WB))  # in_B is a row of out_WB
        return _Done()

    def all_reduce(self, x: Tensor) -> _Done:
        return _Done()

    def broadcast(self, x: Tensor, src: int) -> _Done:
        return _Done()

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> _Done:
        out_B.zero_()  # it may be longer than in_B
        return _Done()

    def split(self, ranks: Sequence[int]) -> Silent:
        return Silent(list(ranks).index(self.rank), len(ranks))

    def close(self) -> None:
        """Nothing is held."""


class _Done:
    def wait(self) -> None:
        """It is."""

    def is_ready(self) -> bool:
        return True


# ---------------------------------------------------------------- what is compared


class Local:
    """AdamW alone, on this rank alone. The others are the same with traffic."""

    optimizer: Optimizer

    def __init__(self, model: GPT, transport: Transport):
        self.model = model
        self.optimizer = AdamW(decay_groups(model, WEIGHT_DECAY), lr=LR)

    def backward(self, windows: Tensor) -> None:
        """Forward and backward."""
        self.model.loss(windows).backward()

    def update(self) -> None:
        """Move the parameters; gradients are there."""
        self.optimizer.step()

    def settle(self) -> None:
        """The warm-up steps are over, the measured ones begin."""


class Ddp(Local):
    """DistributedDataParallel as it comes, buckets of 25 MiB, then AdamW. Counts its own payload."""

    bytes_per_element = 4.0
    bucket_cap_mb: float | None = None

    def __init__(self, model: GPT, transport: TorchTransport):
        super().__init__(model, transport)
        self.transport = transport
        self.elements = sum(p.numel() for p in model.parameters())
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": self.bucket_cap_mb}
        options |= torch_versions.without_first_broadcast()
        self.ddp = DistributedDataParallel(WithLoss(model), **options)

    def backward(self, windows: Tensor) -> None:
        self.ddp(windows).backward()
        self.transport.sent_bytes += round(2 * (1 - 1 / self.transport.world_size) * self._payload())

    def _payload(self) -> float:
        """Bytes of what the ranks have averaged in this step."""
        return self.bytes_per_element * self.elements


class DdpHalf(Ddp):
    """Buckets travel as two bytes an element, by a hook: torch's fp16_compress_hook, or our bfloat16_hook, as torch's
    bf16_compress_hook refuses to run without CUDA."""

    bytes_per_element = 2.0

    def __init__(self, model: GPT, transport: TorchTransport, hook: Callable):
        super().__init__(model, transport)
        self.ddp.register_comm_hook(transport.group, hook)


class DdpPowerSgd(Ddp):
    """torch's powerSGD_hook, in float32 for two steps (the fewest it allows) and in low rank from then on.

    In one bucket: of several, each launches its second and third collective when the one before is done, over Gloo in
    another order on every rank, and on 4 hosts they waited for each other for ever (torch 2.13).
    """

    bucket_cap_mb = 1e4

    def __init__(self, model: GPT, transport: TorchTransport, rank: int):
        super().__init__(model, transport)
        self.state = powerSGD_hook.PowerSGDState(transport.group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self.ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        self._counted = 0

    def _payload(self) -> float:
        counted, self._counted = self._counted, self.state.total_numel_after_compression
        return 4.0 * (self._counted - counted)


class Fsdp(Local):
    """FSDP2 over all ranks as ZeRO-2, gathering, computing and reducing in bfloat16, then AdamW.

    A host without instructions for bfloat16 computes many times longer in it than in float32.
    """

    def __init__(self, model: GPT, transport: TorchTransport):
        torch_versions.require_fsdp2()
        self.transport, self.elements = transport, sum(p.numel() for p in model.parameters())
        self.model = WithLoss(model)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = init_device_mesh("cpu", (transport.world_size,))
        for block in fsdp.blocks_of(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=False, mp_policy=half)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False, mp_policy=half)
        self.optimizer = AdamW(decay_groups(model, WEIGHT_DECAY), lr=LR)

    def backward(self, windows: Tensor) -> None:
        self.model(windows).backward()
        self.transport.sent_bytes += round((1 - 1 / self.transport.world_size) * (2 + 2) * self.elements)


class Sharded(Local):
    """Our sharded form: signs to the owners, differences back. Replicas are float32 here, as the others' parameters."""

    def __init__(self, model: GPT, transport: Transport, differences: str, stage: int):
        self.model = model
        groups = decay_groups(model, WEIGHT_DECAY)
        options = {"differences": differences, "stage": stage, "warmup_steps": 0}
        self.optimizer = ShardedOnebitAdam(groups, lr=LR, transport=transport, **options)


class Onebit(Local):
    """One of ours, as in the README: the plain model, whose optimizer does the traffic."""

    def __init__(
        self, model: GPT, transport: Transport, make: Callable[..., CompressedOptimizer], options: dict[str, int]
    ):
        self.model = model
        self.optimizer = make(
            decay_groups(model, WEIGHT_DECAY), lr=LR, transport=transport, compression="always", **options
        )
        if isinstance(self.optimizer.rule, AdamRule):
            skip_warmup(self.optimizer.rule)

    def settle(self) -> None:
        if isinstance(self.optimizer, onebit.ZeroOneAdam):
            self.optimizer.sync()  # a cycle of local steps begins


def skip_warmup(rule: AdamRule) -> None:
    """One step of warm-up and no refresh: what its steps in "auto" are after warm-up, from the second on."""
    rule.schedule = DenseSteps("auto", warmup=1, refreshes=VarianceUpdates(1, var_freeze_step=0))


@dataclass(frozen=True)
class Method:
    """make(model, transport). alone: the same without traffic. warmup: steps before the measured ones; cycle: measured
    steps come in so many, of which one differs from the others. dtype: what it computes in."""

    make: Callable[[GPT, TorchTransport], Local]
    alone: Callable[[GPT, Transport], Local] = Local
    warmup: int = 1
    cycle: int = 1
    dtype: torch.dtype = torch.float32


def _ours(make: Callable[..., CompressedOptimizer], warmup: int, cycle: int = 1, **options: int) -> Method:
    contender = partial(Onebit, make=make, options=options)
    return Method(contender, contender, warmup, cycle)


def _sharded(differences: str) -> Method:
    # Stage 2 frees gradients in backward, the update alone has none to free: without traffic it is measured as stage 1.
    make, alone = (partial(Sharded, differences=differences, stage=stage) for stage in (2, 1))
    return Method(make, alone)


# Ours: one step in which gradients travel, then one uncounted in its final form. With local steps: their number doubles
# with every step until it is H.
METHODS = {
    "ddp-fp32": Method(Ddp),
    "ddp-bf16": Method(partial(DdpHalf, hook=bfloat16_hook)),
    "ddp-fp16": Method(partial(DdpHalf, hook=default_hooks.fp16_compress_hook)),
    "ddp-powersgd": Method(partial(DdpPowerSgd, rank=1), warmup=3),
    "onebit-adam": _ours(onebit.OnebitAdam, 2),
    "zero-one-adam": _ours(onebit.ZeroOneAdam, 2, var_freeze_step=0),
    "zero-one-adam, H = 8": _ours(
        onebit.ZeroOneAdam, 3, H, var_freeze_step=0, local_step_scaler=1, local_step_clipper=H
    ),
    "onebit-lamb": _ours(onebit.OnebitLamb, 2),
    "fsdp2-bf16": Method(Fsdp, dtype=torch.bfloat16),
    "sharded int4": _sharded("int4"),
    "sharded sign": _sharded("sign"),
}

# ---------------------------------------------------------------- measuring


def run(method: Method, args: argparse.Namespace, transport: TorchTransport) -> dict:
    """What `measure` says of whole steps, per step, with compute_seconds and local_seconds. All ranks."""
    windows = _windows(args, transport.rank)
    alone = _measure_alone(method, windows, args, transport)
    gc.collect()
    contender = method.make(build_model(args.size, seed=0), transport)
    return _measure_steps(method, contender, windows, args, transport) | alone


def _windows(args: argparse.Namespace, rank: int) -> Tensor:
    """Random bytes, [B, T+1]."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCABULARY, (args.batch, SIZES[args.size].context + 1), generator=generator)


def _measure_steps(
    method: Method, contender: Local, windows: Tensor, args: argparse.Namespace, transport: TorchTransport
) -> dict:
    def step(windows: Tensor = windows) -> None:
        contender.backward(windows)
        contender.update()
        contender.optimizer.zero_grad()

    def warm() -> None:
        for _ in range(method.warmup):
            step(windows[:1, :9])  # all of the traffic, little of the work
        contender.settle()

    def cycle() -> None:
        for _ in range(method.cycle):
            step()

    repeats = max(1, args.steps // method.cycle)
    measured = measure(transport, cycle, repeats, warm=warm, budget_s=args.budget_s)
    if skipped := getattr(getattr(contender.optimizer, "stats", None), "skipped_steps", 0):
        raise RuntimeError(f"{skipped} steps were skipped, so that the times are not those of steps")
    per_step = {key: None if measured[key] is None else measured[key] / method.cycle for key in _BYTES}
    return {"seconds": [s / method.cycle for s in measured["seconds"]], **per_step}


_BYTES = ("sent_bytes", "wire_bytes", "wire_payload")


def _measure_alone(method: Method, windows: Tensor, args: argparse.Namespace, transport: TorchTransport) -> dict:
    """Forward and backward, then the update, on every rank at once and with nothing sent."""
    model = build_model(args.size, seed=0)

    def compute() -> None:
        model.to(method.dtype).zero_grad()
        model.loss(windows).backward()

    computing = measure(transport, compute, args.alone_steps)
    model.float().zero_grad()
    model.loss(windows).backward()
    contender = method.alone(model, Silent(transport.rank, transport.world_size))

    def updates(steps: int) -> None:
        for _ in range(steps):
            contender.update()

    def warm() -> None:
        updates(method.warmup)
        contender.settle()

    updating = measure(transport, lambda: updates(method.cycle), args.alone_steps, warm=warm)
    local_s = [s / method.cycle for s in updating["seconds"]]
    return {"compute_seconds": computing["seconds"], "local_seconds": local_s}


# ---------------------------------------------------------------- command line


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py step", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--worker", action="store_true", required=True, help="this process is one rank; all ranks say the same")
    add("--method", nargs="+", choices=METHODS, required=True, help="measured one after another")
    add("--size", choices=SIZES, default="25m-short")
    add("--batch", type=int, default=1, help="sequences per rank and step")
    add("--steps", type=int, default=5, help="measured ones, at most; at least one cycle of local steps")
    add("--budget-s", type=float, default=float("inf"), help="no step is started after so many measured seconds")
    add("--alone-steps", type=int, default=2, help="measured ones without traffic")
    add("--out", type=Path, required=True, metavar="FILE", help="what rank 0 writes after each method, as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    owner = comm.init("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // owner.world_size))
    transport, results = SameStart(), {}
    for name in args.method:
        results[name] = run(METHODS[name], args, transport)
        gc.collect()
        if owner.rank == 0:
            args.out.write_text(json.dumps(results) + "\n")
    owner.close()
