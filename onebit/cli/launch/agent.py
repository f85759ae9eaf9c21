"""What `onebit launch` runs on each host: torchrun, which ends when the launcher does.

ssh does not end what it has started when it ends itself, nor passes signals on. But then this process's standard input
is closed, which it watches. `python -m onebit.cli.launch.agent` takes torchrun's arguments.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

END_S = 40.0
"""From SIGTERM to the end of this process: torchrun kills ranks that are left after 30 s."""


def run(arguments: Sequence[str]) -> int:
    """Run torchrun in this process. Returns the status of the rank that failed first, as a shell has it, else 0."""
    try:
        torchrun.main(list(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        code: int = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _end_with(launcher: int) -> None:
    """Wait until this descriptor is closed at its other end, and then end torchrun."""
    while os.read(launcher, 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


def main() -> int:
    launcher = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # for the ranks
    os.close(nothing)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
