"""The limit of a process's open files, which many systems set to 1,024 and let a process raise."""

from __future__ import annotations

import resource
from contextlib import suppress


def may_open(needed: int) -> int:
    """Raise this process's limit of open files to `needed`, as far as the system allows. It is never lowered.

    Returns:
        How many it may open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # the kernel's own limit may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return needed if soft == resource.RLIM_INFINITY else soft
