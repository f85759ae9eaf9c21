"""`python -m onebit.zero.deepspeed SCRIPT ARGUMENTS`: run a script whose `import deepspeed` gives `onebit.zero`.

Under a launcher: `torchrun --nproc-per-node 2 -m onebit.zero.deepspeed train.py`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .stand_in import stand_in

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m onebit.zero.deepspeed SCRIPT [ARGUMENTS]", file=sys.stderr)
        sys.exit(2)
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # python -P has put no folder in front
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    stand_in()
    runpy.run_path(sys.argv[0], run_name="__main__")
