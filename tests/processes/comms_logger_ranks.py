"""What the ranks of test_comms_logger.py do."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from onebit import zero


def logs_messages(cases: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    """Of each (stage, verbose): four steps, with the logger and without: its lines; are the bits the same?"""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onebit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = []
    for stage, verbose in cases:
        texts.clear()
        weights = []
        for enabled in (False, True):
            torch.manual_seed(3)
            config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 2}
            config |= {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
            config |= {"comms_logger": {"enabled": enabled, "verbose": verbose}}
            engine = zero.initialize(model=nn.Linear(200, 150, bias=False), config=config)[0]
            for step in range(4):
                x = torch.randn(2, 200, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
                engine.backward(engine(x).square().mean())
                engine.step()
            weights.append(engine.module_state_dict())
        same = all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
        found.append({"texts": [text for text in texts if "messages in step" in text], "same": same})
    return found
