"""Inject faults, compare what follows with what is promised, and write it down.

    python scripts/faults.py --results runs/faults.jsonl --record scripts/records/faults_2026-11.md
    python scripts/faults.py --section saves damage        (some sections; without --again, what was not run yet)
    python scripts/faults.py --quick                       (a few faults of each kind, in 25 s: what the tests run)

Exit status 1 where anything was not as promised. `faults.py peers` is one rank of that section, which mpirun starts.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["peers"]:
        from faults.peers import main

        main(sys.argv[2:])
    else:
        from faults.main import main

        sys.exit(main())
