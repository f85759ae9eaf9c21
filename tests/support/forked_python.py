"""A Python for launchers, which start ranks themselves: each is a fork of the server in `ranks.py`.

A launcher's child is this small process. It passes on its words, environment, folder and files, then signals, and ends
as the fork does; if it is killed, so is the fork. It takes 20 ms of CPU, torch's and onebit's import 2 to 5 s.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_DIES_WITH_PARENT = 1


def main(words: list[str]) -> None:
    if words[0].startswith("-") and words[0] not in ("-c", "-m", "-u"):
        os.execv(sys.executable, [sys.executable, *words])  # other options ask for an interpreter of their own
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket"))
    request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "python": __file__}
    socket.send_fds(link, [json.dumps(request).encode()], [0, 1, 2])
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: link.send(b"%d" % number))
    status = int(link.recv(16) or b"1")  # nothing: its other end has been killed
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def supervise(link: socket.socket, pid: int) -> None:
    """At the link's other end, for its fork: until one of the two has ended, and with it the other."""
    ends = os.pidfd_open(pid)
    while ends not in select.select([ends, link], [], [])[0]:
        os.kill(pid, int(link.recv(16) or signal.SIGKILL))
    link.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, int(signal.SIGKILL))


if __name__ == "__main__":
    main(sys.argv[1:])
