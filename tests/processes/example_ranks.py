"""Running the programs of scripts/examples on ranks that are already there, several in one process."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch.distributed as dist

PROGRAMS = Path(__file__).parents[2] / "scripts" / "examples"


def run_example(
    name: str, folder: Path, *options: str, around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> dict[str, dict | None]:
    """What a program wrote by AdamW ("adamw"), by onebit, and taken up again ("resumed"); None on ranks but 0.

    around: the context of each of the three.
    """
    if str(PROGRAMS) not in sys.path:
        sys.path.insert(0, str(PROGRAMS))
    folder.mkdir(parents=True, exist_ok=True)
    program, said = runpy.run_path(str(PROGRAMS / f"{name}.py")), {}
    for run in ("adamw", "onebit", "resumed"):
        out, optimizer = folder / f"{run}.json", "adamw" if run == "adamw" else "onebit"
        words = ["--optimizer", optimizer, "--folder", str(folder / optimizer), "--out", str(out), *options]
        with around():
            program["main"]([*words, *(["--resume"] if run == "resumed" else [])])
        said[run] = json.loads(out.read_text()) if dist.get_rank() == 0 else None
    return said
