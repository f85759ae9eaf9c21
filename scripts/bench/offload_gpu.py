"""A language model too large for its GPU, trained in mode "full": seconds and peaks against their floors.

    python scripts/bench.py offload_gpu --params 13e9 --device-gb 32 --optimizer SGD

The model is made on "meta", filled in the store, and trained under activation checkpointing with the card capped. The
floors: the step's bytes over PCIe as measured here with page-locked memory, and the same blocks computed where all of
them are one block that stays on the device. `--device cpu --params 3e6 --width 128 --tokens 256` rehearses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from reports import publish, table
from torch import nn
from torch.utils.checkpoint import checkpoint
from train.model import GPT, VOCABULARY, Block, ModelSize

import onebit
from bench.limits import resident_bytes
from bench.record import here, parser_of
from onebit import zero
from onebit.zero.offload.plan import OffloadRun, plan

HEAD_WIDTH = 128
COPIED = 256 << 20  # bytes of a measured copy
STATE_BYTES = {"SGD": 0, "HostAdam": 3, "AdamW": 8}  # of a parameter, beside its master
MAKES: dict[str, Callable] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-5),
    "HostAdam": partial(onebit.HostAdam, lr=1e-5, moment_dtype=torch.bfloat16, variance_dtype=torch.uint8),
}


def shaped(params: float, width: int, tokens: int) -> ModelSize:
    """As many layers of this width as come closest."""
    layers = max(1, round(params / (12 * width * width)))
    return ModelSize(layers, width, max(1, width // HEAD_WIDTH), tokens)


def checkpointed(block: nn.Module) -> None:
    """Keep a block's input alone for backward."""
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def empty_model(size: ModelSize) -> GPT:
    with torch.device("meta"):
        model = GPT(size).bfloat16()
    for block in model.blocks:
        checkpointed(block)
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    for p in model.parameters():
        nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def timed(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Median seconds, the first time left out."""
    found = []
    for _ in range(times + 1):
        wait_for(device)
        begin = time.perf_counter()
        work()
        wait_for(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def copied_per_s(device: torch.device) -> tuple[float, float]:
    """Bytes a second to the device and from it, page-locked; infinite where there is nothing to cross."""
    if device.type == "cpu":
        return float("inf"), float("inf")
    here = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    to, back = (
        timed(device, lambda a=a, b=b: a.copy_(b, non_blocking=True), 5) for a, b in ((there, here), (here, there))
    )
    return COPIED / to, COPIED / back


def computed_s(size: ModelSize, device: torch.device) -> float:
    """Of all layers forward and backward, from one that stays on the device."""
    block = Block(size).to(device, torch.bfloat16)
    checkpointed(block)
    x = torch.randn(1, size.context, size.width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def work() -> None:
        block(x).backward(x.detach())
        block.zero_grad()

    return size.layers * timed(device, work, 3)


def measure(args: argparse.Namespace) -> dict:
    device = torch.device(args.device)
    size = shaped(args.params, args.width, args.tokens)
    torch.manual_seed(0)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.device_gb * 1e9 / total), device)
    to, back = copied_per_s(device)
    computed = computed_s(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before, _ = resident_bytes()
    begin = time.perf_counter()
    model = empty_model(size)
    numel = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    place = args.folder if args.folder is not None else "cpu"
    options = {"chunk_mb": args.chunk_mb, "device": device, "fill": fill}
    optimizer = zero.Offload(model, MAKES[args.optimizer], "full", place, **options)
    filled_s = time.perf_counter() - begin
    passes, steps, losses = [], [], []
    windows = torch.randint(VOCABULARY, [1, size.context + 1], generator=torch.Generator().manual_seed(0))
    for step in range(args.steps):
        begin = time.perf_counter()
        loss = model.loss(windows.to(device))
        loss.backward()
        wait_for(device)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        passes.append(middle - begin)
        steps.append(time.perf_counter() - middle)
        losses.append(float(loss.detach()))
        print(
            f"step {step}: {passes[-1]:.2f} s of passes, {steps[-1]:.2f} s of step, loss {losses[-1]:.3f}", flush=True
        )
    run = OffloadRun(
        numel, device_bytes=args.device_gb * 1e9, tokens=size.context, largest=largest, chunk_mb=args.chunk_mb
    )
    planned = plan(run, "full", "cpu" if args.folder is None else "files")
    bytes_there, bytes_back = 4 * numel, 2 * numel  # bfloat16: read for forward and for backward; gradients
    return {
        "params": numel,
        "layers": size.layers,
        "width": size.width,
        "tokens": size.context,
        "optimizer": args.optimizer,
        "to": "files" if args.folder else "cpu",
        "filled_s": filled_s,
        "passes_s": statistics.median(passes[1:] or passes),
        "step_s": statistics.median(steps[1:] or steps),
        "waited_s": optimizer.stats.wait_s / args.steps,
        "computed_s": computed,
        "pcie_gb_per_s": [to / 1e9, back / 1e9],
        "pcie_s": [bytes_there / to, bytes_back / back],
        "device_peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "device_planned": planned.device_bytes,
        "host_peak": resident_bytes()[1] - before,
        "host_planned": planned.host_bytes + (STATE_BYTES[args.optimizer] - STATE_BYTES["AdamW"]) * numel,
        "losses": losses,
    }


def report(x: dict, device: str) -> str:
    """In Markdown."""
    there, back = x["pcie_s"]
    floor = max(x["computed_s"], there, back)
    rows = {
        "forward and backward": x["passes_s"],
        "the same, computed without copies": x["computed_s"],
        f"parameters over PCIe, twice, at {x['pcie_gb_per_s'][0]:.1f} GB/s": there,
        f"gradients over PCIe at {x['pcie_gb_per_s'][1]:.1f} GB/s": back,
        "the optimizer's step, on the host": x["step_s"],
        "waiting for copies and files": x["waited_s"],
    }
    return f"""# Offload on a GPU

{here()}

{device}.

{x["params"] / 1e9:.2f} billion parameters in bfloat16 ({x["layers"]} layers of {x["width"]}), {x["tokens"]} tokens,
{x["optimizer"]}, mode full in {"files" if x["to"] == "files" else "host memory"}. Made and filled in
{x["filled_s"]:.0f} s.

{table(("what", "seconds of a step"), [(name, f"{seconds:.2f}") for name, seconds in rows.items()])}

Forward and backward take {x["passes_s"] / floor:.2f} times the longest of their floors.

| | peak, GB | planned, GB |
| --- | ---: | ---: |
| device, with activations | {x["device_peak"] / 1e9:.2f} | {x["device_planned"] / 1e9:.2f}, without them |
| host, beside the process | {x["host_peak"] / 1e9:.2f} | {x["host_planned"] / 1e9:.2f} |

Losses: {", ".join(f"{loss:.3f}" for loss in x["losses"])}.
"""


def main(argv: Sequence[str]) -> None:
    parser = parser_of("offload_gpu", __doc__)
    parser.add_argument("--params", type=float, default=13e9)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--optimizer", choices=list(MAKES), default="SGD", help="8, 11 or 16 bytes a parameter")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--device-gb", type=float, default=32.0, help="the card is capped to so much")
    parser.add_argument("--chunk-mb", type=float, default=64.0)
    parser.add_argument("--folder", type=Path, help="on the disk to use (default: host memory)")
    args = parser.parse_args(argv)
    found = measure(args)
    print(json.dumps(found))
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a rehearsal on the host"
    publish(args, report(found, name))
