"""How a benchmark starts its ranks: as the same command, in other processes."""

from __future__ import annotations

import sys
from pathlib import Path

COMMAND = str(Path(__file__).resolve().parents[1] / "bench.py")


def words(name: str, *flags: str) -> list[str]:
    """The command line of the benchmark `name` for this Python."""
    return [sys.executable, COMMAND, name, *flags]
