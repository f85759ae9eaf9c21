"""What the ranks of test_sequence_engine.py do: two sequences at a time, each on two of four ranks."""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

import torch
from errors import error_of
from sequence_ranks import decoder
from torch import nn
from torch.utils.data import TensorDataset

from onebit import zero
from onebit.comm import init
from onebit.zero import grid as grids
from onebit.zero.sparse_attention import replace_attention

STEPS, RESUMED, ROWS, LENGTH = 2, 1, 8, 21
DENSE = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-3, "eps": 1e-4, "freeze_step": 99}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    **{f"stage {stage}": (stage, DENSE, {}) for stage in (0, 2, 3)},
    "tensor": (2, DENSE, {"tensor": 2, "ranks_per_node": 4}),
    "heads divided by the ranks of a host": (2, DENSE, {"sequence": {"ulysses_degree": "auto"}}),
    "one bit in nodes": (2, ONE_BIT, {"warmup_codec": "fp32", "ranks_per_node": 2}),
    "one bit replicated": (0, ONE_BIT, {"warmup_codec": "fp32"}),
    "sparse": (2, DENSE, {}),
    "local steps": (1, DENSE, {"local_steps": {"every": 1, "codec": "fp32"}, "ranks_per_node": 2}),
}
"""Stage, optimizer and the block "onebit": all but local steps equal AdamW in one process."""
RESUMING = ("stage 2", "one bit in nodes")
LAYOUTS = CASES | {"stage 1": (1, DENSE, {}), "heads divided": (2, DENSE, {"sequence": {"ulysses_degree": 2}})}


SPARSE = {"mode": "bslongformer", "block": 2}


def dataset() -> TensorDataset:
    return TensorDataset(torch.randint(1, 97, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1)))


def config_of(case: str, sequence: int | None) -> dict[str, Any]:
    stage, optimizer, ours = LAYOUTS[case]
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "sequence_parallel_size": sequence,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        "onebit": ours,
    }


def start(case: str, sequence: int | None, **given: Any) -> zero.DeepSpeedEngine:
    config = config_of(case, sequence) | ({"sparse_attention": SPARSE} if case == "sparse" else {})
    return zero.initialize(model=decoder(), config=config, training_data=dataset(), **given)[0]


def train(engine: zero.DeepSpeedEngine, steps: int) -> list[float]:
    losses, batches = [], zero.data.forever(engine.loader)
    for _ in range(2 * steps):
        (ids,) = next(batches)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def two_by_two(folder: str) -> None:
    """Write what this rank finds to a file."""
    grids.start = functools.cache(grids.start)  # engines of one layout share its groups
    world = init("gloo", levels=1)
    facts: dict[str, Any] = {}
    for case in CASES:
        engine = start(case, 2)
        shape = engine.grid.shape
        losses = train(engine, STEPS)
        facts[case] = {
            "weights": engine.module_state_dict(),
            "loss": losses,
            "data": (engine.grid.data, engine.dp_world_size, engine.seq_dp_world_size * shape.size("tensor")),
            "sequence": (engine.sequence_parallel_size, engine.get_sequence_parallel_group().size()),
        }
        if case in RESUMING:
            first, second = start(case, 2), start(case, 2)
            train(first, RESUMED)
            first.save_checkpoint(f"{folder}/{case}")
            second.load_checkpoint(f"{folder}/{case}")
            again = train(second, STEPS - RESUMED) == losses[2 * RESUMED :]
            pairs = zip(second.module_state_dict().values(), facts[case]["weights"].values(), strict=True)
            facts[case]["resumed"] = again and all(torch.equal(a, b) for a, b in pairs)
        if case == "stage 2":
            for sequence, layout in ((1, case), (4, "heads divided")):
                other = start(layout, sequence)
                other.load_checkpoint(f"{folder}/{case}")
                train(other, STEPS - RESUMED)
                facts[f"{case}, then {sequence}"] = {"weights": other.module_state_dict()}
    with_grid = start("stage 1", None, grid=grids.start(timeout_s=30.0, shard=4, sequence=2))
    train(with_grid, STEPS)
    facts["stage 1 on a grid"] = {"weights": with_grid.module_state_dict()}
    in_batches = start("stage 2", 2)
    batches = ({"input_ids": ids, "labels": ids} for (ids,) in zero.data.forever(in_batches.loader))
    facts["evaluated"] = float(in_batches.eval_batch(iter(list(islice(batches, 2)))))
    in_batches = start("stage 2", 2)
    batches = ({"input_ids": ids, "labels": ids} for (ids,) in zero.data.forever(in_batches.loader))
    facts["by train_batch"] = {"loss": [float(in_batches.train_batch(batches)) for _ in range(STEPS)]}
    facts["by train_batch"]["weights"] = in_batches.module_state_dict()
    facts["by hand"] = by_hand(grids.start(timeout_s=30.0, shard=4))
    engine = start("stage 1", None, mesh_param=(2, 2))
    facts["mesh"] = engine.grid.shape.sequence
    torch.save(facts | {"refused": refused()}, f"{folder}/{world.rank}.pt")


def by_hand(grid: grids.Grid) -> dict[str, Any]:
    """Windows of five tokens over all ranks, of which some see nothing of others. Each is a rank of the data, too."""
    model = zero.sequence_parallel(decoder(in_windows=True), grid.world)
    config = {"train_batch_size": 4, "optimizer": DENSE, "zero_optimization": {"stage": 3}}
    engine = zero.initialize(model=model, config=config, grid=grid)[0]
    for ids in dataset().tensors[0].split(ROWS)[:STEPS]:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return {"weights": engine.module_state_dict()}


def refused() -> dict[str, str]:
    words: dict[str, str] = {}

    def note(name: str, act: Any) -> None:
        words[name] = error_of((ValueError, RuntimeError), act)

    def local(ours: dict[str, Any], optimizer: dict[str, Any]) -> Any:
        config = config_of("stage 0", 2) | {"onebit": ours, "optimizer": optimizer}
        return lambda: zero.initialize(model=decoder(), config=config)

    engine = start("stage 1", 2)
    rank = engine.grid.world.rank
    ids = torch.ones(2, LENGTH + rank % 2, dtype=torch.int64)
    note("lengths", lambda: engine(input_ids=ids, labels=ids))
    note("group", lambda: engine.data_parallel_group)
    own = {"model": nn.Linear(2, 2), "config": config_of("stage 1", 2)}
    note("own attention", lambda: zero.initialize(**own))
    other = nn.Linear(2, 2)
    other.config = {"heads": 4}
    shared = config_of("heads divided by the ranks of a host", 2)
    note("heads", lambda: zero.initialize(model=other, config=shared))
    note("ranks", lambda: start("stage 1", 3))
    note("local", local({"local_steps": {"every": 2}}, DENSE))
    note("0/1", local({}, {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "local_step_clipper": "auto"}}))
    split = zero.sequence_parallel(decoder(), engine.grid.sequence)
    note("twice", lambda: zero.initialize(model=split, config=config_of("stage 1", 2), grid=engine.grid))
    by_head = {"mode": "fixed", "block": 4, "different_layout_per_head": True}
    sparse = config_of("heads divided", 2) | {"sparse_attention": by_head}
    note("sparse", lambda: zero.initialize(model=decoder(), config=sparse))
    sliced, grid = config_of("stage 0", None), grids.start(timeout_s=30.0, shard=1, tensor=2, sequence=2)
    note("slices", lambda: zero.initialize(model=decoder(), config=sliced | {"sparse_attention": by_head}, grid=grid))
    schedule = {"min_value": 4, "max_value": LENGTH, "schedule_config": {"require_steps": 2, "seq_per_step": 1}}
    kept = {"enabled": True, "layer_name": "model.layers.*", "random_ltd_schedule": schedule}
    efficiency = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": kept}}
    routed = config_of("stage 1", 2) | {"data_efficiency": efficiency}
    note("dropped", lambda: zero.initialize(model=decoder(), config=routed))
    apart = {"mode": "fixed", "block": 1, "num_local_blocks": 1, "num_global_blocks": 0}
    blind = zero.initialize(model=decoder(), config=config_of("stage 1", 2) | {"sparse_attention": apart})[0]
    ids = torch.ones(2, LENGTH, dtype=torch.int64)
    note("blind", lambda: blind(input_ids=ids, labels=ids))
    return words


def alone(*, is_sparse: bool = False, in_windows: bool = False) -> dict[str, torch.Tensor]:
    """The same batches by torch, in one process."""
    model = decoder(in_windows=in_windows)
    if is_sparse:
        replace_attention(model, SPARSE)
    loader = zero.data.ShardedLoader(dataset(), ROWS, rank=0, world_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    batches = dataset().tensors[0].split(ROWS) if in_windows else (ids for (ids,) in loader)
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
