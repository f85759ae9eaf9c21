"""What DeepSpeed 0.19.6's own schedules do to groups with different rates, with each key and without it.

    pip download --no-deps deepspeed==0.19.6 && tar xzf deepspeed-0.19.6.tar.gz
    python tests/golden/write_schedules.py deepspeed-0.19.6/deepspeed/runtime/lr_schedules.py \\
        tests/golden/schedules_deepspeed_0.19.6.json

That file needs torch and a logger; the rest of DeepSpeed stays away. Each case holds the rates, and the momenta if they
are cycled, with which the steps in STEPS are taken.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

STEPS = (0, 1, 2, 3, 5, 7, 8, 13, 20, 21, 34, 55)
LRS = (1e-5, 3e-3)
REQUIRED = {
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 30},
    "WarmupCosineLR": {"total_num_steps": 30},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3},
    "LRRangeTest": {},
}
OPTIONAL = {
    "WarmupLR": {"warmup_min_lr": 1e-6, "warmup_max_lr": 4e-4, "warmup_num_steps": 7, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_min_lr": 1e-6, "warmup_max_lr": 4e-4, "warmup_num_steps": 7, "warmup_type": "linear"},
    "WarmupCosineLR": {"warmup_min_ratio": 0.1, "warmup_num_steps": 7, "cos_min_ratio": 0.05, "warmup_type": "linear"},
    "OneCycle": {
        "decay_lr_rate": 0.5,
        "cycle_first_step_size": 8,
        "cycle_second_step_size": 12,
        "cycle_first_stair_count": 4,
        "cycle_second_stair_count": 3,
        "decay_step_size": 5,
        "cycle_momentum": False,
        "cycle_min_mom": 0.7,
        "cycle_max_mom": 0.95,
        "decay_mom_rate": 0.001,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-4,
        "lr_range_test_step_size": 7,
        "lr_range_test_step_rate": 5.0,
        "lr_range_test_staircase": True,
    },
}
OTHER = (
    ("WarmupLR", {"warmup_max_lr": None, "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_min_lr": [1e-6, 1e-4], "warmup_max_lr": [1e-4, 1e-2], "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_max_lr": None, "warmup_num_steps": 7}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 7}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 7}),
    ("OneCycle", {"cycle_min_lr": [1e-4, 1e-3], "cycle_max_lr": [1e-3, 1e-2], "cycle_first_step_size": 8}),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 1e-3], "lr_range_test_step_size": 7}),
)


def cases() -> Iterator[tuple[str, dict[str, object]]]:
    """Every schedule with its required keys alone, with each optional one, without each, and with all."""
    for name, required in REQUIRED.items():
        optional = OPTIONAL[name]
        chosen = [{}, optional, *({key: value} for key, value in optional.items())]
        chosen += [{key: value for key, value in optional.items() if key != absent} for absent in optional]
        yield from ((name, required | more) for more in chosen)
    yield from OTHER


def module_of(path: str) -> ModuleType:
    utils = ModuleType("deepspeed.utils")
    utils.logger = logging.getLogger("deepspeed")  # type: ignore[attr-defined]
    utils.logger.setLevel(logging.ERROR)
    sys.modules |= {"deepspeed": ModuleType("deepspeed"), "deepspeed.utils": utils}
    spec = importlib.util.spec_from_file_location("lr_schedules", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def taken(module: ModuleType, name: str, params: dict[str, object]) -> dict[str, object]:
    optimizer = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in LRS])
    scheduler = getattr(module, name)(optimizer, **params)
    rates, momenta = [], []
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            rates.append([group["lr"] for group in optimizer.param_groups])
            momenta.append([group["betas"][0] for group in optimizer.param_groups])
        scheduler.step()
    made = {"type": name, "params": params, "rates": rates}
    return made | ({"momenta": momenta} if name == "OneCycle" else {})


def main() -> None:
    source, target = sys.argv[1:]
    module = module_of(source)
    made = [taken(module, *case) for case in cases()]
    lines = ",\n".join(json.dumps(case) for case in made)
    Path(target).write_text(f'{{"steps": {json.dumps(STEPS)}, "lrs": {json.dumps(LRS)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
