"""What ranks do with `onebit.LocalSteps`, whatever transport joins them."""

from __future__ import annotations

import copy
import hashlib

import torch
from torch import nn

import onebit
from onebit.comm import Transport, init


def train(transport: Transport, resume_at: int = -1, **options: object) -> str:
    """14 steps of AdamW in rounds of four; a hash of anchors, parameters and what is owed.

    resume_at: behind that step, all goes on in a new model and optimizer, from the state.
    """

    def make() -> tuple[list[nn.Parameter], onebit.LocalSteps]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(size, generator=generator)) for size in ((20, 65), (65,), (65, 9), (9,))]
        inner = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
        given = {"every": 4, "bucket_cap_mb": 0.003, "check_replicas_every": 4, "transport": transport} | options
        return params, onebit.LocalSteps(inner, **given)  # type: ignore[arg-type]

    params, optimizer = make()
    for step in range(14):
        generator = torch.Generator().manual_seed(100 * step + transport.rank)
        for p in params:
            p.grad = p.detach() + torch.randn(p.shape, generator=generator)
        if step == 5 and transport.rank == 1:
            params[0].grad[0, 0] = float("nan")  # type: ignore[index]
        optimizer.step()
        if step == resume_at:
            state = copy.deepcopy(optimizer.state_dict())
            params, optimizer = make()
            optimizer.load_state_dict(state)
    assert optimizer.stats.missed_rounds == (transport.rank == 1)
    state = optimizer.state_dict()
    found = [entry[name] for entry in state["state"].values() for name in ("anchor", "worker_error")]
    found += [*(p.detach() for p in params), *(bucket["server_error"] for bucket in state["onebit"]["buckets"])]
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in found)).hexdigest()


def train_here(cases: list[dict[str, object]]) -> list[str]:
    """Each case over the launcher's transport."""
    transport = init(levels=1)
    found = [train(transport, **case) for case in cases]  # type: ignore[arg-type]
    transport.close()
    return found
