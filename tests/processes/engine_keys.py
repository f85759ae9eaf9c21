"""What the ranks of test_zero_keys.py do: keys, forms of the same step, and resuming in a world of another size."""

from __future__ import annotations

import csv
import logging
import math
import os
from argparse import Namespace
from pathlib import Path

import torch
from engine_ranks import bits, config_of, dataset, net, train
from torch import nn

from onebit import zero
from onebit.comm import init
from onebit.comm.messages import gather_bytes
from onebit.zero import grid as grids

SAVED, MORE = 20, 20
ONE_BIT = {"compression": "always", "block": 64}
FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
FORMS = {
    "replicated": ({"stage": 0}, 1, "OneBitAdam"),
    "inter_node": ({"stage": 1}, 1, "OneBitAdam"),
    "intra_node": ({"stage": 3}, 2, "OneBitAdam"),
    "dense": ({"stage": 2}, 2, "AdamW"),
}
GRIDS: dict[int, grids.Grid] = {}


def start(form: str, model: nn.Module | None = None, *, micro: int = 4, sums: int = 2, **blocks: object) -> zero.Engine:
    """An engine in one of `FORMS` on a grid that suits it, made once."""
    stage, shards, name = FORMS[form]
    params = {"freeze_step": 8} if name == "OneBitAdam" else {}
    config = config_of(name, params, **{"onebit": ONE_BIT if name == "OneBitAdam" else {}, **blocks})
    config |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": sums}
    config["zero_optimization"] = stage | config.get("zero_optimization", {})
    shards = min(shards, int(os.environ["WORLD_SIZE"]))
    if shards not in GRIDS:
        GRIDS[shards] = grids.start(shard=shards)
    model = net() if model is None else model
    return zero.initialize(model=model, config=config, training_data=dataset(), grid=GRIDS[shards])[0]


def loss_of_all(engine: zero.Engine) -> float:
    """Over the whole dataset."""
    engine.eval()
    tokens, targets = dataset().tensors
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(engine(tokens).float(), targets))
    engine.synchronise()
    engine.train()
    return loss


def overflows() -> dict[str, dict]:
    """In fp16 the loss of the last rank is infinite at the third of four steps. The first's rate is 0."""
    facts = {}
    for form, more in (
        ("inter_node", {}),
        ("inter_node", {"zero_optimization": {"stage": 2}}),
        ("intra_node", {}),
        ("dense", {}),
    ):
        engine = start(form, fp16=FP16, **more)
        rank, world_size = engine.grid.world.rank, engine.grid.world.world_size
        batches = zero.data.forever(engine.loader)
        seen = []
        for step in range(4):
            for _ in range(2):
                tokens, targets = next(batches)
                loss = nn.functional.cross_entropy(engine(tokens).float(), targets)
                engine.backward(loss * math.inf if step == 2 and rank == world_size - 1 else loss)
                engine.step()
            rates = engine.get_lr()
            seen.append([engine.fp16_scale.value, engine.skipped_steps, rates[0], bits(engine)[:4000].hex()])
        facts[f"{form} {engine.config.zero_optimization.stage}"] = {"seen": seen}
    return facts


def one_big_batch() -> dict[str, list]:
    """Two micro-batches of two against one of four, dense, stages 0 and 2; SGD, so that the update is the gradient."""
    tokens, targets = dataset().tensors
    facts: dict[str, list] = {}
    for stage, shards in ((0, 1), (2, 2)):
        for clip in (0.0, 0.05):
            weights = []
            for sums in (1, 2):
                config = {
                    "train_micro_batch_size_per_gpu": 4 // sums,
                    "gradient_accumulation_steps": sums,
                    "zero_optimization": {"stage": stage},
                    "gradient_clipping": clip,
                }
                made, grid = net(), GRIDS[shards]
                first = [p.detach().clone() for p in made.parameters()]
                engine, *_ = zero.initialize(
                    model=made, config=config, optimizer=lambda params: torch.optim.SGD(params, lr=1.0), grid=grid
                )
                mine = torch.arange(4 * grid.world.rank, 4 * grid.world.rank + 4)
                for part in mine.chunk(sums):
                    engine.backward(nn.functional.cross_entropy(engine(tokens[part]), targets[part]))
                    engine.step()
                engine.synchronise()
                now = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in made.parameters()]
                weights.append(torch.cat([(a - b).reshape(-1) for a, b in zip(first, now, strict=True)]).double())
            # The oracle: the gradient of the mean loss over the samples of all ranks, in float64.
            plain = net().double()
            n = 4 * grid.world.world_size
            nn.functional.cross_entropy(plain(tokens[:n]), targets[:n]).backward()
            true = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
            norm = float(true.norm())
            expected = true * min(1.0, clip / norm) if clip else true
            gaps = [float((w - expected).abs().max()) for w in weights]
            facts[f"stage {stage}, clip {clip}"] = [norm, engine.get_global_grad_norm(), *gaps]
    return facts


# What is done in a window of two micro-batches: passes by number, step(), and zero_grad() of the one or the other.
PASSES = {
    "a pass too many": ["0", "1", "step", "2", "step"],
    "too many at the end": ["0", "step", "1", "2", "step"],
    **{f"begun, dropped by the {x}": ["0", f"drop {x}", "1", "step", "2", "step"] for x in ("engine", "model")},
    **{f"dropped by the {x}": ["0", "step", "1", f"drop {x}", "2", "step"] for x in ("engine", "model")},
}


def whole(engine: zero.Engine) -> list[torch.Tensor]:
    engine.synchronise()
    every = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in engine.sharding.held.parameters()]
    return [p.detach().clone() for p in every]


def passes() -> dict[str, float]:
    """How far an update is from the mean gradient of what was not dropped, in float64, relative to its largest."""
    tokens, targets = dataset().tensors
    facts = {}
    for stage, shards, bf16 in ((0, 1, False), (1, 2, False), (1, 2, True), (2, 2, False), (3, 2, False)):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
        }
        engine, *_ = zero.initialize(
            model=net(), config=config, optimizer=lambda params: torch.optim.SGD(params, lr=1.0), grid=GRIDS[shards]
        )
        drops, rank = {"engine": engine, "model": engine.module}, engine.grid.world.rank
        for name, script in PASSES.items():
            before = whole(engine)
            for action in script:
                if action.startswith("drop"):
                    drops[action.split()[1]].zero_grad()
                elif action == "step":
                    engine.step()
                else:
                    mine = torch.arange(4) + 4 * (rank + 4 * int(action))
                    engine.backward(nn.functional.cross_entropy(engine(tokens[mine]).float(), targets[mine]))
            moved = [a - b for a, b in zip(before, whole(engine), strict=True)]
            plain = net().double()
            behind = 1 + max((at for at, action in enumerate(script) if "drop" in action), default=-1)
            with torch.no_grad():
                for p, value in zip(plain.parameters(), before, strict=True):
                    p.copy_(value)
            for k in [int(action) for action in script[behind:] if action.isdigit()]:
                every = torch.arange(16) + 16 * k
                (nn.functional.cross_entropy(plain(tokens[every]), targets[every]) / 2).backward()
            pairs = [(m, p.grad) for m, p in zip(moved, plain.parameters(), strict=True)]
            largest = max(float(g.abs().max()) for _, g in pairs)
            gap = max(float((m - g).abs().max()) for m, g in pairs) / largest
            facts[f"stage {stage}{', bf16' * bf16}, {name}"] = gap
    return facts


def within_a_step() -> dict[str, object]:
    """Two micro-batches a step: saving is refused between them, and loading there is loading between steps."""
    engine, refused = start("intra_node", onebit=ONE_BIT | {"keep_checkpoints": 1}), []
    tokens, targets = (x[: 4 * 2] for x in dataset().tensors)

    def try_to_save() -> None:
        try:
            engine.save_checkpoint("within")
        except zero.CheckpointError as error:
            refused.append(str(error))

    def first_half() -> None:
        engine.backward(nn.functional.cross_entropy(engine(tokens), targets))
        try_to_save()
        engine.step()

    train(engine, 2)
    first_half()
    try_to_save()
    engine.step()
    for _ in range(2):
        try_to_save()
        train(engine, 1)
    after = []
    for is_within in (False, True):
        if is_within:
            first_half()
        engine.load_checkpoint("within")
        train(engine, 1)
        after.append(bits(engine))
    return {"refused": refused, "kept": sorted(os.listdir("within")), "loaded": after[0] == after[1]}


class Normed(nn.Module):
    """With BatchNorm, whose statistics each rank gathers of its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def normed() -> Normed:
    torch.manual_seed(5)
    return Normed()


def staged() -> zero.PipelineModule:
    return zero.PipelineModule(
        [zero.LayerSpec(nn.Embedding, 20, 8), zero.LayerSpec(nn.BatchNorm1d, 8), zero.LayerSpec(nn.Linear, 8, 5)],
        loss_fn=nn.functional.cross_entropy,
    )


def buffers() -> dict[str, list[bool]]:
    """Of each form: whether statistics were unlike, become the mean of the ranks', and come back from a checkpoint."""
    facts = {}
    for form in (*FORMS, "stages"):
        if form == "stages":
            config = config_of("OneBitAdam", onebit=ONE_BIT) | {"pipeline": {"stages": 2}}
            GRIDS[-2] = GRIDS.get(-2) or grids.start(pipe=2, shard=1)

            def begin(config: dict = config) -> zero.Engine:
                return zero.initialize(model=staged(), config=config, training_data=dataset(), grid=GRIDS[-2])[0]

        else:

            def begin(form: str = form) -> zero.Engine:
                return start(form, normed())

        engine = begin()
        for _ in range(2):
            engine.train_batch() if engine.pipeline else train(engine, 1)
        alike = engine.grid.shape.across(("replica", "shard"), engine.grid.world.rank)

        def rows(engine: zero.Engine = engine, alike: list[int] = alike) -> list[torch.Tensor]:
            held = [b.double().reshape(-1) for b in engine.module.buffers()]
            mine = torch.cat([*held, torch.zeros(40)])[:40].double()
            every = gather_bytes(engine.grid.world, mine.numpy().tobytes())
            return [torch.frombuffer(bytearray(every[rank]), dtype=torch.float64) for rank in alike]

        own, has_any = rows(), any(True for _ in engine.module.buffers())  # one of two stages has
        engine.eval()
        synced = rows()
        engine.train()
        train(engine, 1) if engine.pipeline is None else engine.train_batch()
        engine.save_checkpoint(f"buffers {form}")
        saved, again = rows(), begin()
        again.load_checkpoint(f"buffers {form}")
        facts[form] = [
            has_any or form == "stages",
            not has_any or not torch.equal(own[0][:16], own[1][:16]),
            all(torch.allclose(row[:16], torch.stack(own).mean(0)[:16], atol=1e-7) for row in synced),
            all(torch.equal(row, synced[0]) for row in synced),
            all(torch.equal(row, saved[0]) for row in (*saved, *rows(again))),
            not has_any or not torch.equal(saved[0], synced[0]),
        ]
    return facts


def first_steps_of_stages() -> dict[str, object]:
    """What a step with stages leaves in statistics and in the stream of random numbers: the first, and the second."""
    GRIDS[-2] = GRIDS.get(-2) or grids.start(pipe=2, shard=1)
    config = config_of("OneBitAdam", onebit=ONE_BIT) | {"pipeline": {"stages": 2}}
    layers = [zero.LayerSpec(nn.Embedding, 20, 8), zero.LayerSpec(nn.BatchNorm1d, 8), zero.LayerSpec(nn.Dropout, 0.5),
              zero.LayerSpec(nn.BatchNorm1d, 8), zero.LayerSpec(nn.Linear, 8, 5)]  # fmt: skip
    model = zero.PipelineModule(layers, loss_fn=nn.functional.cross_entropy, partition_method="uniform")
    engine = zero.initialize(model=model, config=config, training_data=dataset(), grid=GRIDS[-2])[0]
    batches = zero.data.forever(engine.loader)
    read = [next(batches) for _ in range(4)]  # a loader draws a number when it begins
    streams, counts = [], []
    for step in range(2):
        torch.manual_seed(0)
        engine.train_batch(iter(read[2 * step :]))
        streams.append(torch.get_rng_state())
        held = dict(engine.module.named_buffers())
        counts.append([int(x) for name, x in held.items() if name.endswith("num_batches_tracked")])
    finite = all(bool(x.isfinite().all()) for x in engine.module.buffers())
    return {"alike": torch.equal(*streams), "counts": counts, "finite": finite}


def offloads() -> dict[str, bool]:
    """With shards, gradients and state in host memory, where they are already, and in files: the same bits."""
    facts = {}
    for form in ("intra_node", "dense"):
        results = []
        places = [("none", 1.0), ("cpu", 1.0), ("nvme", 1.0), ("cpu", 0.3)]
        for device, ratio in places if form == "dense" else places[:3]:
            block = {"device": device, "ratio": ratio, "pin_memory": False, "nvme_path": "nvme"}
            offload = {"offload_optimizer": block}
            engine = start(form, bf16={"enabled": True}, gradient_clipping=1.0, zero_optimization=offload)
            train(engine, 4)
            results.append(bits(engine))
        facts[form] = all(result == results[0] for result in results)
    return facts


def parameters_in_files() -> dict[str, bool]:
    """Two ranks with files of all parameters each, and resident ones that are sharded: the same bits, and checkpoints.

    The sum of two is one in any order; stage 1 adds micro-batches up before it is taken, as files do.
    """
    held = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "nvme"}}
    facts = {}
    for dtype in ("fp32", "bf16"):
        more = {} if dtype == "fp32" else {"bf16": {"enabled": True}}
        resident = start("dense", zero_optimization={"stage": 1}, gradient_clipping=0.0, **more)
        away = start("dense", zero_optimization=held, **more)
        results = []
        for engine in (resident, away):
            train(engine, 4)
            engine.save_checkpoint(f"{dtype} {engine.config.zero_optimization.stage}")
            train(engine, 2)
            results.append(whole_bits(engine, dtype))
        is_away = isinstance(away.optimizer, zero.Offload) and away.optimizer.stats.read_bytes > 0
        facts[f"{dtype}: in files"] = is_away and not isinstance(resident.optimizer, zero.Offload)
        facts[f"{dtype}: as resident"] = results[0] == results[1]
        facts[f"{dtype}: on both ranks"] = len(set(gather_bytes(away.grid.world, results[1]))) == 1
        for there, here in (("3", held), ("1", held), ("3", {"stage": 1})):
            again = start("dense", zero_optimization=here, **more)
            again.load_checkpoint(f"{dtype} {there}")
            train(again, 2)
            facts[f"{dtype}: {there} goes on in {again.config.zero_optimization.stage}"] = (
                whole_bits(again, dtype) == results[0]
            )
    return facts


def whole_bits(engine: zero.Engine, dtype: str) -> bytes:
    """Of the weights in the type computed in."""
    kept = torch.float32 if dtype == "fp32" else torch.bfloat16
    whole = [x.to(kept).contiguous() for x in engine.module_state_dict().values()]
    return b"".join(x.view(torch.uint8).numpy().tobytes() for x in whole)


def given_parameters() -> dict[str, object]:
    """Parameters and groups of the plain model, behind sharding; the configuration through args."""
    model = net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [(name, p) for name, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for _, p in others], "weight_decay": 0.0}]
    path = Path("args.json")
    config = config_of("AdamW", zero_optimization={"stage": 3})
    if int(os.environ["RANK"]) == 0:
        import json

        path.write_text(json.dumps(config))
    GRIDS[2].world.all_reduce(torch.zeros(1)).wait()
    engine, optimizer, *_ = zero.initialize(
        model=model, args=Namespace(deepspeed_config=str(path)), model_parameters=groups, training_data=dataset(),
        grid=GRIDS[2],
    )  # fmt: skip
    names = {id(p): name for name, p in model.named_parameters()}
    found = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    before = bits(engine)
    train(engine, 3)
    return {
        "found": found,
        "asked": [[name for name, p in net().named_parameters() if (p.dim() > 1) == big] for big in (True, False)],
        "decays": [group["weight_decay"] for group in optimizer.param_groups],
        "moves": bits(engine) != before,
    }


def monitors() -> dict[str, object]:
    """Three steps with every key that tells of the run, in the working directory."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onebit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    monitor = {"enabled": True, "output_path": "logs", "job_name": "run"}
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = start(
        "intra_node", fp16=FP16, csv_monitor=monitor, tensorboard=monitor, wall_clock_breakdown=True, dump_state=True,
        steps_per_print=2, zero_optimization=gathers, comet={"enabled": False, "api_key": "a secret"},
    )  # fmt: skip
    assert not any("a secret" in line for line in lines)
    rates, losses = [], []
    batches = zero.data.forever(engine.loader)
    for _ in range(3):
        rates.append(engine.get_lr()[0])
        own = []
        for _ in range(2):
            tokens, targets = next(batches)
            loss = nn.functional.cross_entropy(engine(tokens).float(), targets)
            own.append(float(loss))
            engine.backward(loss)
            engine.step()
        losses.append(sum(own) / 2)
    engine.save_checkpoint("gathered")
    logger.removeHandler(handler)
    rows = {}
    for tag in ("train_loss", "lr", "loss_scale", "skipped_steps"):
        path = Path(f"logs/run/Train_Samples_{tag}.csv")
        rows[tag] = list(csv.reader(path.open())) if engine.grid.world.rank == 0 else []
    import_into = net()
    zero.import_weights(import_into, "gathered/model.safetensors", engine.grid.world)
    far = max(
        float((a - b.full_tensor()).abs().max())
        for a, b in zip(import_into.parameters(), engine.module.parameters(), strict=True)
    )
    return {
        "rows": rows,
        "rates": rates,
        "losses": losses,
        "events": [path.name for path in Path("logs/run").glob("events.*")],
        "lines": lines,
        "weights are off by": far,
    }


def keys(folder: str) -> dict[str, object]:
    """Everything of four ranks, and checkpoints for `resumes_with_two`."""
    init("gloo", levels=1)
    os.chdir(folder)
    facts: dict[str, object] = {
        "overflow": overflows(),
        "offload": offloads(),
        "groups": given_parameters(),
        "monitors": monitors(),
        "big batch": one_big_batch(),
        "passes": passes(),
        "within a step": within_a_step(),
        "buffers": buffers(),
        "first steps": first_steps_of_stages(),
        "delay": delayed(),
    }
    ends, phases = {}, {}
    for form in ("replicated", "inter_node", "intra_node"):
        engine = start(form, sums=1)
        train(engine, SAVED)
        engine.save_checkpoint(form)
        saved = loss_of_all(engine)
        train(engine, MORE)
        ends[form] = [saved, loss_of_all(engine)]
        phases[form] = engine.optimizer.stats.phase
    facts["ends"], facts["phases"] = ends, phases
    GRIDS[1].close()
    return facts


def delayed() -> dict[str, object]:
    """A step is under way where an evaluation begins, and where a checkpoint is taken: both land it."""
    engine = start("intra_node", onebit=ONE_BIT | {"delay": 1})
    facts: dict[str, object] = {}
    for name, steps, act in (("eval", 10, engine.eval), ("save", 2, lambda: engine.save_checkpoint("delayed"))):
        engine.train()
        train(engine, steps)
        was_under_way = engine.optimizer.step_under_way is not None
        act()
        facts[name] = [was_under_way, engine.optimizer.step_under_way is None]
    other = start("intra_node", onebit=ONE_BIT | {"delay": 1})
    other.load_checkpoint("delayed")
    facts["loaded"] = bits(other) == bits(engine)
    return facts


def resumes_with_two(folder: str) -> dict[str, object]:
    """Two ranks with twice the batch each go on from where four were."""
    init("gloo", levels=1)
    os.chdir(folder)
    facts: dict[str, object] = {}
    for form, saved in (
        ("replicated", "replicated"),
        ("inter_node", "inter_node"),
        ("intra_node", "intra_node"),
        ("replicated", "intra_node"),
    ):
        engine = start(form, sums=1, micro=8)
        engine.load_checkpoint(saved)
        loaded = loss_of_all(engine)
        train(engine, MORE)
        facts[f"{saved} to {form}"] = [loaded, loss_of_all(engine), engine.global_steps]
    facts["parameters in files"] = parameters_in_files()
    try:
        start("replicated", sums=1, micro=8).load_checkpoint("inter_node")
    except zero.CheckpointError as error:
        facts["refused"] = str(error)
    for grid in GRIDS.values():
        grid.close()
    return facts
