"""Peak memory of offloaded training against `onebit plan`, and the largest model under a memory limit, beside resident.

    python scripts/bench.py offload --folder /nvme --record scripts/records/offload_2026-11.md

Each case is a process of its own that takes three steps of a stack of square layers in bfloat16. Where this is root on
cgroup v1 it runs under a limit on its memory, page cache included; elsewhere the limit is left out, and the record says
so. Peak: the resident set's high-water mark less what the process held before it made the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from reports import publish, table
from torch import nn

from bench.command import EndedBadly, apart
from bench.limits import KILLED, can_limit, forget_peak, limited, resident_bytes
from bench.record import here, parser_of
from onebit import zero
from onebit.zero.offload.plan import OffloadRun, plan

WIDTH, STEPS, CHUNK_MB = 1024, 3, 12.0  # a chunk: a layer, whose state is 12 bytes per parameter
SIZES = (64, 96, 128)  # layers: 67, 101 and 134 million parameters
QUICK = (2,)
FILE_BYTES = {"gradients": 14, "full": 16}  # per parameter: master and moments, a gradient, a parameter
DISK_SHARE = 0.85  # of what is free, that one case may take


@dataclass(frozen=True)
class Case:
    """mode: of Offload, or "resident": torch's AdamW on float32 masters. to: "cpu" or "files". limit_mb: 0: none."""

    mode: str
    to: str
    layers: int
    limit_mb: int = 0

    @property
    def params(self) -> int:
        return self.layers * WIDTH * WIDTH


def empty_stack(layers: int) -> nn.Sequential:
    """Square layers in bfloat16, without values."""
    made = [nn.Linear(WIDTH, WIDTH, bias=False, device="meta", dtype=torch.bfloat16) for _ in range(layers)]
    return nn.Sequential(*made)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """The same values, wherever the parameters lie."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.normal_(std=WIDTH**-0.5)


def stack(layers: int) -> nn.Sequential:
    """Square layers in bfloat16, made without a float32 copy of them."""
    model = empty_stack(layers).to_empty(device="cpu")
    fill(model)
    return model


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
    """The loss of the last."""
    loss = torch.zeros(())
    for step in range(count):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def worker(args: argparse.Namespace) -> dict:
    """What one process measures."""
    case, folder = Case(**args.case), Path(args.folder)
    torch.set_num_threads(1)
    warm = stack(1)  # the libraries of a first step are no part of the model's memory
    offload = zero.Offload(warm, torch.optim.AdamW, "gradients", folder, chunk_mb=CHUNK_MB)
    steps_of(warm, offload, 1)
    offload.close()
    del warm, offload
    gc.collect()
    forget_peak()
    before, _ = resident_bytes()
    mode = "none" if case.mode == "resident" else case.mode
    is_full = mode == "full"  # whose parameters are never all in memory
    model = empty_stack(case.layers) if is_full else stack(case.layers)
    to = folder if case.to == "files" else "cpu"
    options = {"chunk_mb": CHUNK_MB, "fill": fill if is_full else None}
    optimizer = zero.Offload(model, lambda ps: torch.optim.AdamW(ps, lr=1e-4), mode, to, **options)
    steps_of(model, optimizer, 1)
    begin = time.perf_counter()
    loss = steps_of(model, optimizer, STEPS - 1)
    seconds = (time.perf_counter() - begin) / (STEPS - 1)
    return {
        "peak": resident_bytes()[1] - before,
        "before": before,
        "seconds": seconds,
        "waited_s": optimizer.stats.wait_s / STEPS,
        "loss": loss,
    }


def planned(case: Case) -> float:
    """Bytes of host memory."""
    run = OffloadRun(case.params, dtype="bf16", largest=WIDTH * WIDTH, chunk_mb=CHUNK_MB, modules=case.layers)
    mode = "none" if case.mode == "resident" else case.mode
    return plan(run, mode, "-" if mode == "none" else case.to).host_bytes


def measure(case: Case, folder: Path) -> dict:
    """Runs a case in a process of its own. "killed": by the limit; "limited": whether there was one."""
    has_limit = case.limit_mb > 0 and can_limit()
    facts = asdict(case) | {"params": case.params, "planned": planned(case), "limited": has_limit}
    env = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system
    with limited(case.limit_mb) as enter:
        try:
            found = apart(worker, argparse.Namespace(case=asdict(case), folder=folder), env=env, enter=enter)
        except EndedBadly as error:
            if error.status == KILLED:
                return facts | {"killed": True}
            raise
    return facts | {"killed": False} | found


def cases(sizes: Sequence[int], limits_mb: Sequence[int], disk_bytes: float = math.inf) -> list[Case]:
    """Plan against peak at every size, then resident and offloaded under each limit, as large as the disk bears."""
    made = [Case(mode, "files", layers) for layers in sizes for mode in ("state", "gradients", "full")]
    made += [Case(mode, "cpu", layers) for mode in ("gradients", "full") for layers in sizes[:2]]
    for limit_mb in limits_mb:
        too_many = limit_mb // 16  # resident training takes 16 bytes per parameter: all of the limit
        fits = too_many * 2 // 3
        made += [Case("resident", "cpu", layers, limit_mb) for layers in (fits, too_many)]
        for mode, more in (("gradients", 4), ("full", 6)):
            has_room = DISK_SHARE * disk_bytes / (FILE_BYTES[mode] * WIDTH * WIDTH)
            made.append(Case(mode, "files", int(min(more * too_many, has_room)), limit_mb))
    return made


HEADS = (
    "mode", "to", "million parameters", "limit, MB", "planned, MB", "peak, MB", "off by, %", "s/step",
    "waited, s/step",
)  # fmt: skip


def report(lines: Sequence[dict]) -> str:
    """In Markdown."""
    rows = []
    for x in lines:
        cells = [x["mode"], x["to"], f"{x['params'] / 1e6:.0f}", x["limit_mb"] or "-", f"{x['planned'] / 1e6:.0f}"]
        if x["killed"]:
            cells += ["killed", "", "", ""]
        else:
            cells += [f"{x['peak'] / 1e6:.0f}", f"{100 * (x['peak'] / x['planned'] - 1):+.1f}"]
            cells += [f"{x['seconds']:.1f}", f"{x['waited_s']:.1f}"]
        rows.append(cells)
    how = "" if all(x["limited"] for x in lines if x["limit_mb"]) else "No limit could be set here. "
    return f"""# Offload: peak memory, planned and measured

{here()}

{how}AdamW on bfloat16 parameters with float32 masters, chunks of {CHUNK_MB:g} MB. Planned and peak: beside what the
process held before the model. Limit: of a memory cgroup, for all of the process. "resident" is mode none.
MALLOC_MMAP_THRESHOLD_=1000000: without it glibc keeps freed gradients for later.

{table(HEADS, rows, names=2)}
"""


def main(argv: Sequence[str]) -> None:
    parser = parser_of("offload", __doc__)
    add = parser.add_argument
    add("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    limits = "for the largest model, each in turn (default: 1536; 6144 takes 36 GB of the disk)"
    add("--limit-mb", type=int, nargs="*", default=[1536], metavar="MB", help=limits)
    add("--layers", type=int, nargs="*", default=SIZES, metavar="N", help="without a limit (default: %(default)s)")
    add("--quick", action="store_true", help="one tiny size without a limit")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        sizes, limits_mb = (QUICK, []) if args.quick else (args.layers, args.limit_mb)
        lines = []
        for case in cases(sizes, limits_mb, shutil.disk_usage(folder).free):
            lines.append(measure(case, folder))
            print(json.dumps(lines[-1]), flush=True)
    publish(args, report(lines))
