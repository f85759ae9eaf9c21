"""The command `onebit`: what this machine has, what training would cost on it, and the tools around that.

`COMMANDS` is the registry: to add a command write a module here with `main(argv) -> int`, and its line. Modules are
imported when their command is asked for. This is the outermost layer: it may import `comm`, `onebit` and `zero`, and
nothing imports it but `__main__` (and scripts/).
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ..version import VERSION

COMMANDS = {
    "doctor": ("doctor.command", "what is installed, what the network passes, and whether one bit would pay on it"),
    "plan": ("plan", "memory, traffic and seconds per step of a run, before it is started"),
    "demo": ("demo", "train a small model with AdamW and with OnebitAdam, and compare loss and traffic"),
    "bench": ("bench", "what codecs and kernels pass on this machine, and exchanges between ranks"),
    "convert": ("convert", "weights of onebit, DeepSpeed or torch as one file; our state as plain AdamW's"),
    "layout": ("layout", "draw a sparse attention layout, and say what it costs and how far a token sees"),
    "rendezvous": ("rendezvous", "where the members of a run find each other, as they come and go"),
    "emulate": ("cluster.command", "run a command on emulated hosts, joined by links of the rate you name"),
}
"""By name: the module, and what it does."""


class UserError(Exception):
    """What the user asked for cannot be done; the message says what was expected, what came and what to do."""


def usage() -> str:
    """What `onebit` says without a command."""
    lines = [f"  {name:<10} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        ["usage: onebit COMMAND [options]", "", *lines, "", "`onebit COMMAND --help` lists a command's options."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done; 1 it could not be done; 2 wrong arguments; 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
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
    module = import_module(f".{COMMANDS[arguments[0]][0]}", __name__)
    try:
        status: int = module.main(arguments[1:])
        return status
    except UserError as error:
        print(f"onebit {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
