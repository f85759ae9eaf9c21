"""One rank of the transports' check: trains over a real transport, and writes what it ended with.

python scripts/gpu_check/rank.py BACKEND DEVICE BLOCK STEPS FORM FOLDER      (RANK, WORLD_SIZE, ... in the environment)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(backend: str, device: str, block: str, steps: str, form: str, folder: str) -> None:
    if backend == "nccl":  # ranks of other hosts may share a GPU, and talk by sockets as hosts do
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    from gpu_check.forms import FORMS, train_alone
    from onebit import comm

    transport = comm.init(backend, timeout_s=60.0)
    codec = comm.SignCodec(int(block))
    params, losses = train_alone(FORMS[form], transport, torch.device(device), codec, int(steps))
    torch.save({"params": params.cpu(), "losses": losses}, Path(folder) / f"{transport.rank}.pt")
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
