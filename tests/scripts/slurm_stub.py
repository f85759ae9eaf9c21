"""What a job script finds on PATH in a test: `srun` and `scontrol`, with Slurm's variables, on this host alone.

Called as `srun [--option[=value] [value]]... command`: starts SLURM_NTASKS tasks and, where one fails, ends the others
if --kill-on-bad-exit is given. As `scontrol show hostnames LIST`: the list's names, one a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def srun(words: list[str]) -> int:
    options = []
    while words[0].startswith("--"):
        options.append(words.pop(0))
        assert "=" in options[-1], f"srun: write {options[-1]}=VALUE"
    tasks = int(os.environ["SLURM_NTASKS"])
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    if "--ntasks-per-node=1" in options:
        tasks = nodes
    shared = {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks // nodes}(x{nodes})",
    }
    running = {}
    for task in range(tasks):
        here = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % (tasks // nodes))}
        node = {"SLURM_NODEID": str(task // (tasks // nodes))}
        running[task] = subprocess.Popen(words, env=os.environ | shared | here | node)
    worst = 0
    while running:
        for task, process in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[task]
            if code and not worst:
                worst = code
                for other in running.values() if "--kill-on-bad-exit=1" in options else ():
                    other.terminate()
        time.sleep(0.05)
    return worst


def install(folder: Path) -> None:
    """Put both commands there."""
    for name in ("srun", "scontrol"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        command.chmod(0o755)


if __name__ == "__main__":
    if sys.argv[1] == "srun":
        sys.exit(srun(sys.argv[2:]))
    assert sys.argv[2:4] == ["show", "hostnames"], sys.argv
    print(sys.argv[4].replace(",", "\n"))
