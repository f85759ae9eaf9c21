"""`python -m onebit.zero.deepspeed SCRIPT ARGUMENTS`: run a script whose `import deepspeed` gives `onebit.zero`.

Under a launcher: `torchrun --nproc-per-node 2 -m onebit.zero.deepspeed train.py`. With -m it runs a module, as Python.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from . import script
from .stand_in import stand_in

if __name__ == "__main__":
    del sys.argv[0]
    is_module = sys.argv[:1] == ["-m"]
    del sys.argv[:is_module]
    if not sys.argv or sys.argv[0] in ("-h", "--help"):
        print("usage: python -m onebit.zero.deepspeed {SCRIPT | -m MODULE} [ARGUMENTS]", file=sys.stderr)
        sys.exit(2)
    stand_in()
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # python -P has put no folder in front
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        script.run(sys.argv[0])
