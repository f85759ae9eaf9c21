"""Inject faults, compare what follows with what is promised, and write it down.

Every section is a table of cases in a file of its own: a name, a promise, how the fault is injected, how its end is
seen. Cases run side by side in forks of this process; each adds its outcomes to the raw record when it is done, so that
a run can be interrupted and gone on with. Exit status 1 where anything was not as promised.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from provenance import check_record, record_path, write_record
from reports import read_lines

TITLES = {
    "saves": "saves that are cut off",
    "damage": "damaged checkpoints",
    "frames": "hostile frames",
    "storms": "numeric storms",
    "disagreement": "ranks that disagree",
    "starts": "starts that fail",
    "peers": "peers that die, stop, lag, skip, repeat",
    "runs": "runs that are killed and resumed",
    "members": "members that come and go",
    "simulated": "a thousand changes of simulated members",
    "cables": "cables that are cut or slow",
}
_SHIM_FOLDER = "FAULTS_SHIM"
_MOST_TOLD = 40


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--section", nargs="+", choices=TITLES, default=list(TITLES), metavar="NAME", help=", ".join(TITLES))
    add("--case", default="", metavar="TEXT", help="only cases whose name holds this")
    add(
        "--results",
        type=Path,
        default=Path("runs/faults.jsonl"),
        metavar="FILE",
        help="the raw record, JSON lines",
    )
    add("--record", type=record_path, metavar="FILE", help="the report, of all that --results holds")
    add("--again", action="store_true", help="run cases that --results holds already, too")
    add("--report-only", action="store_true", help="run nothing")
    add("--quick", action="store_true", help="a few faults of some cases")
    add("--processes", type=int, default=4, help="cases side by side; most of them wait")
    add("--seed", type=int, default=0)
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    if not args.report_only:
        check_record(parser, args.results)
    return args


def preload_shim() -> None:
    """Start anew with `shim.c` preloaded, where there is a C compiler; before torch is imported: 3 s."""
    if folder := os.environ.pop(_SHIM_FOLDER, ""):
        shutil.rmtree(folder, ignore_errors=True)  # it is mapped: its file may go
        os.environ.pop("LD_PRELOAD")  # what is started from here has no use for it
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return
    folder = tempfile.mkdtemp(prefix="faults-shim-")
    source, library = Path(__file__).with_name("shim.c"), Path(folder, "shim.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    preload = f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {_SHIM_FOLDER: folder, "LD_PRELOAD": preload})


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    preload_shim()
    from faults.case import AS_PROMISED
    from faults.report import report
    from faults.running import latest_lines, load_cases, run_missing, told

    every = load_cases(list(TITLES))
    if not args.report_only:
        chosen = {name: [case for case in every[name] if args.case in case.name] for name in args.section}
        flags = {name: getattr(args, name) for name in ("processes", "seed", "quick", "again", "quiet")}
        run_missing(chosen, args.results, **flags)
    lines = latest_lines(read_lines(args.results))
    if args.record is not None:
        write_record(args.record, report(lines, every, TITLES), args.results)
    faults = [line for line in lines if line["what"] == "fault"]
    wrong = [line for line in faults if line["verdict"] != AS_PROMISED]
    for line in wrong[:_MOST_TOLD]:
        print(f"{line['section']}, {line['case']}: {line['verdict']}: {line['fault']}: {line['detail']}")
    counts = Counter[str]()
    for line in faults:
        counts[line["verdict"]] += line["count"]
    print(told(counts))
    return 1 if wrong else 0
