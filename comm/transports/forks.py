"""What a forked child lets go of: the connections of its parent's process group and of the store.

A connection ends when the last process that holds it has closed it. Workers of a DataLoader inherit all of a rank's:
a rank that was killed seemed alive until they had noticed, after 5 s, or as long as they take to read a sample.
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
    """From now on children of this process hold neither connections of Gloo's nor those of the store at this port.

    Children that execute another program get none of what is connected by now. To be called after each new group.
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
    """Put /dev/null in the place of each: what a C++ object closes later must not be someone else's by then."""
    released = [each for each in sockets() if _is_gloos(each) or _is_of_a_store(each)]
    if released:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in released:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def _is_gloos(descriptor: int) -> bool:
    """By the options that it sets, even in the group of someone else: no other library binds a client to reuse its
    address, and bounds its sends.
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
