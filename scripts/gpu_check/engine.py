"""The engine on the device, beside the host's: stages, precisions and offload of two replicas of two ranks; a decoder
of transformers divided into stages and slices, its sequences into pieces.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ranks
import torch
from torch import Tensor, nn

from gpu_check.checks import assert_same
from gpu_check.section import Outcome, Setting, outcome
from gpu_check.transports import ENV
from onebit.zero import initialize
from onebit.zero.grid import Grid

RANK, REPLICAS, SHARDS, ROWS = Path(__file__).with_name("engine_rank.py"), 2, 2, 8
W = REPLICAS * SHARDS
LARGEST_GAP = 0.05  # of the mean of the last losses, to the host's; weights changed by 1e-5 change the host's by .01
LOW = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.01},
    "OneBitAdam": {"lr": 1e-2, "freeze_step": 6},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 6},
    "ZeroOneAdam": {"lr": 1e-2, "local_step_scaler": 8, "local_step_clipper": 4},
}
ALWAYS = {"compression": "always"}  # "auto" goes by the time that messages take
SLICES, STAGES, PIECES = {"onebit": ALWAYS | {"tensor": 2}}, {"pipeline": {"stages": 2}}, {"sequence_parallel_size": 2}
LAYOUTS: dict[str, dict] = {
    "two slices": SLICES,
    "two stages": STAGES,
    "two stages of two slices": SLICES | STAGES,
    "sequences of two ranks": PIECES,
    "two stages, sequences of two ranks": STAGES | PIECES,
}


def _config(kind: str, stage: int, low: str = "", offload: bool = False, micros: int = 1, **blocks: Any) -> dict:
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": 1.0,
        "optimizer": {"type": kind, "params": OPTIMIZERS[kind]},
        "zero_optimization": zero,
        "onebit": ALWAYS,
        **LOW.get(low, {}),
        **blocks,
    }


def cases() -> dict[str, dict]:
    """Configurations by name."""
    found = {}
    for kind in ("AdamW", "OneBitAdam"):
        for low in ("", "bf16", "fp16"):
            for stage in range(4):
                for offload in (False, True) if stage else (False,):
                    if (kind, low) != ("OneBitAdam", "fp16") or not offload:
                        words = [kind, f"stage {stage}", low or "float32", *["state in host memory"] * offload]
                        found[", ".join(words)] = _config(kind, stage, low, offload, micros=2)
    found |= {f"{kind}, stage 0, float32": _config(kind, 0) for kind in ("OneBitLamb", "ZeroOneAdam")}
    local = {"onebit": ALWAYS | {"local_steps": {"every": 4}}}
    found |= {f"local steps, stage {stage}, bf16": _config("AdamW", stage, "bf16", **local) for stage in (0, 1, 3)}
    for name, layout in LAYOUTS.items():
        for kind, stage, low in (("AdamW", 1, ""), ("OneBitAdam", 0, "bf16")):
            shown = low or "float32"
            found[f"{kind}, {name}, stage {stage}, {shown}"] = _config(kind, stage, low, micros=2, **layout)
    return found


class Model(nn.Module):
    """With what FSDP2 refuses: a scalar, a transposed weight, a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.across = nn.Parameter(torch.randn(64, 32).t() * 0.2)
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.across) * self.scale
        return self.head(h + self.second(torch.tanh(self.first(h))))


def train(
    config: Mapping[str, Any], grid: Grid, device: torch.device, steps: int, folder: Path
) -> tuple[dict[str, Tensor], list]:
    """This rank's weights, whole, and the losses of all steps. Before the last one it saves and loads a checkpoint."""
    if {"pipeline", *PIECES} & config.keys() or "tensor" in config.get("onebit", {}):
        return _train_decoder(config, device, steps, folder)
    torch.manual_seed(0)
    model = Model().to(device)
    engine, *_ = initialize(model=model, config=dict(config), grid=grid)
    g, losses = torch.Generator().manual_seed(100 + grid.world.rank), list[float]()
    micros = config["gradient_accumulation_steps"]
    for k in range(steps * micros):
        if k == (steps - 1) * micros:
            _through_files(engine, folder)
        x = torch.randn(ROWS, 32, generator=g)
        x, y = x.to(device, engine.config.dtype), x[:, :8].sin().to(device)
        loss = (engine(x).float() - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return {name: x.detach().float().cpu() for name, x in engine.module_state_dict().items()}, losses


def _through_files(engine: Any, folder: Path) -> None:
    """Save, load, and export."""
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.save_16bit_model(folder / "weights")


def _train_decoder(
    config: Mapping[str, Any], device: torch.device, steps: int, folder: Path
) -> tuple[dict[str, Tensor], list]:
    """The same of a Llama, on a grid of its own."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    made = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, max_position_embeddings=32, **shape)
    engine, *_ = initialize(model=transformers.LlamaForCausalLM(made).to(device), config=dict(config))
    losses, micros = list[float](), config["gradient_accumulation_steps"]
    g = torch.Generator().manual_seed(100 + engine.grid.data[0])

    def batches() -> Iterator[dict[str, Tensor]]:
        while True:
            starts = torch.randint(96, (ROWS, 1), generator=g)
            ids = ((starts + torch.arange(16)) % 96).to(device)
            yield {"input_ids": ids, "labels": ids}

    read = batches()
    for step in range(steps):
        if step == steps - 1:
            _through_files(engine, folder)
        if engine.is_pipe_parallel:
            losses.append(float(engine.train_batch(read)))
            continue
        for _ in range(micros):
            loss = engine(**next(read)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    weights = {name: x.detach().float().cpu() for name, x in engine.module_state_dict().items()}
    engine.grid.close()
    return weights, losses


def run(backend: str, device: str, steps: int, folder: str, named: Mapping[str, dict]) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    words = (backend, device, str(steps), folder, json.dumps(named))
    ended = ranks.run_torchrun(W, RANK, *words, timeout_s=300.0, env=ENV)
    files = [Path(folder) / f"{rank}.pt" for rank in range(W)]
    if any(ended.returncodes) and not all(file.exists() for file in files):
        raise RuntimeError(f"ranks over {backend} ended with {ended.returncodes}: {ended.output[-500:]}")
    return [torch.load(file) for file in files]


def check(name: str, here: list[dict[str, Any]], host: list[dict[str, Any]] | None) -> None:
    found = [rank.get(name, {"problem": "not reached"}) for rank in here]
    for rank, each in enumerate(found):
        if each["problem"]:
            raise RuntimeError(f"rank {rank}: {each['problem']}")
    for rank, each in enumerate(found):
        for key in each["weights"].keys() & found[0]["weights"].keys():
            assert_same(f"{key} of rank {rank} against rank 0", each["weights"][key], found[0]["weights"][key])
        if host is not None:
            last = len(each["losses"]) // 2
            loss, expected = (sum(of["losses"][last:]) / last for of in (each, host[rank][name]))
            if not abs(loss - expected) <= LARGEST_GAP * expected:
                raise AssertionError(f"rank {rank}: expected a loss near the host's {expected:.4g}, got {loss:.4g}")


def engine_checks(setting: Setting) -> Iterator[Outcome]:
    named, steps = cases(), max(12, setting.steps)
    if setting.is_rehearsal:  # that the script works: a third of the cases, LAMB's and split sequences are of all kinds
        rare = ("OneBitLamb", "sequences of")
        chosen = {name for k, name in enumerate(named) if k % 3 == 1 or any(word in name for word in rare)}
        named = {name: each for name, each in named.items() if name in chosen}
        steps = 8
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        host = run("gloo", "cpu", steps, folder, named)
    if setting.is_rehearsal:
        here, host_or_none = host, None
    else:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            here, host_or_none = run("nccl", "cuda", steps, folder, named), host
    for name in named:
        yield outcome(name, functools.partial(check, name, here, host_or_none))
