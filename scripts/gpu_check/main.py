"""Everything that only a machine with a GPU can show: bits, transports, speed against a copy, waits.

    python scripts/gpu_check.py --record scripts/records/gpu_<device>_<yyyy-mm>.md

Sections are run in the order of `SECTIONS`, each with its checks and its table. What a section has found is kept in a
file of JSON lines beside the record, and the record is written anew behind each: a command that is cut off goes on
where it was, where the commit and the GPU are the same. `--sections` names some, `--again` runs finished ones once
more, and `--budget` begins no section behind so many seconds.

Exits with 1 where a check fails, with 3 where sections are left, and with 2 at once where there is no GPU.
`--rehearse` runs the checks on the host, kernels in Triton's interpreter (set TRITON_INTERPRET=1), and tables for
their form only.

Shape legend: K rows, N elements, J blocks, B bytes, W ranks.
"""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from provenance import record_path, revision, write_record

from gpu_check.attention import attention_checks, attention_table
from gpu_check.checks import kernel_checks
from gpu_check.engine import engine_checks
from gpu_check.forms import form_checks, optimizer_checks
from gpu_check.members import member_checks
from gpu_check.modes import inference_checks, offload_checks
from gpu_check.section import Found, Outcome, Section, Setting, append, read, run
from gpu_check.sequence import sequence_checks
from gpu_check.speed import TARGET, model_table, speed_table
from gpu_check.steps import steps_table
from gpu_check.transports import transport_checks
from gpu_check.waits import waits_table
from onebit.comm import kernels

KERNELS = tuple(name for name, backend in kernels.BACKENDS.items() if backend.SERVES == "cuda")
SECTIONS = {
    section.name: section
    for section in (
        Section("kernels", "Kernels, bit for bit",
                "Every kernel for CUDA tensors, and the reference there, against the reference on the host: every "
                "frame, the fused steps.", checks=kernel_checks),
        Section("optimizers", "Optimizers",
                "In float32 and bfloat16 on simulated ranks: against the same run with the reference kernel, and "
                "between the ranks. Bit for bit.", checks=optimizer_checks),
        Section("speed", "Speed",
                'Repetitions of operation and copy in turn, timed with events on the device; median (quartiles). GB/s '
                'counts the floats and frames a call must move; the copy moves 8 bytes per element. The target is '
                f'{TARGET} of the copy; "(below)": missed.', table=speed_table),
        Section("model", "A whole model",
                "One rank: `encode_momentum` over all parameters, then `apply` from its frame. The reference is the "
                "same in torch, operation by operation.", table=model_table),
        Section("steps", "Whole steps",
                "The model of the section above, on rank 0 of two whose traffic is a copy within the device: what an "
                "optimizer costs beside torch's AdamW. Median (quartiles).", table=steps_table),
        Section("waits", "Waiting",
                "Calls in which the host waits for the device, in `step()`, of one rank in the compressed phase; 5 "
                "steps of a profile.", table=waits_table),
        Section("forms", "Other optimizers and forms",
                "Three simulated ranks: the ranks' bits, and the loss beside the host's.", checks=form_checks),
        Section("members", "Members that come and go",
                "Of three simulated members one is lost in a step as another comes: the members' bits.",
                checks=member_checks),
        Section("transports", "Transports",
                "Two processes on one GPU end in the bits of two simulated ranks.", checks=transport_checks),
        Section("engine", "The engine",
                "Two replicas of two ranks, all on one GPU, over NCCL: the ranks' bits, and the loss beside the "
                "host's.", checks=engine_checks),
        Section("attention", "Sparse attention",
                "Against dense attention in float64; on the host flex has no backward pass.", checks=attention_checks),
        Section("attention_speed", "Sparse attention in time",
                "One sequence, 8 heads of 64, bfloat16, forward and backward; dense is scaled_dot_product_attention, "
                "causal, which torch runs by FlashAttention. The layouts are those of `python scripts/bench.py "
                "sparse_attention`; on the host flex is left out.", table=attention_table),
        Section("sequence", "Split sequences",
                "Simulated ranks, on one level and two, against dense attention in float64: output and gradients.",
                checks=sequence_checks),
        Section("offload", "Offload",
                'Modes and stores against mode "state" in host memory, bit for bit.', checks=offload_checks),
        Section("inference", "Inference",
                "Logits beside the host's in float32; greedy tokens of rows alone and in a batch.",
                checks=inference_checks),
    )
}  # fmt: skip


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a rehearsal on the host ({platform.machine()}): no number here says anything about a GPU"
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}.{properties.minor}"
    return f"{properties.name}, {memory}; CUDA {torch.version.cuda}"


def why_not_there(name: str, device: torch.device) -> str:
    try:
        kernels.select(name, device)
    except ImportError as error:
        return str(error)
    return ""


def report(argv: Sequence[str], found: Sequence[Found], absent: Sequence[Outcome], device: str) -> str:
    """The record: what was found, in the order of `SECTIONS`, and what was not looked for."""
    of = {each.section: each for each in found}
    total, failed = sum(len(each.outcomes) for each in found) + len(absent), sum(len(each.failed) for each in found)
    revisions = ", ".join(dict.fromkeys(each.revision for each in found))
    left = [name for name in SECTIONS if name not in of]
    text = [
        "# On a GPU\n",
        f"- command: `python scripts/gpu_check.py {shlex.join(argv)}`",
        f"- commit {revisions}, {time.strftime('%Y-%m-%d')}; Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        f"- {device}",
        f"- kernels: {kernels.describe()}",
        f"- checks: {total - failed - len(absent)} of {total} held",
        f"- sections that were not run: {', '.join(left) or 'none'}\n",
        *(f"- FAILED {each.name}: {each.problem}" for each in absent),
    ]
    for name, section in SECTIONS.items():
        if name in of:
            mine = of[name]
            text += [f"\n## {section.title}\n", f"{section.about} {mine.seconds:.0f} s.\n"]
            text += [*mine.table, ""] if mine.table else []
            if mine.outcomes:
                text.append(f"{len(mine.outcomes) - len(mine.failed)} of {len(mine.outcomes)} checks held.\n")
            text += [f"- FAILED {o.name}: {o.problem}" if o.problem else f"- {o.name}" for o in mine.outcomes]
    return "\n".join(text) + "\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    add("--again", action="store_true", help="run sections that are finished once more")
    add("--budget", type=float, default=540.0, metavar="SECONDS", help="begin no section later (default: %(default)s)")
    sizes = [0, 1, 1000, 100_000, 3_000_000]
    add("--sizes", type=int, nargs="+", default=sizes, help="elements per row of the checks")
    blocks = [64, 192, 256, 512, 1024]
    add("--blocks", type=int, nargs="+", default=blocks, help="elements per scale in the checks")
    add("--kernels", nargs="+", choices=KERNELS, help="which (default: all; rehearsed: triton)")
    add("--model", type=int, default=340_000_000, help="elements of the model (default: %(default)s)")
    add("--steps", type=int, default=30, help="of each optimizer (default: %(default)s)")
    add("--elements", type=int, default=100_000_000, help="of the speed table (default: %(default)s)")
    add("--block", type=int, default=256, help="elements per scale elsewhere (default: %(default)s)")
    lengths = [4096, 16384, 65536, 131072]
    add("--lengths", type=int, nargs="+", default=lengths, help="tokens of the attention table")
    add("--repeats", type=int, default=50, help="of the speed table (default: %(default)s)")
    add("--record", type=record_path, metavar="FILE", help="also write the text there, in Markdown")
    add("--rehearse", action="store_true", help="on host tensors, in Triton's interpreter")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if not args.rehearse and not torch.cuda.is_available():
        print(f"gpu_check needs a CUDA device; torch {torch.__version__} sees none. --rehearse tries it out without.")
        return 2
    began, device = time.monotonic(), torch.device("cpu" if args.rehearse else "cuda")
    named = device_name(device)
    names = args.kernels or (["triton"] if args.rehearse else list(KERNELS))
    absent = [Outcome(f"{name} is there", why) for name in names if (why := why_not_there(name, device))]
    there = [name for name in names if not why_not_there(name, device)]
    options = {
        name: getattr(args, name)
        for name in ("block", "blocks", "sizes", "steps", "elements", "model", "lengths", "repeats")
    }
    setting = Setting(device, there, **options)
    results = None if args.record is None else args.record.with_suffix(".jsonl")
    found = _finished(results, named)
    for name in args.sections:
        if name in found and not args.again:
            continue
        if time.monotonic() - began > args.budget:
            print(f"{args.budget:g} s have passed; {name} and what follows are left for the same command again")
            break
        print(f"{name} ...", flush=True)
        with _errors_alone():
            found[name] = run(SECTIONS[name], setting, named)
        print(f"{name}: {len(found[name].failed)} failed, {found[name].seconds:.0f} s", flush=True)
        if results is not None:
            append(results, found[name])
            write_record(args.record, report(argv, list(found.values()), absent, named))
    print(report(argv, list(found.values()), absent, named))
    if absent or any(each.failed for each in found.values()):
        return 1
    return 3 if any(name not in found for name in args.sections) else 0


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Of onebit's log: warnings are of runs that do what a check wants."""
    log = logging.getLogger("onebit")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _finished(results: Path | None, device: str) -> dict[str, Found]:
    """Those of this commit on this device."""
    lines = [] if results is None else read(results)
    return {each.section: each for each in lines if (each.device, each.revision) == (device, revision())}
