"""The script of `python -m onebit.zero.deepspeed SCRIPT`, which this module becomes.

It is the one that a process of `multiprocessing` imports if it starts anew (spawn, forkserver), as a DataLoader's
workers may: Python imports the main module there by the name in its `__spec__`, and runs nothing of a `__main__.py`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

PATH = "ONEBIT_STAND_IN_SCRIPT"


def run(path: str) -> None:
    """Run a script as the main module of this process and, as it imports it, of those that it starts."""
    os.environ[PATH] = os.path.abspath(path)
    main = ModuleType("__main__")
    main.__spec__, main.__file__ = sys.modules[__name__].__spec__, path
    sys.modules["__main__"] = main
    _execute(path, vars(main))


def _execute(path: str, names: dict[str, object]) -> None:
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), names)  # without this file's annotations


if __name__ == "__mp_main__":
    from onebit.zero.deepspeed.stand_in import stand_in

    stand_in()
    __file__ = os.environ[PATH]
    _execute(__file__, globals())
