"""What this process holds in memory, and processes under a limit on it, page cache included: cgroup v1, by root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory")
KILLED = -9
"""How a process ends that wants more."""


def resident_bytes() -> tuple[int, int]:
    """(now, at most since `forget_peak`) of this process."""
    status = Path("/proc/self/status").read_text()
    now, peak = (int(status.split(name)[1].split()[0]) * 1024 for name in ("VmRSS:", "VmHWM:"))
    return now, peak


def forget_peak() -> None:
    """Let the high-water mark begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def can_limit() -> bool:
    """Whether this process may set limits."""
    return os.access(CGROUP / "cgroup.procs", os.W_OK)


@contextmanager
def limited(limit_mb: int, name: str = "") -> Iterator[Callable[[], None]]:
    """A limit on all that enter it, which is what `subprocess` takes as `preexec_fn`.

    limit_mb: 0, or where none can be set: there is none. name: if one process sets several.
    """
    if limit_mb == 0 or not can_limit():
        yield lambda: None
        return
    group = CGROUP / f"onebit-{os.getpid()}{name}"
    group.mkdir(exist_ok=True)
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_mb << 20))
        yield lambda: _enter(group)
    finally:
        group.rmdir()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
