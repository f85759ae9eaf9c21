"""Forked children release the connections of their parent's process group and of the store.

A connection ends when the last process that holds it has closed it. Workers of a DataLoader inherit those of their
rank: without this file a killed rank seems alive until its workers notice, after 5 s or the time to read a sample.
Rests on `hanging.py`, which lists sockets.
"""

from __future__ import annotations

import functools
import os
import socket
import struct

from .hanging import sockets

_store_ports: set[int] = set()


def release_in_children(store_port: int | None) -> None:
    """From now on, children of this process hold neither connections of Gloo nor those of the store at this port.

    Children that execute another program do not inherit the connections that exist now. Call it after each new group.
    """
    if store_port is not None:
        _store_ports.add(store_port)
    for descriptor in sockets():  # Gloo leaves them inheritable; the store does not
        try:
            if _is_gloos(descriptor):
                os.set_inheritable(descriptor, False)
        except OSError:
            continue  # another thread has closed it meanwhile
    _register()


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_release)


def _release() -> None:
    """Replace each by /dev/null: a C++ object closes the descriptor later, and it must not be another file by then."""
    released = [each for each in sockets() if _is_gloos(each) or _is_of_a_store(each)]
    if released:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in released:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def _is_gloos(descriptor: int) -> bool:
    """Whether Gloo opened it, by the socket options that it sets: no other library sets SO_REUSEADDR on a client and
    bounds its sends. So this finds groups that the script made, too.
    """
    with socket.socket(fileno=os.dup(descriptor)) as each:
        if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
            return False
        bound = each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.calcsize("ll"))
        reuses = each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        return any(bound) and bool(reuses) and bool(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def _is_of_a_store(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as each:
        if each.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if each.getsockname()[1] in _store_ports:
            return True  # it hosts the store
        try:
            return each.getpeername()[1] in _store_ports
        except OSError:
            return False  # not connected
