"""One rank of the engine's check: every case in turn, on one grid; writes the weights and losses it ended with.

python scripts/gpu_check/engine_rank.py BACKEND DEVICE STEPS FOLDER CASES     (RANK, WORLD_SIZE, ... in the environment)
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def main(backend: str, device: str, steps: str, folder: str, cases: str) -> None:
    if backend == "nccl":  # ranks of other hosts may share a GPU, and talk by sockets as hosts do
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    from gpu_check.engine import SHARDS, train
    from onebit.zero import grid as grids

    torch.set_num_threads(1)
    made = [grids.start(backend=backend, timeout_s=60.0, shard=shards) for shards in (1, SHARDS)]
    found = {}
    for name, config in json.loads(cases).items():
        grid = made[min(1, config["zero_optimization"]["stage"])]
        try:
            place = Path(folder) / f"checkpoint of {name}"
            weights, losses = train(config, grid, torch.device(device), int(steps), place)
            found[name] = {"weights": weights, "losses": losses, "problem": ""}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"problem": f"{type(error).__name__}: {str(error)[:600]}"}
        torch.save(found, Path(folder) / f"{grid.world.rank}.pt")
        if found[name]["problem"] and not found[name]["problem"].startswith("ValueError"):
            os._exit(1)  # the other ranks may wait in the middle of a collective
    for grid in reversed(made):
        grid.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
