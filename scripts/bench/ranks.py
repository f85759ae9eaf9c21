"""A benchmark's ranks on emulated hosts: a function of its module, called on each of them. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.command import calling
from onebit import membership
from onebit.cli.cluster import Cluster, available
from onebit.membership.network import serve

Work = Callable[[Namespace], object]


def need_hosts(hint: str = "") -> None:
    """SystemExit if this machine can emulate no hosts."""
    if (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}{hint}")


def on_hosts(
    work: Work, args: Namespace, *, hosts: int, rate: str, ranks_per_host: int = 1, timeout_s: float = 600.0
) -> Any:
    """Lay hosts, call `work(args)` on each rank and take the hosts down; what one of the ranks returned.

    Raises RuntimeError if a rank fails.
    """
    with Cluster(hosts=hosts, rate=rate) as cluster:
        return on_cluster(cluster, work, args, ranks_per_host=ranks_per_host, timeout_s=timeout_s)


def on_cluster(
    cluster: Cluster,
    work: Work,
    args: Namespace,
    *,
    launcher: str = "none",
    ranks_per_host: int = 1,
    timeout_s: float = 600.0,
) -> Any:
    """As `on_hosts`, on hosts that are there."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, *calling(work, args, out)]
        ended = cluster.run(command, launcher=launcher, ranks_per_host=ranks_per_host, timeout_s=timeout_s)
        if ended.status:
            name, where = work.__module__.rpartition(".")[2], f"{len(cluster.names)} hosts at {cluster.rate}"
            raise RuntimeError(f"the ranks of {name} on {where} ended with status {ended.status}")
        return json.loads(out.read_text())


def join_members(founders: int) -> tuple[membership.Members, object]:
    """In a rank: the transport of a run whose rendezvous is in rank 0, and what must be kept as long as it is used."""
    port = int(os.environ["MASTER_PORT"])
    store = serve(port) if os.environ["RANK"] == "0" else None
    return membership.connect(f"{os.environ['MASTER_ADDR']}:{port}", founders=founders), store
