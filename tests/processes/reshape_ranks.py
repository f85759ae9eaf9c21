"""What the ranks of test_zero_reshape.py do: train in one layout, go on in others, say what their optimizers know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from engine_ranks import bits, config_of, dataset, net, train
from torch import Tensor
from torch.distributed.tensor import DTensor

from onebit import zero
from onebit.comm import init
from onebit.comm.messages import gather_bytes
from onebit.model_parallel import local
from onebit.optimizer import CompressedOptimizer
from onebit.zero import grid as grids

ONE_BIT = {
    "OneBitAdam": {"freeze_step": 4},
    "ZeroOneAdam": {"var_freeze_step": 4},
    "OneBitLamb": {"freeze_step": 4},
    "OneBitMuon": {"freeze_step": 4, "head": "head"},
}
SAMPLES = 32  # of a step, whatever the layout


def runs(folder: str, cases: Sequence[dict]) -> list[dict]:
    """Case after case: load where it says so, look, train, save, look. A shards of 0: of as many ranks as there are."""
    transport = init("gloo", levels=1)
    made: dict[int, grids.Grid] = {}
    facts = []
    for case in cases:
        shards = case.get("shards", 1)
        if shards not in made:
            made[shards] = grids.start(shard=shards)
        facts.append(run(Path(folder), made[shards], **case))
    for grid in made.values():
        grid.close()
    transport.close()
    return facts


def run(
    folder: Path,
    grid: grids.Grid,
    name: str,
    stage: int,
    load: str = "",
    save: str = "",
    steps: int = 2,
    shards: int = 1,
    blocks: Mapping[str, object] | None = None,
    nvme: bool = False,
) -> dict:
    ranks = grid.world.world_size
    params = ONE_BIT.get(name, {})
    config = config_of(name, params, zero_optimization={"stage": stage}, **(blocks or {}))
    if name in ONE_BIT:
        config["onebit"] = {"compression": "always", "block": 64, "check_replicas_every": 1}
    if nvme:
        block = {"device": "nvme", "nvme_path": str(folder / "nvme")}
        config["zero_optimization"] |= {"offload_optimizer": block}
    config |= {"train_micro_batch_size_per_gpu": SAMPLES // ranks // 2, "gradient_accumulation_steps": 2}
    engine = zero.initialize(model=net(), config=config, training_data=dataset(), grid=grid)[0]
    facts: dict = {"form": engine.form.name}
    if load:
        try:
            engine.load_checkpoint(folder / load)
        except zero.CheckpointError as error:
            return {"refused": str(error)}
        facts["at start"] = known(engine)
    facts["losses"] = train(engine, steps)
    rows = gather_bytes(grid.world, hashlib.sha256(bits(engine)).digest())
    facts["same everywhere"], facts["steps"] = len(set(rows)) == 1, engine.global_steps
    if save:
        engine.save_checkpoint(folder / save)
        facts["at end"] = known(engine)
    return facts


def known(engine: zero.Engine) -> dict[str, dict[str, list]]:
    """Whole tensors of what the optimizer knows of each parameter, by name.

    "owed": by all ranks together. "momentum_buffer": each replica's own; their mean, in float32, as a state has it.
    """
    names = {p: name for name, p in engine.sharding.held.named_parameters()}
    found: dict[str, dict[str, list]] = {}
    for p, tensors in _held(engine.optimizer):
        for what, x in tensors.items():
            if what in ("owed", "momentum_buffer"):
                engine.grid.transport.all_reduce(x).wait()
            if what == "momentum_buffer":
                x = x.div_(engine.grid.transport.world_size).float()
            if isinstance(p, DTensor):
                x = DTensor.from_local(x, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
            found.setdefault(names[p], {})[what] = x.tolist()
        found[names[p]]["itself"] = (p.full_tensor() if isinstance(p, DTensor) else p).tolist()
    return found


def _held(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The local elements of each parameter's state, float64."""
    found = []
    if not isinstance(optimizer, CompressedOptimizer):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            state, none = optimizer.state[p], torch.zeros_like(local(p))  # our Lamb has none of an empty shard
            moments = {what: local(state.get(what, none)) for what in ("exp_avg", "exp_avg_sq")}
            found.append((p, {what: x.double() for what, x in moments.items()}))
        return found
    for bucket in optimizer.buckets:
        flats = {name: flat.double() for name, flat in bucket.flat.items() if name not in ("anchor", "accumulated")}
        if bucket.frames is not None:
            m = torch.empty(bucket.layout.numel)
            optimizer.codec.decode(bucket.frames, m.view(optimizer.transport.world_size, -1))
            flats["momentum"] = m.double()
        if bucket.ef is not None:
            flats["owed"] = bucket.spread(bucket.ef.worker.double()) / bucket.hierarchy.nodes
            bucket.own_chunk(flats["owed"]).add_(bucket.ef.server.double())
        views = {name: bucket.layout.views(flat) for name, flat in flats.items()}
        found += [(p, {name: view[k].clone() for name, view in views.items()}) for k, p in enumerate(bucket.params)]
    return found
