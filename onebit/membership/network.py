"""Members as processes: a store in a process that outlives them, and a Gloo group for each epoch.

onebit rendezvous --port 29400                                  on a machine that stays
members = onebit.membership.connect("host:29400", founders=2)   in each member
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..comm import PeerError, Transport, torch_versions
from ..comm.open_files import may_open
from ..comm.transports.edge import ANSWER_S, DIAGNOSIS_S, STORE_S, reason
from ..comm.transports.hanging import call_within
from .members import Members
from .node import Node, NodeRendezvous
from .rendezvous import MembershipError, Patience, Rendezvous, Roster

if TYPE_CHECKING:
    from ..comm.transports.torch_distributed import TorchTransport

ADDRESS, FOUNDERS, TOKEN = "ONEBIT_RENDEZVOUS", "ONEBIT_FOUNDERS", "ONEBIT_TOKEN"
"""Variables of the environment that `connect` reads: what `onebit run --join` gives a script."""

LISTENER_S = 5.0
"""How long a rendezvous that starts at the same time may take to listen."""

POLL_S = 0.2

OPEN_FILES = 2**20
"""That a rendezvous may have, if the system allows as many."""

CONNECT_S, PAIR_S = 10.0, 30.0
"""Seconds in which the members of an epoch must connect to each other, once all of them have confirmed it."""


def connect(
    address: str | None = None,
    *,
    founders: int | None = None,
    token: str | None = None,
    name: str | None = None,
    min_members: int = 1,
    timeout_s: float = 30.0,
    patience: Patience | None = None,
    node: Transport | None = None,
) -> Members:
    """The transport between the members of a run that meet at an address. Each member's process makes one.

    Construct an optimizer over it, `onebit.OnebitAdam(params, transport=members)`, and then call `begin`. Gloo moves
    the bytes, over connections that torch.distributed does not know.

    Args:
        address: "host:port" of `onebit rendezvous`. Default: the environment's ONEBIT_RENDEZVOUS, which
            `onebit run --join` sets.
        founders: Number of members with which the run begins, the same on all. Default: ONEBIT_FOUNDERS, or 1.
        token: A secret of the run, the same on all members. Default: ONEBIT_TOKEN, or "".
        name: Name of this member, which no other member has or ever had. Default: host, process number and a random
            number.
        min_members: If fewer members are left, they wait until others have joined, with a warning. The same on all.
            Default 1.
        timeout_s: Seconds after which a silent member counts as lost. Default 30.
        patience: How long members wait for each other at changes. Default: `Patience()`.
        node: Between the ranks of this machine, if they are one member together because they divide the model among
            them: all of them call this, with the same arguments, and give an optimizer `members.parts(group)`. All
            members have the same number of ranks. Default None: this process is a member.

    Raises:
        MembershipError: Nothing answers at the address. With a node, also what follows.
        ValueError: There is no address, or it is not "host:port"; ONEBIT_FOUNDERS is not a number; min_members is not
            between 1 and founders; the members of the run have another number of ranks; or a rank of the node would
            not wait for another that waits for a member.
    """
    address = os.environ.get(ADDRESS) if address is None else address
    if not address:
        raise ValueError(
            'no address of a rendezvous: call connect("host:port"), or start the script by '
            "`onebit run --join HOST:PORT -- python ...`, which sets ONEBIT_RENDEZVOUS"
        )
    host, port = parse_address(address)
    founders = _founders(os.environ.get(FOUNDERS, "1")) if founders is None else founders
    token = os.environ.get(TOKEN, "") if token is None else token
    if not 1 <= min_members <= founders:
        raise ValueError(f"min_members must be between 1 and founders={founders}, got {min_members}")
    me = name or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
    store = partial(reach, host, port)
    options: dict[str, Any] = {"token": token, "founders": founders, "min_members": min_members, "patience": patience}
    if node is None:
        rendezvous: Rendezvous | NodeRendezvous = Rendezvous(store, me, **options)
        members = Members(rendezvous, partial(_group, rendezvous, store, timeout_s, 0))
    else:
        if node.timeout_s <= timeout_s:
            raise ValueError(
                f"the ranks of the node wait {node.timeout_s:g} s for each other, and one of them may wait "
                f"timeout_s={timeout_s:g} s for a member: give the node's transport a longer timeout"
            )
        ours, made = Node(node.split(range(node.world_size))), list[Rendezvous]()

        def make() -> str:
            made.append(Rendezvous(store, me, ranks=node.world_size, **options))
            return me

        me = ours.ask(make)
        rendezvous = NodeRendezvous(ours, made[0] if made else None, me, min_members, patience or Patience())
        members = Members(rendezvous, partial(_group, rendezvous, store, timeout_s, node.rank), ours)
    atexit.register(members.abandon)  # Gloo's threads may abort a Python that ends; it also tells the others at once
    return members


def serve(port: int) -> dist.TCPStore:
    """A store for a rendezvous, in this process, which may then open as many files as the system lets it.

    Each rank of a member has a few connections to it.

    Args:
        port: Port on all addresses of this machine; 0: a free one.
    """
    may_open(OPEN_FILES)
    return dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or, as in addresses of the web, "[host]:port". Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f'address must be "host:port" of `onebit rendezvous`, got {address!r}')
    return host, int(port)


def reach(host: str, port: int) -> dist.Store:
    """A new connection to the store of a rendezvous. Raises MembershipError if none answers within seconds."""

    def join() -> dist.Store:
        _await_listener(host, port)
        timeout = timedelta(seconds=STORE_S)
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    try:
        # After torch's own timeout: a thread that comes back as Python ends aborts it.
        return call_within(LISTENER_S + STORE_S + ANSWER_S, join, port)
    except (OSError, RuntimeError, TimeoutError) as error:
        raise MembershipError(
            f"no rendezvous answers at {host}:{port} ({reason(error)}): start `onebit rendezvous --port {port}` on a "
            "machine that all members reach, before the first of them"
        ) from error


def _await_listener(host: str, port: int) -> None:
    """Wait until the port is open: TCPStore waits, too, but then writes pages of C++ frames to standard error."""
    deadline = time.monotonic() + LISTENER_S
    while True:
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), 0.1)).close()
            return
        except OSError:
            if time.monotonic() + POLL_S > deadline:
                raise
            time.sleep(POLL_S)


def _founders(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"ONEBIT_FOUNDERS must be a number of members, at least 1; got {text!r}")
    return int(text)


def _group(
    rendezvous: Rendezvous | NodeRendezvous,
    store: Callable[[], dist.Store],
    timeout_s: float,
    place: int,
    roster: Roster,
    rank: int,
) -> TorchTransport:
    from ..comm.transports.torch_distributed import TorchTransport

    # If a peer died while groups connect, Gloo would hang for ever.
    if roster.epoch > 0:
        rendezvous.confirm(roster, "present")
    prefixed = dist.PrefixStore(f"group/{roster.epoch}/{place}", store())
    make = partial(torch_versions.gloo_group, prefixed, rank, len(roster.names), timedelta(seconds=CONNECT_S))
    try:
        if roster.epoch < 0:  # a pair: ranks of a node connect apart, while the node may be in a step
            prefixed.set(f"here/{rank}", "yes")
            prefixed.wait([f"here/{each}" for each in range(len(roster.names))], timedelta(seconds=PAIR_S))
        group = call_within(CONNECT_S + STORE_S, make, None)
    except (RuntimeError, TimeoutError) as error:
        raise PeerError(f"{rendezvous.name}: epoch {roster.epoch} does not connect: {reason(error)}") from error
    # Gloo's own timeout, which must come after ours.
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_s + DIAGNOSIS_S))
    return TorchTransport(group, timeout_s, finds_cause=False, store=prefixed)
