"""What the benchmarks' records share: a file of JSON lines that grows, and the machine, versions and command in it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from provenance import ROOT, refuse_dirty_tree, revision

from bench.timing import cpu_name
from onebit.comm import kernels


def read_lines(path: Path) -> list[dict]:
    """The records of a file of JSON lines; none where there is no file. Lines cut short by a crash are passed over."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append(path: Path, *records: dict) -> None:
    """Add lines to a file. Raises DirtyTreeError where it is a record and the tree is no commit."""
    refuse_dirty_tree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n" if file.tell() else "")  # the last line may have been cut short
        file.write("".join(json.dumps(record) + "\n" for record in records))


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
