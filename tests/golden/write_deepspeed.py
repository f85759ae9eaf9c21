"""Small checkpoints that DeepSpeed 0.19.6 writes, and the float32 weights that its own tool makes of them.

    python scripts/bench.py peer_deepspeed
    .venv-deepspeed/bin/python tests/golden/write_deepspeed.py tests/golden/deepspeed_0.19.6.zip

In the archive: STAGE-DTYPE/, a folder as save_checkpoint leaves it, with expected.pt beside its files. Two ranks on the
CPU train three steps of a model with a buffer, a frozen parameter and, below stage 3, tied weights.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

CASES = ((0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
TAG = "t3"


class Net(nn.Module):
    def __init__(self, is_tied: bool, is_low: bool):
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        # BatchNorm1d of torch takes no bfloat16 weights beside float32 statistics on the CPU.
        self.norm = nn.LayerNorm(8) if is_low else nn.BatchNorm1d(8)
        self.last, self.frozen = nn.Linear(8, 7), nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("table", torch.arange(6))
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.last(self.norm(x)) + self.frozen.sum() + 0.01 * self.head(x).sum()


def train(stage: int, dtype: str, folder: str) -> None:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net(is_tied=stage < 3, is_low=dtype == "bf16")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": dtype == "bf16"},
        },
    )
    for step in range(3):
        torch.manual_seed(10 * step + engine.global_rank)
        engine.backward(engine(torch.randint(13, (4,))).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag=TAG, client_state={"epoch": 2})
    if engine.global_rank == 0:
        whole = get_fp32_state_dict_from_zero_checkpoint(folder, tag=TAG) if stage else model.state_dict()
        torch.save({name: x.clone() for name, x in whole.items()}, Path(folder) / "expected.pt")


def main() -> None:
    if len(sys.argv) == 4:
        train(int(sys.argv[1]), sys.argv[2], sys.argv[3])
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    with tempfile.TemporaryDirectory() as made, zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as archive:
        for stage, dtype in CASES:
            folder = Path(made) / f"{stage}-{dtype}"
            env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            subprocess.run([*launcher, str(stage), dtype, str(folder)], env=env, check=True, timeout=300)
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.suffix != ".py":  # not its tool, which is DeepSpeed's
                    archive.write(file, file.relative_to(made))


if __name__ == "__main__":
    main()
