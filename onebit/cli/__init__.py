"""The command `onebit`: inspects this machine, predicts the cost of training on it, and has the tools around that.

`COMMANDS` is the registry: to add a command, write a module here with `main(argv) -> int`, and a line there. Modules
are imported when their command runs. This is the outermost layer: it may import `comm`, `onebit` and `zero`, and only
`__main__` (and scripts/) import it.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ..version import VERSION

COMMANDS = {
    "doctor": ("doctor.command", "list what is installed, measure the network, and predict whether one bit pays"),
    "plan": ("plan", "estimate memory, traffic and seconds per step of a run, before it starts"),
    "demo": ("demo", "train a small model with AdamW and with OnebitAdam, and compare loss and traffic"),
    "bench": ("bench", "measure codecs and kernels on this machine, and exchanges between ranks"),
    "serve": ("serve.command", "answer requests with a model of transformers, in OpenAI's form"),
    "convert": ("convert", "write weights of onebit, DeepSpeed or torch as one file; or our state as AdamW's"),
    "layout": ("layout", "draw a sparse attention layout, with its cost and the range of a token"),
    "rendezvous": ("rendezvous", "hold the list of a run's members, which come and go"),
    "launch": ("launch.command", "start a script on the hosts of a DeepSpeed hostfile, over ssh and torchrun"),
    "run": ("run", "run a script on this machine as a member of such a run, again after a crash"),
    "status": ("status", "show a run whose members come and go: who is alive, how fast, what has changed"),
    "emulate": ("cluster.command", "run a command on emulated hosts, joined by links of the rate you name"),
}
"""By name: the module, and the command's description."""


class UserError(Exception):
    """A command cannot do what the user asked; the message has what was expected, what came and what to do."""


def usage() -> str:
    """The text that `onebit` prints without a command."""
    lines = [f"  {name:<10} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        ["usage: onebit COMMAND [options]", "", *lines, "", "`onebit COMMAND --help` lists a command's options."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 success; 1 failure; 2 wrong arguments; 130 interrupted; 141 output unread."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What the caller has closed (>&-) is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # Python's own flush, at exit, fails with a traceback
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except UnicodeEncodeError as error:
        print(
            f"onebit: output in {error.encoding} cannot have these characters; set PYTHONIOENCODING=utf-8",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"onebit: output cannot be written: {error.strerror}; free some, or write elsewhere", file=sys.stderr)
        _drop_output()
        return 1


def _drop_output() -> None:
    """Let what waits to be written to standard output go nowhere, as no one can take it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"onebit {VERSION}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"onebit: there is no command {arguments[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        module = import_module(f".{COMMANDS[arguments[0]][0]}", __name__)
        status: int = module.main(arguments[1:])
        return status
    except UserError as error:
        print(f"onebit {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
