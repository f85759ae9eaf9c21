"""The first process of a host or of the switch, as a script that needs only the standard library.

A host may have no environment and no site packages, and its first process must not wait for torch. So this folder is
imported here as a separate package named `cluster`, without `onebit` around it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cluster.machine import ENTER, KEEPER, enter, run_keeper

    if sys.argv[1] == KEEPER:
        run_keeper(sys.argv[2], sys.argv[3:])
    elif sys.argv[1] == ENTER:
        sys.exit(enter(sys.argv[2], sys.argv[3], sys.argv[4:]))
    else:
        sys.exit(f"alone.py: expected {KEEPER} or {ENTER}, got {sys.argv[1]!r}; the command is `onebit emulate`")
