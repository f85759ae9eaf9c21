"""What the benchmarks' records share: the machine, versions and command in them."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone

import torch
from provenance import ROOT, add_record, revision

from bench.timing import cpu_name
from onebit.comm import kernels


def parser_of(name: str, about: str) -> argparse.ArgumentParser:
    """With --record. about: the benchmark's docstring, whose first paragraph is shown."""
    parser = argparse.ArgumentParser(prog=f"bench.py {name}", description=about.split("\n\n")[0])
    add_record(parser)
    return parser


def describe_machine(**more: object) -> dict:
    """A line on where, when, by what command and from which versions the lines after it come."""
    return {
        "what": "machine",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory_bytes_per_s": memory_bytes_per_s(),
        "kernels": kernels.describe(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "revision": revision(),
        **more,
    }


def here() -> str:
    """That line as a sentence of a report."""
    return _machine(describe_machine())


def memory_bytes_per_s(elements: int = 25_000_000, repeats: int = 5) -> float:
    """What passes between all cores and memory in torch.add(out=), the best of a few.

    16 bytes per element: a processor reads what it is going to overwrite. Limits that leave that out are on the safe
    side.
    """
    a, b, out = torch.ones(elements), torch.ones(elements), torch.zeros(elements)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.add(a, b, out=out)
        seconds.append(time.perf_counter() - began)
    return 16 * elements / min(seconds)


def machines(lines: Sequence[dict]) -> list[str]:
    """A Markdown paragraph per different machine line."""
    texts = [_machine(line) for line in lines if line["what"] == "machine"]
    return [part for text in dict.fromkeys(texts) for part in (text, "")]


def _machine(line: dict) -> str:
    return (
        f"{line['date']}, revision {line['revision']}: `{line['command']}`. {line['cores']} cores ({line['cpu']}), "
        f"{line['memory_bytes_per_s'] / 1e9:.1f} GB/s of memory traffic, load {line['load']} at the start; "
        f"{line['kernels']}. torch {line['torch']}, Python {line['python']}, Linux {line['kernel']}."
    )
