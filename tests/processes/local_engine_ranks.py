"""What the ranks of test_local_engine.py do: the engine in the form "local", and the same by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from engine_ranks import config_of, dataset, net, train
from family import same
from tensor_cases import SIZE, gpt, next_byte_loss, windows
from torch import Tensor, nn
from train.layouts import tensor_plan

import onebit
from onebit import zero
from onebit.comm import init
from onebit.comm.messages import gather_bytes
from onebit.model_parallel import local
from onebit.zero import grid as grids

EVERY, STEPS, SAVED = 3, 8, 5
_GRIDS: dict[int, grids.Grid] = {}


def grid_of(shards: int, pipe: int = 1) -> grids.Grid:
    """Of so many shards, made once."""
    if (key := 100 * pipe + shards) not in _GRIDS:
        _GRIDS[key] = grids.start(shard=shards, pipe=pipe)
    return _GRIDS[key]


def config(name: str = "AdamW", stage: int = 0, rounds: dict | None = None, **blocks: object) -> dict:
    """Of a run in rounds of `EVERY` steps."""
    ours = {"block": 64, "check_replicas_every": 1, "local_steps": {"every": EVERY, **(rounds or {})}}
    return config_of(name, zero_optimization={"stage": stage}, onebit=ours, **blocks)


def start(made: dict, shards: int = 1, model: nn.Module | None = None, **more: Any) -> zero.Engine:
    """An engine of this configuration."""
    given = {"model": net() if model is None else model, "training_data": dataset(), "grid": grid_of(shards)}
    return zero.initialize(config=copy.deepcopy(made), **given | more)[0]


def own(engine: zero.Engine) -> list[Tensor]:
    """What this rank holds: parameters, anchors and both errors, each a copy; of padding nothing is kept."""
    engine.sharding.release()
    optimizer = cast(onebit.LocalSteps, engine.optimizer)
    held = [local(p).detach() for p in optimizer.buckets.params]
    for bucket in optimizer.buckets:
        held += [*bucket.layout.views(bucket.anchor), bucket.ef.worker, bucket.ef.server]
    return [x.clone() for x in held]


def agreed(engine: zero.Engine) -> tuple[list[float], float]:
    """The anchors; and the sum of what is owed, which the next rounds deliver."""
    optimizer = cast(onebit.LocalSteps, engine.optimizer)
    anchors = [view.reshape(-1) for bucket in optimizer.buckets for view in bucket.layout.views(bucket.anchor)]
    errors = sum(float(bucket.ef.worker.double().sum()) for bucket in optimizer.buckets)
    servers = sum(float(bucket.ef.server.double().sum()) for bucket in optimizer.buckets)
    owed = torch.tensor([errors / optimizer.transport.world_size + servers], dtype=torch.float64)
    engine.grid.transport.all_reduce(owed).wait()
    return torch.cat(anchors).tolist(), float(owed)


def by_hand() -> dict[str, bool]:
    """Without the engine: the same inner optimizer, schedule and batches; stage 0, and two shards at stage 2."""
    found = {}
    for shards, stage, clip in ((1, 0, 0.5), (2, 2, 0.0)):
        made = config(stage=stage, gradient_accumulation_steps=1, gradient_clipping=clip)
        made["gradient_accumulation_steps"] = 1
        engine = start(made, shards)
        train(engine, STEPS)
        grid, model = grid_of(shards), net()
        if shards > 1:
            zero.fsdp.shard(model, grid, stage)
        optimizer = onebit.LocalSteps(
            torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01),
            EVERY,
            codec=onebit.comm.SignCodec(64),
            check_replicas_every=1,
            transport=grid.transport,
            model_parallel_group=grid.model_parallel_group,
            model=model,
        )
        read = zero.read_config(made, world_size=grid.world.world_size)
        assert read.scheduler is not None
        schedule = zero.config.whole.build_scheduler(read.scheduler, optimizer)
        batches = zero.data.forever(start(made, shards).loader)
        for _ in range(STEPS):
            tokens, targets = next(batches)
            nn.functional.cross_entropy(model(tokens), targets).backward()
            if clip:
                norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        mine = [local(p).detach() for p in model.parameters()]
        theirs = [local(p).detach() for p in engine.sharding.held.parameters()]
        gap = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True) if a.numel())
        found[f"{shards} shards"] = gap <= (1e-6 if clip else 0.0)  # torch's norm is summed in another order
        if clip:
            found["norm"] = abs(norm - cast(float, engine.get_global_grad_norm())) < 1e-5 * norm
    return found


def as_dense() -> dict[str, float]:
    """SGD in rounds of one step, in full, is SGD of averaged gradients; the largest gap, at stages 0 and 2."""
    found = {}
    for shards, stage in ((1, 0), (2, 2)):
        weights = []
        for rounds in ({"every": 1, "codec": "fp32"}, {"every": 0}):
            made = config(stage=stage, rounds=rounds)
            del made["optimizer"], made["scheduler"]
            engine = start(made, shards, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
            train(engine, 4)
            weights.append([local(p).detach() for p in engine.sharding.held.parameters()])
        assert engine.form.name == "dense"
        found[f"stage {stage}"] = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True) if a.numel())
    return found


def resumes(folder: str, cases: Sequence[tuple[dict, int]]) -> list[dict]:
    """Each case to the end, and again from a checkpoint amid a round, which the first run has written as well."""
    facts = []
    for k, (made, shards) in enumerate(cases):
        plain = start(made, shards)
        losses = train(plain, STEPS)
        first = start(made, shards)
        train(first, SAVED)
        before, shared = own(first), agreed(first)
        place = Path(folder) / str(k)
        first.save_checkpoint(place, None, {"note": first.grid.world.rank}, in_background=k % 2 == 1)
        first.wait_for_checkpoint()
        is_untouched = same(before, own(first))
        second = start(made, shards)
        _, client = second.load_checkpoint(place)
        is_under_way = any(part.is_under_way for part in cast(onebit.LocalSteps, second.optimizer).fragments)
        restored = is_under_way or same(before, own(second))  # errors of what is under way are taken when it lands
        train(second, STEPS - SAVED)
        optimizer = cast(onebit.LocalSteps, second.optimizer)
        facts.append(
            {
                "form": second.form.name,
                "agreed": shared,
                "losses": losses,
                "untouched": is_untouched,
                "restored": restored,
                "same bits": same(own(second), own(plain)),
                "client": client == {"note": first.grid.world.rank},
                "rounds": optimizer.stats.rounds,
                "differ": _differ(second),
                "alike behind eval": not _differ(second.eval()),
                "rates": second.get_lr() == plain.get_lr(),
            }
        )
    return facts


def _differ(engine: zero.Engine) -> bool:
    """Whether replicas hold other parameters than this one."""
    engine.sharding.release()
    flat = torch.cat([local(p).detach().reshape(-1) for p in engine.sharding.held.parameters()])
    rows = gather_bytes(engine.grid.transport, flat.numpy().tobytes())
    return len(set(rows)) > 1


def overflows() -> dict[str, list]:
    """In fp16 the loss of the last rank is infinite at the third of six steps: its replica alone leaves it out."""
    made = config(stage=3, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, gradient_clipping=1.0)
    engine = start(made, 2)
    assert engine.loader is not None
    batches, seen = zero.data.forever(engine.loader), []
    for step in range(6):
        for _ in range(2):
            tokens, targets = next(batches)
            loss = nn.functional.cross_entropy(engine(tokens).float(), targets)
            is_bad = step == 2 and engine.grid.world.rank == 3
            engine.backward(loss * float("inf") if is_bad else loss)
            engine.step()
        seen.append([engine.fp16_scale.value, engine.skipped_steps, engine.get_lr()[0], engine.get_global_grad_norm()])
    optimizer = cast(onebit.LocalSteps, engine.optimizer)
    return {"seen": seen, "missed": [optimizer.stats.missed_rounds], "differ": [_differ(engine)]}


def others(folder: str) -> dict[str, Any]:
    """Into other forms and grids, weights alone, the whole weights of a file, and what DeepSpeed's names give."""
    place, made = Path(folder) / "0", config(rounds={"codec": "int8"})
    engine, found = start(made), {}
    engine.load_checkpoint(place, load_optimizer_states=False)
    anchors = [p.detach().clone() for p in engine.sharding.held.parameters()]
    dense = start(config_of("AdamW", zero_optimization={"stage": 2}), 2)
    dense.load_checkpoint(place, load_optimizer_states=False)
    whole = [cast(Any, p).full_tensor() for p in dense.sharding.held.parameters()]
    found["weights"] = same(anchors, whole) and not _differ(engine)
    for what, into in {"form": dense, "grid": start(config(stage=2), 2), "inner": start(config("Lamb"))}.items():
        try:
            into.load_checkpoint(place)
        except zero.CheckpointError as error:
            found[what] = str(error)
    losses = train(engine, STEPS)
    found["trains"] = losses[-1] < losses[0]
    sent = engine.grid.transport.sent_bytes
    engine.save_16bit_model(folder, "local.safetensors")
    found["a round"] = engine.grid.transport.sent_bytes > sent and not _differ(engine)
    p = next(iter(engine.sharding.held.parameters()))
    found["moments"] = engine.optimizer.state[p]["exp_avg"].shape == p.shape
    return found


def all_of_four(folder: str, cases: Sequence[tuple[dict, int]]) -> dict[str, Any]:
    """One start of processes."""
    init("gloo", levels=1)
    found = {
        "by hand": by_hand(),
        "as dense": as_dense(),
        "resumes": resumes(folder, cases),
        "overflows": overflows(),
        "others": others(folder),
        "pipeline": pipeline(folder),
        "tensor": tensor_slices(),
    }
    for grid in _GRIDS.values():
        grid.close()
    return found


def tensor_slices() -> dict[str, Any]:
    """Two replicas of two tensor ranks, and of two shards that read the same: the losses of each; what differs."""
    found: dict[str, Any] = {}
    for tensor, grid in ((2, grids.start(shard=1, tensor=2)), (1, grid_of(2))):
        made = config(stage=0 if tensor == 2 else 2, rounds={"every": 2, "codec": "fp32"}, gradient_clipping=0.5)
        made["gradient_accumulation_steps"], losses = 1, []
        plan = tensor_plan(SIZE.heads, 2) if tensor == 2 else None
        engine = start(made, model=gpt(), grid=grid, tensor_plan=plan, training_data=None)
        for step in range(5):
            batch = windows(step, grid.coordinates["replica"], 0)
            loss = next_byte_loss(engine(batch[:, :-1]), batch)
            engine.backward(loss)
            engine.step()
            losses += [float(loss.detach()), cast(float, engine.get_global_grad_norm())]
        found[f"{tensor}"] = losses
        if tensor == 2:
            params = cast(onebit.LocalSteps, engine.optimizer).buckets.params
            names = [str(k) for k in range(len(params))]
            found["divergence"] = grid.model_parallel_group.find_divergence(params, names)
            found["differ"] = _differ(engine)
            grid.close()
    return found


def pipeline(folder: str) -> dict[str, Any]:
    """Two stages, two replicas; the embedding is tied to the head."""

    def staged() -> zero.PipelineModule:
        torch.manual_seed(3)
        return zero.PipelineModule(
            [
                zero.TiedLayerSpec("embed", nn.Embedding, 20, 8),
                zero.LayerSpec(nn.Linear, 8, 8),
                zero.LayerSpec(nn.Tanh),
                zero.TiedLayerSpec("embed", nn.Embedding, 20, 8, forward_fn=lambda layer, x: x @ layer.weight.T),
            ],
            loss_fn=nn.functional.cross_entropy,
        )

    made = config(gradient_clipping=0.5) | {"pipeline": {"stages": 2}}
    grid = grid_of(1, pipe=2)

    def begin() -> zero.Engine:
        return start(made, model=cast(nn.Module, staged()), grid=grid)

    def take(engine: zero.Engine, steps: int) -> list[float]:
        return [float(engine.train_batch()) for _ in range(steps)]

    plain, first, second = begin(), begin(), begin()
    losses = take(plain, STEPS)
    take(first, SAVED)
    first.save_checkpoint(Path(folder) / "stages")
    second.load_checkpoint(Path(folder) / "stages")
    take(second, STEPS - SAVED)
    tied = [p for p in plain.module.parameters() if p.shape == (20, 8)]
    rows = gather_bytes(grid.transports["pipe"], tied[0].detach().numpy().tobytes())
    return {
        "losses": losses,
        "norm": plain.get_global_grad_norm(),
        "same bits": same(own(plain), own(second)),
        "tied": len(set(rows)) == 1,
        "differ": _differ(plain),
        "evaluates": float(plain.eval_batch()) > 0 and not _differ(plain),
    }


def goes_on(folder: str, made: dict) -> dict[str, Any]:
    """In a world of another size: anchors to the bit, what is owed in sum; trains on."""
    init("gloo", levels=1)
    engine = start(made)
    engine.load_checkpoint(Path(folder) / "0")
    found = {"agreed": agreed(engine), "steps": engine.global_steps, "losses": train(engine, 4)}
    grid_of(1).close()
    return found
