"""Ranks on emulated hosts as forks: each would import torch, onebit and a benchmark anew, 3 s of CPU."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import ranks

from onebit.cli.cluster import LAUNCHERS, Cluster, Run
from onebit.cli.cluster.launchers import hosts_environment


def run_forked(
    cluster: Cluster, command: Sequence[str], *, launcher: str, ranks_per_host: int = 1, timeout_s: float
) -> Run:
    """As `Cluster.run`, of a Python script without a launcher, in the hosts' namespaces: needs root. Prints its output.

    It ends with the first rank that fails. Raises AssertionError if it takes longer than timeout_s.
    """
    assert launcher == "none"
    environment, began, forks = hosts_environment(cluster, ranks_per_host, None), time.monotonic(), {}
    try:
        for start in LAUNCHERS[launcher](cluster, list(command), ranks_per_host, environment):
            output = Path(cluster.directory, f"output of rank {len(forks)}")
            with cluster._connect(start.host) as daemon:
                credentials = daemon.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            host, *_ = struct.unpack("3i", credentials)
            forks[output] = ranks.start(*command[1:], output=output, namespaces_of=host, **start.env)
        while not any(statuses := [fork.poll() for fork in forks.values()]) and None in statuses:
            assert time.monotonic() < began + timeout_s, f"the ranks take longer than {timeout_s:g} s"
            time.sleep(0.02)
    finally:
        for name in cluster.names:
            cluster._ask(name, "end")
        print(*(output.read_text() for output in forks), sep="")
    return Run(next(filter(None, statuses), 0), time.monotonic() - began, [], "")
