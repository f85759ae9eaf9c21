"""What the ranks of test_pipeline.py do: many layouts in one start of processes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import pipeline_model
import torch
from errors import error_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from onebit import zero
from onebit.comm import PeerError, init
from onebit.comm.messages import gather_bytes
from onebit.model_parallel import local
from onebit.zero import grid as grids

STEPS, SAVED, FREEZE, MICRO_BATCHES, ROWS = 5, 3, 2, 2, 4
REPLICAS = 2
SAVING = {"optimizer": "OneBitAdam", "pipe": 2, "tensor": 2}
"""Of this case a checkpoint is kept, from which others go on, and the weights."""

PARAMS: Mapping[str, dict] = {
    "OneBitAdam": {"lr": 0.01, "freeze_step": FREEZE},
    "OneBitLamb": {"lr": 0.01, "freeze_step": FREEZE},
    "ZeroOneAdam": {"lr": 0.01, "var_freeze_step": 3, "var_update_scaler": 1, "local_step_clipper": 2},
    "AdamW": {"lr": 0.01},
}


def config_of(case: Mapping, data_ranks: int) -> dict:
    config: dict = {
        "train_micro_batch_size_per_gpu": ROWS // data_ranks,
        "gradient_accumulation_steps": case.get("micro_batches", MICRO_BATCHES),
        "steps_per_print": None,
        "wall_clock_breakdown": True,
        "gradient_clipping": case.get("clip", 0.0),
        "optimizer": {"type": case["optimizer"], "params": dict(PARAMS[case["optimizer"]])},
        "zero_optimization": {"stage": case.get("zero", 0)},
        "pipeline": {"stages": case.get("pipe", 1), **case.get("pipeline", {})},
        # Small buckets, so that there are several; blocks that halves of the parameters fill; gradients close to exact.
        "onebit": {
            "compression": "always",
            "bucket_cap_mb": 0.01,
            "block": 64,
            "check_replicas_every": 4,
            "warmup_codec": "int8",
        },
    }
    if "dtype" in case:
        config[case["dtype"]] = {"enabled": True}
        if case["dtype"] == "fp16":
            config["fp16"]["initial_scale_power"] = 8  # which these gradients fit in: no step is skipped
    return config


class Grids:
    """One for each shape, made when it is first needed."""

    def __init__(self) -> None:
        self._made: dict[tuple, grids.Grid] = {}

    def of(self, case: Mapping) -> grids.Grid:
        sizes = {axis: case.get(axis, 1) for axis in ("pipe", "shard", "tensor")}
        if (key := tuple(sizes.items())) not in self._made:
            self._made[key] = grids.start(**sizes)
        return self._made[key]

    def close(self) -> None:
        for grid in self._made.values():
            grid.close()


def start(case: Mapping, grid: grids.Grid) -> zero.Engine:
    model = pipeline_model.model(case.get("tied", True), **case.get("model", {}))
    config = config_of(case, grid.data[1])
    extra = {"tensor_plan": pipeline_model.PLAN} if case.get("tensor", 1) > 1 else {}
    return zero.initialize(model=model, config=config, grid=grid, **extra)[0]


def whole_parameters(engine: zero.Engine) -> dict[str, Tensor]:
    """Of this rank's stages, by name."""
    engine.synchronise()
    named = engine.module.named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named}


def trains(folder: str, cases: Sequence[dict]) -> None:
    """Each case: losses, and the parameters of this rank's stages at the end, to folder/CASE.RANK.

    SAVING: also a checkpoint and the weights to the folder, and what comes of going on in the same layout.
    """
    world = init("gloo", levels=1)
    made = Grids()
    for k, case in enumerate(cases):
        grid = made.of(case)
        engine = start(case, grid)
        batches = pipeline_model.micro_batches(*grid.data, engine.gradient_accumulation_steps(), ROWS)
        losses, more = [float(engine.train_batch(batches)) for _ in range(SAVED)], {}
        if case == SAVING:
            engine.save_checkpoint(folder)
            more["owed when saved"] = engine.optimizer.error_norm_ratio()  # type: ignore[attr-defined]
        losses += [float(engine.train_batch(batches)) for _ in range(SAVED, STEPS)]
        params = whole_parameters(engine)
        texts = gather_bytes(grid.transport, digest(params))
        found = {
            "losses": losses,
            "params": params,
            "same replicas": len(set(texts)) == 1,
            "phase": getattr(getattr(engine.optimizer, "stats", None), "phase", None),
            "clip": getattr(getattr(engine.optimizer, "stats", None), "clip_factor", None),
            "norm": engine.get_global_grad_norm(),
            "held": sum(local(p).numel() for p in engine.sharding.held.parameters()),
        }
        if case == SAVING:
            engine.save_16bit_model(folder)
            more["again"] = goes_on(folder, case, grid)
        torch.save(found | more, Path(folder) / f"{k}.{world.rank}")
    made.close()


def continues(folder: str, case: dict) -> dict:
    init("gloo", levels=1)
    grid = Grids().of(case)
    facts = goes_on(folder, case, grid)
    grid.close()
    return facts


def goes_on(folder: str, case: dict, grid: grids.Grid) -> dict:
    """From the folder's checkpoint to the last step."""
    engine = start(case, grid)
    found, _ = engine.load_checkpoint(folder)
    owed = engine.optimizer.error_norm_ratio()  # type: ignore[attr-defined]
    facts = {"found": found is not None, "steps": engine.global_steps, "owed": owed}
    batches = pipeline_model.micro_batches(*grid.data, MICRO_BATCHES, ROWS)
    for _ in islice(batches, SAVED * MICRO_BATCHES):
        pass
    facts["losses"] = [float(engine.train_batch(batches)) for _ in range(SAVED, STEPS)]
    facts["same replicas"] = len(set(gather_bytes(grid.transport, digest(whole_parameters(engine))))) == 1
    return facts


def digest(params: Mapping[str, Tensor]) -> bytes:
    joined = b"".join(name.encode() + p.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                      for name, p in sorted(params.items()))  # fmt: skip
    return hashlib.sha256(joined).digest()


def behaves(folder: str) -> dict:
    """What a pipeline says to inputs that are not as they were, and what it does not take."""
    init("gloo", levels=1)
    made, facts = Grids(), {}
    case = {"optimizer": "OneBitAdam", "pipe": 2}
    grid = made.of(case)
    engine = start(case, grid)
    few, many = (list(islice(pipeline_model.micro_batches(*grid.data, 2, rows), 2)) for rows in (2, 8))

    first = engine.eval_batch(iter(few))
    trained = engine.train_batch(iter(few))
    facts["eval is the loss before the step"] = float(first) == float(trained)
    facts["eval trains nothing"] = engine.global_steps == 1
    engine.eval()
    engine.eval_batch(iter(few))
    facts["stays in evaluation"] = not engine.module.training
    facts["it learns"] = float(engine.eval_batch(iter(few))) < float(first)
    facts["another shape"] = float(engine.train_batch(iter(many))) > 0
    facts["unequal"] = error_of(Exception, lambda: engine.train_batch(iter([few[0], many[0]])))
    facts["too few"] = error_of(Exception, lambda: engine.train_batch(iter(few[:1])))
    facts["forward"] = error_of(Exception, lambda: engine(few[0][0]))
    facts["step"] = error_of(Exception, engine.step)
    facts["no data"] = error_of(Exception, engine.train_batch)
    bad = [(torch.full_like(x, pipeline_model.VOCABULARY - 1), y) for x, y in few]
    facts["after errors"] = float(engine.train_batch(iter(bad))) > 0
    factor = float("nan") if grid.world.rank == 3 else 1.0
    damage = next(engine.module.parameters()).register_hook(lambda gradient: gradient * factor)
    before = engine.skipped_steps
    engine.train_batch(iter(few))
    damage.remove()
    facts["one rank's nan is skipped by all"] = engine.skipped_steps - before
    for name in ("OneBitAdam", "AdamW"):
        facts[f"{name} on shards at stage 0"] = error_of(
            Exception, lambda n=name: start({"optimizer": n}, made.of({"shard": 2}))
        )
    timed = case | {"pipeline": {"partition": "time"}}
    by_time = start(timed | {"model": {"example": few[0][0]}}, grid)
    facts["an example that does not fit"] = error_of(
        Exception, lambda: start(timed | {"model": {"example": torch.ones(2, 2)}}, grid)
    )
    facts["cut by time it evaluates"] = abs(float(by_time.eval_batch(iter(few))) - float(first)) < 1e-5
    facts["the loader goes on where the checkpoint was"] = reads_on_after_loading(folder, case, grid)
    torch.manual_seed(3)
    net = pipeline_model.Net()
    x, y = few[0]
    expected = pipeline_model.loss_of(net(x), y).item()
    model = zero.split(net, ["blocks.1"], x, loss_fn=pipeline_model.loss_of)
    again = zero.initialize(model=model, config=config_of(case, grid.data[1]), grid=grid)[0]
    losses = [float(again.train_batch(iter([few[0]] * 2))) for _ in range(2)]
    rows = [float(row.decode()) for row in gather_bytes(grid.transport, f"{expected:.12f}".encode()[:12])]
    facts["a module that was cut trains"] = abs(losses[0] - sum(rows) / len(rows)) < 1e-5 and losses[1] < losses[0]
    made.close()
    return facts


def reads_on_after_loading(folder: str, case: Mapping, grid: grids.Grid) -> bool:
    """Two steps, a checkpoint, two steps; back to it in the same engine, and the same two steps again."""
    tokens = torch.randint(
        pipeline_model.VOCABULARY, (64, pipeline_model.CONTEXT), generator=torch.Generator().manual_seed(1)
    )
    engine = zero.initialize(
        model=pipeline_model.model(),
        config=config_of(case, grid.data[1]),
        training_data=TensorDataset(tokens, tokens),
        grid=grid,
    )[0]
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(folder)
    first = [float(engine.train_batch()) for _ in range(2)]
    engine.load_checkpoint(folder)
    return first == [float(engine.train_batch()) for _ in range(2)]


def moves(folder: str) -> dict:
    """Optimizers from two stages of several chunks to none, or back: the losses, and those of staying."""
    init("gloo", levels=1)
    made, facts = Grids(), {}
    layouts = [{"pipe": 2, "pipeline": {"schedule": "interleaved"}}, {"pipe": 1}]
    for k, name in enumerate(PARAMS):
        place, losses = str(Path(folder) / name), []
        for case in layouts[:: 1 - k % 2 * 2]:
            case = {"optimizer": name, **case}
            grid = made.of(case)
            engine, loads = start(case, grid), len(losses) == 1
            if loads:
                engine.load_checkpoint(place)
            batches = pipeline_model.micro_batches(*grid.data, MICRO_BATCHES, ROWS)
            steps = range(SAVED, STEPS) if loads else range(STEPS)
            for _ in islice(batches, steps.start * MICRO_BATCHES):
                pass
            losses.append([])
            for step in steps:
                losses[-1].append(float(engine.train_batch(batches)))
                if not loads and step + 1 == SAVED:
                    engine.save_checkpoint(place)
        facts[name] = [losses[0][SAVED:], losses[1]]
    made.close()
    return facts


def moves_a_layer(folder: str) -> dict:
    """From three stages to three of which only the first has the same layers: its layers, and the losses, each twice.

    The losses are those of staying and those of moving.
    """
    init("gloo", levels=1)
    grid = grids.start(pipe=3, shard=1)
    sizes = [(4, 4), (4, 4), (4, 8), (8, 2), (2, 2), (2, 4)]
    batches = [(torch.randn(2, 4, generator=torch.Generator().manual_seed(k)), torch.zeros(2, 4)) for k in range(3)]
    facts: dict = {"layers": [], "losses": []}
    for cut in ("uniform", "parameters"):
        layers = [zero.LayerSpec(nn.Linear, *size) for size in sizes]
        model = zero.PipelineModule(layers, loss_fn=nn.functional.mse_loss, partition_method=cut)
        case = {"optimizer": "OneBitAdam", "pipe": 3, "micro_batches": 3, "pipeline": {"partition": cut}}
        config = config_of(case, 1) | {"train_micro_batch_size_per_gpu": 2}
        engine = zero.initialize(model=model, config=config, grid=grid)[0]
        if cut == "parameters":
            engine.load_checkpoint(folder)
        else:
            for _ in range(SAVED):
                engine.train_batch(iter(batches))
            engine.save_checkpoint(folder)
        facts["layers"].append([name for name, _ in engine.module.named_parameters()])
        facts["losses"].append([float(engine.train_batch(iter(batches))) for _ in range(SAVED, STEPS)])
    grid.close()
    return facts


class OfOneTuple(nn.Module):
    """A layer as DeepSpeed's scripts write it: one argument, a tuple with a mask in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = inputs
        return x + torch.tanh(self.linear(x)) * mask[:, None], mask


class OfTwo(OfOneTuple):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward((x, mask))


def loss_of_tuples(output: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
    """Labels of two shapes, of which the second has no rows."""
    (x, mask), (y, weight) = output, labels
    return weight * ((x - y).square() * mask[:, None]).mean()


class Carries(nn.Linear):
    """A layer that hands the target on, for the last one."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, target = inputs
        return super().forward(x), target


class OwnLoss(Carries):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return nn.functional.mse_loss(*super().forward(inputs))


def computes_its_loss() -> zero.PipelineModule:
    return zero.PipelineModule([zero.LayerSpec(kind) for kind in (*[Carries] * 3, OwnLoss)], partition_method="uniform")


def tuple_batches(count: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(2)
    return [
        ([torch.randn(4, 3, generator=generator), torch.rand(4, generator=generator) > 0.3],
         [torch.randn(4, 3, generator=generator), torch.tensor(1.0 + k)])
        for k in range(count)
    ]  # fmt: skip


def takes_tuples() -> dict:
    """Layers, inputs and labels that are tuples, on 1, 2 and 4 stages, and all that eval_batch() gives."""
    init("gloo", levels=1)
    made, facts, data = Grids(), {}, tuple_batches(4)

    def model() -> zero.PipelineModule:
        specs = [zero.LayerSpec(kind) for kind in (OfOneTuple, OfTwo, OfOneTuple, OfOneTuple)]
        return zero.PipelineModule(specs, loss_fn=loss_of_tuples, partition_method="uniform")

    (net,) = model().stages([range(4)])
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0), []
    with torch.no_grad():
        outputs = [net(*inputs) for inputs, _ in data]
    facts["expected outputs"] = [[x.tolist() for x in output] for output in outputs]
    facts["expected losses"] = [float(loss_of_tuples(o, labels)) for o, (_, labels) in zip(outputs, data, strict=True)]
    for _ in range(3):
        step = [loss_of_tuples(net(*inputs), labels) / 4 for inputs, labels in data]
        losses.append(float(sum(step)))
        sum(step).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    facts["expected"] = losses
    carried = [((x, target), target) for (x, _), (target, _) in data]
    (net,) = computes_its_loss().stages([range(4)])
    optimizer, own = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0), []
    for _ in range(3):
        mean = torch.stack([net(*inputs) for inputs, _ in carried]).mean()
        own.append(float(mean))
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    facts["own losses"] = own
    for name, pipe, block in (("one", 1, {}), ("two", 2, {}), ("four", 2, {"schedule": "interleaved"})):
        case = {"optimizer": "AdamW", "pipe": pipe, "pipeline": block, "micro_batches": 4}
        grid = made.of(case)
        config = config_of(case, grid.data[1])
        config["optimizer"]["params"]["weight_decay"] = 0.0
        engine = zero.initialize(model=model(), config=config, grid=grid)[0]
        found: dict = {"is last": engine.is_last_stage(), "mpu": placed(engine)}
        for key, options in EVALUATIONS.items():
            found[key] = as_lists(engine.eval_batch(iter(data), **options))
        found["refused"] = error_of(Exception, lambda e=engine: e.eval_batch(iter(data), reduce_output=None))
        found["unread"] = error_of(Exception, engine.train_batch)
        engine.set_dataloader(data)
        found["losses"] = [float(engine.train_batch()) for _ in range(2)]
        engine.set_dataiterator(iter(data))
        found["losses"].append(float(engine.train_batch()))
        found["at the end"] = error_of(Exception, engine.train_batch)
        engine = zero.initialize(model=computes_its_loss(), config=config, grid=grid)[0]
        found["own losses"] = [float(engine.train_batch(iter(carried))) for _ in range(2)]
        found["own losses"].append(float(engine.eval_batch(iter(carried))))
        facts[name] = found
    made.close()
    return facts


def placed(engine: zero.Engine) -> list[int]:
    """What the engine's mpu says, with the ranks' sum over the stages of a pipeline."""
    mpu = engine.mpu
    total = torch.tensor(1.0 + mpu.get_global_rank())
    torch.distributed.all_reduce(total, group=mpu.get_pipe_parallel_group())
    return [mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), mpu.get_stage_id(), int(total)]


EVALUATIONS: Mapping[str, dict] = {
    "mean": {},
    "mean of last": {"bcast_loss": False},
    "of one": {"num_micro_batches": 1},
    "of two": {"num_micro_batches": 2, "return_logits": True},
    "each loss": {"reduce_output": None, "bcast_loss": False},
    "outputs": {"reduce_output": None, "compute_loss": False},
    "mean output": {"compute_loss": False},
}


def as_lists(x: object) -> object:
    if isinstance(x, Tensor):
        return x.tolist()
    return [as_lists(each) for each in x] if isinstance(x, tuple | list) else x


def untrained_stage() -> str:
    init("gloo", levels=1)
    grid = grids.start(pipe=2, shard=1)
    layers = [nn.ReLU(), zero.LayerSpec(nn.Linear, 2, 2)]
    model = zero.PipelineModule(layers, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "OneBitAdam"}}
    said = error_of(ValueError, zero.initialize, model=model, config=config, grid=grid)
    grid.close()
    return said


def loses_a_stage(dies: int) -> dict:
    """Rank `dies` ends in the middle of a step. What the others say, and how long it took them."""
    world = init("gloo", timeout_s=10.0, levels=1)
    grid = grids.start(pipe=4, shard=1, timeout_s=10.0)

    class Dying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 6 and world.rank == dies:
                os._exit(17)
            return self.layer(x)

    model = zero.PipelineModule([zero.LayerSpec(Dying)] * 4, loss_fn=nn.functional.mse_loss)
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "optimizer": {"type": "OneBitAdam"}}
    engine = zero.initialize(model=model, config=config, grid=grid)[0]
    data = [(torch.ones(2, 4), torch.zeros(2, 4))] * 4
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            engine.train_batch(iter(data))
    except PeerError as error:
        return {"text": str(error), "missing": list(error.ranks), "seconds": time.monotonic() - began}
