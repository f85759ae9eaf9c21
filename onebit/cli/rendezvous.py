"""`onebit rendezvous`: where the members of a run find each other, as they come and go."""

from __future__ import annotations

import argparse
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType

from ..membership.network import serve
from . import UserError

_ABOUT = """\
Holds the list of a run's members, and nothing else: no bytes of the training pass through it. Start it on a machine
that stays, before the first member; it ends by Ctrl+C. A run needs it when members come and go, and survives its
absence in between.
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onebit rendezvous", description=_ABOUT)
    parser.add_argument("--port", type=int, default=29400, help="to listen at; 0: a free one (default: 29400)")
    args = parser.parse_args(argv)
    if not 0 <= args.port < 65536:
        parser.error(f"--port: expected 0 to 65535, got {args.port}")
    try:
        store = serve(args.port)
    except RuntimeError as error:
        raise UserError(f"cannot listen at port {args.port}: {str(error).splitlines()[0]}; take another") from error
    print(f"rendezvous at {socket.gethostname()}:{store.port}", flush=True)
    ended = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    ended.wait()
    return 0
