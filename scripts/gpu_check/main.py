"""Everything that only a machine with a GPU can show: kernels bit for bit, optimizers, GB/s against a copy.

    python scripts/gpu_check.py --record scripts/records/gpu_<device>_<yyyy-mm>.md

1. Every kernel for CUDA tensors gives the reference's bytes and floats, those of the reference on the host: sign
   frames, int8 frames, and the fused steps over sign frames.
2. Each optimizer, in fp32 and bf16 on simulated ranks, ends with the same bits on all ranks and with every kernel.
3. Each kernel in GB/s beside a device-to-device copy, in turn, so that whatever disturbs one disturbs both.
4. A whole model, `--model` elements in a transformer's shapes: encode, then decode and update, against the same in
   torch, operation by operation.
5. How often the host waits for the device in a compressed step of each optimizer, from a profile.

Exits with 1 where something differs, and at once where there is no GPU. `--rehearse` runs 1 and 2 on
the host in Triton's interpreter (set TRITON_INTERPRET=1), and the others for their form only.

Shape legend: K rows, N elements, J blocks, B bytes, W ranks.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import time
from collections.abc import Sequence

import torch
from provenance import record_path, revision, write_record

from gpu_check.attention import attention_checks, attention_table
from gpu_check.checks import Outcome, kernel_checks, optimizer_checks
from gpu_check.speed import TARGET, model_table, speed_table
from gpu_check.waits import waits_table
from onebit.comm import kernels

KERNELS = tuple(name for name, backend in kernels.BACKENDS.items() if backend.SERVES == "cuda")


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


def record(argv: Sequence[str], args: argparse.Namespace, device: torch.device) -> tuple[str, int]:
    """The text, and how many checks failed."""
    names = args.kernels or (["triton"] if args.rehearse else list(KERNELS))
    outcomes = [Outcome(f"{name} is there", why_not_there(name, device)) for name in names]
    names = [name for name in names if not why_not_there(name, device)]
    outcomes += kernel_checks(names, device, args.blocks, args.sizes)
    outcomes += optimizer_checks(names, device, args.block, args.steps)
    outcomes += attention_checks(device, 300 if args.rehearse else 1000)
    failed = [o for o in outcomes if o.problem]
    table = speed_table(names, device, args.elements, args.block, args.repeats)
    model = model_table(names, device, args.model, args.block, max(1, args.repeats // 5))
    waits = waits_table(names, device, args.block, 1 if args.rehearse else 5)
    attention = attention_table(device, args.lengths, max(1, args.repeats // 5))
    listed = "\n".join(f"- FAILED {o.name}: {o.problem}" if o.problem else f"- {o.name}" for o in outcomes)
    text = f"""# The kernels on a GPU

- command: `python scripts/gpu_check.py {shlex.join(argv)}`
- commit {revision()}, {time.strftime("%Y-%m-%d")}; Python {platform.python_version()}, torch {torch.__version__}
- {device_name(device)}
- kernels: {kernels.describe()}

## Speed

{args.elements} elements, blocks of {args.block}; {args.repeats} repetitions of operation and copy in turn, timed with
events on the device; median (quartiles). GB/s counts the floats and frames a call must move; the copy moves 8 bytes per
element. The target is {TARGET} of the copy; "(below)": missed.

{chr(10).join(table)}

## A whole model

One rank: `encode_momentum` over all parameters, then `apply` from its frame; {max(1, args.repeats // 5)} repetitions.
The reference is the same in torch, operation by operation.

{chr(10).join(model)}

## Waiting

Calls in which the host waits for the device, in `step()`, of one rank in the compressed phase; 5 steps of a profile.

{chr(10).join(waits)}

## Sparse attention

One sequence, 8 heads of 64, bfloat16, forward and backward; dense is scaled_dot_product_attention, causal, which torch
runs by FlashAttention. The layouts are those of `python scripts/bench.py sparse_attention`; on the host flex has no
backward pass and is left out.

{chr(10).join(attention)}

## Checks: {len(outcomes) - len(failed)} of {len(outcomes)} held

Bit for bit against the reference on the host (kernels), or against the same run with the reference kernel and between
the ranks (optimizers; `ZeroOneAdam` not between ranks, which may end between two synchronizations). Sparse attention:
against dense attention in float64.

{listed}
"""
    return text, len(failed)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [0, 1, 1000, 100_000, 3_000_000]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="elements per row of the checks")
    blocks = [64, 192, 256, 512, 1024]
    parser.add_argument("--blocks", type=int, nargs="+", default=blocks, help="elements per scale in the checks")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help="which (default: all; rehearsed: triton)")
    parser.add_argument("--model", type=int, default=340_000_000, help="elements of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each optimizer (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the speed table (default: %(default)s)")
    parser.add_argument("--block", type=int, default=256, help="elements per scale elsewhere (default: %(default)s)")
    lengths = [4096, 16384, 65536, 131072]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens of the attention table")
    parser.add_argument("--repeats", type=int, default=50, help="of the speed table (default: %(default)s)")
    parser.add_argument("--record", type=record_path, metavar="FILE", help="also write the text there, in Markdown")
    parser.add_argument("--rehearse", action="store_true", help="on host tensors, in Triton's interpreter")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if not args.rehearse and not torch.cuda.is_available():
        print(f"gpu_check needs a CUDA device; torch {torch.__version__} sees none. --rehearse tries it out without.")
        return 2
    text, failed = record(argv, args, torch.device("cpu" if args.rehearse else "cuda"))
    print(text)
    if args.record is not None:
        write_record(args.record, text)
    return 1 if failed else 0
