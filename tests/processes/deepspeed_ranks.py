"""What the ranks of test_deepspeed.py do: DeepSpeed's names of a running engine, in every form."""

from __future__ import annotations

import copy
import json
import logging
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from engine_ranks import bits, net
from errors import error_of
from safetensors.torch import load_file
from torch import Tensor, nn

import onebit.zero as deepspeed
from onebit.zero import grid as grids
from onebit.zero.deepspeed import zero_to_fp32
from onebit.zero.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from onebit.zero.runtime.zero.partition_parameters import ZeroParamStatus
from onebit.zero.runtime.zero.utils import is_zero_param

ONE_BIT = {"compression": "always", "block": 64, "warmup_codec": "int8"}
FORMS = {
    "dense, stage 3": ("AdamW", 3, 2, {}),
    "dense, stage 0": ("AdamW", 0, 1, {}),
    "dense, stage 1": ("AdamW", 1, 2, {}),
    "replicated": ("OneBitAdam", 0, 1, {}),
    "intra_node, stage 2": ("OneBitAdam", 2, 2, {"bf16": {"enabled": True}}),
    "inter_node": ("OneBitAdam", 1, 1, {}),
}
GRIDS: dict[int, grids.Grid] = {}


def config_of(name: str = "AdamW", stage: int = 0, sums: int = 1, **blocks: object) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": sums,
        "optimizer": {"type": name, "params": {"lr": 0.01, "betas": [0.9, 0.99]}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }
    return config | ({"onebit": ONE_BIT} if name == "OneBitAdam" else {}) | blocks


def begin(form: str, model: nn.Module | None = None, sums: int = 1, **blocks: object) -> deepspeed.DeepSpeedEngine:
    name, stage, shards, more = FORMS[form]
    if shards not in GRIDS:
        GRIDS[shards] = grids.start(shard=shards)
    config = config_of(name, stage, sums, **more, **blocks)
    return deepspeed.initialize(model=model or net(), config=config, grid=GRIDS[shards])[0]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(15, (4,), generator=torch.Generator().manual_seed(97 * step + rank))
    return tokens, tokens % 5


def loss_of(model: object, rank: int, step: int) -> Tensor:
    tokens, targets = batch(rank, step)
    return nn.functional.cross_entropy(model(tokens).float(), targets)


def step(engine: deepspeed.DeepSpeedEngine, k: int) -> None:
    engine.backward(loss_of(engine, engine.global_rank, k))
    engine.step()


REFUSALS = RuntimeError, ValueError, KeyError, TypeError


def whole_parameters() -> dict[str, dict[str, object]]:
    """Of each form: parameters, gradients and moments asked for whole, beside a plain model's."""
    ask, facts = deepspeed.utils, {}
    for form in FORMS:
        engine, plain = begin(form), net()
        p, name = engine.module.layers[0].weight, "layers.0.weight"
        world = engine.world_size
        sum(loss_of(plain, rank, 0) / world for rank in range(world)).backward()
        engine.backward(loss_of(engine, engine.global_rank, 0))
        grad, oracle = ask.safe_get_full_grad(p), plain.layers[0].weight.grad
        unseen = ask.safe_get_full_grad(engine.module.layers[2].bias)
        engine.step()
        own: dict[str, object] = {
            "gradient": float((grad - oracle).norm() / oracle.norm()),
            "other": unseen.shape == (8,),
        }
        own["none behind step"] = ask.safe_get_full_grad(p) is None
        if form == "inter_node":
            own["refused"] = [error_of(REFUSALS, ask.safe_get_full_fp32_param, p),
                              error_of(REFUSALS, ask.safe_get_full_optimizer_state, p, "exp_avg")]  # fmt: skip
        else:
            moment = ask.safe_get_full_optimizer_state(p, "exp_avg")
            own["moment"] = float((moment - 0.1 * oracle).norm() / (0.1 * oracle).norm())
            own["unknown"] = error_of(REFUSALS, ask.safe_get_full_optimizer_state, p, "xyzzy")
            full = ask.safe_get_full_fp32_param(p)
            own["whole"] = torch.equal(full, engine.module_state_dict()[name]) and full.dtype == torch.float32
            own["moved"] = 0 < float((full - plain.layers[0].weight).abs().max()) < 0.03
        own |= modified(engine, p, name)
        step(engine, 1)
        own["alike"] = len({hash(b) for b in gathered(bits(engine))}) == 1
        facts[form] = own
    return facts


def modified(engine: deepspeed.DeepSpeedEngine, p: nn.Parameter, name: str) -> dict[str, object]:
    """Through the block, on rank 1; and by a value."""
    before = engine.module_state_dict()
    with deepspeed.zero.GatheredParameters([p, None, engine.module.head.bias], modifier_rank=1) as (first, _):
        shown = engine.module.layers[0].weight
        is_whole = shown is first and isinstance(shown, nn.Parameter) and shown.data.shape == (16, 8)
        if engine.global_rank == 1:
            shown.data[3] = 7.0
            first.data[15, 7] = -7.0
    after = engine.module_state_dict()
    expected = before[name].clone()
    expected[3], expected[15, 7] = 7.0, -7.0
    others = all(torch.equal(before[other], after[other]) for other in before if other != name)
    deepspeed.utils.safe_set_full_fp32_param(p, torch.full((16, 8), 0.5))
    return {
        "gathered": is_whole and engine.module.layers[0].weight is p and torch.equal(after[name], expected) and others,
        "set": bool((engine.module_state_dict()[name] == 0.5).all()),
        "shape": error_of(REFUSALS, deepspeed.utils.safe_set_full_fp32_param, p, torch.zeros(3)),
    }


def misfit_of_rank_1(value: Tensor) -> Tensor:
    return value[1:] if torch.distributed.get_rank() == 1 else value


def set_by_parts() -> dict[str, object]:
    """At stage 3: a step after weights, moments and gradients were changed part by part, and after the same whole."""
    ask, name, after = deepspeed.utils, "layers.0.weight", []
    for is_local in (True, False):
        engine = begin("dense, stage 3")
        step(engine, 0)
        p = engine.module.layers[0].weight
        if is_local:
            ask.safe_set_local_fp32_param(p, 2 * ask.safe_get_local_fp32_param(p))
            ask.safe_set_local_optimizer_state(p, 3 * ask.safe_get_local_optimizer_state(p, "exp_avg"), "exp_avg")
        else:
            ask.safe_set_full_fp32_param(p, 2 * ask.safe_get_full_fp32_param(p))
            ask.safe_set_full_optimizer_state(p, 3 * ask.safe_get_full_optimizer_state(p, "exp_avg"), "exp_avg")
        before = engine.module_state_dict()
        engine.backward(loss_of(engine, engine.global_rank, 1))
        if is_local:
            ask.safe_set_local_grad(p, 0.25 * ask.safe_get_local_grad(p))
        else:
            ask.safe_update_full_grad_vectorized([p], lambda grad, param: 0.25 * grad)
        engine.step()
        after.append((before, engine.module_state_dict()))
    of_stage_0 = begin("dense, stage 0")
    q, part = of_stage_0.module.layers[0].weight, torch.zeros(16, 8)
    of_stage_1 = begin("dense, stage 1")
    if of_stage_1.global_rank == 0:  # a rank alone reads what it holds whole
        with deepspeed.zero.GatheredParameters([of_stage_1.module.layers[0].weight]) as (read,):
            assert read.shape == (16, 8)
    return {
        "same": all(torch.equal(a[key], b[key]) for a, b in zip(*after, strict=True) for key in a),
        "moved": not torch.equal(after[0][0][name], after[0][1][name]),
        "without gradient": error_of(REFUSALS, ask.safe_set_local_grad, p, ask.safe_get_local_fp32_param(p)),
        "refused": [
            error_of(REFUSALS, ask.safe_set_local_fp32_param, p, part),
            error_of(REFUSALS, ask.safe_set_local_optimizer_state, p, part, "exp_avg"),
        ],
        "refused on all": [
            error_of(REFUSALS, ask.safe_set_local_fp32_param, p, misfit_of_rank_1(ask.safe_get_local_fp32_param(p))),
            error_of(REFUSALS, ask.safe_set_full_fp32_param, p, misfit_of_rank_1(part)),
            error_of(REFUSALS, ask.safe_set_full_fp32_param, q, misfit_of_rank_1(part)),
            error_of(REFUSALS, ask.safe_set_full_grad, q, misfit_of_rank_1(part)),
        ],
        "whole": [
            error_of(REFUSALS, ask.safe_set_local_fp32_param, q, part),
            error_of(REFUSALS, ask.safe_set_local_optimizer_state, q, part, "exp_avg"),
        ],
    }


class Sometimes(nn.Module):
    """Two layers, of which the second can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def set_of_one_rank() -> dict[str, object]:
    """Of each form: by what the gradient of a layer shrinks that is halved, and that only rank 0 uses."""
    ask, facts = deepspeed.utils, {}
    for form in ("dense, stage 0", "dense, stage 1", "replicated", "intra_node, stage 2"):
        engine = begin(form, Sometimes())
        p, x = engine.module.second.weight, torch.ones(4, 8, dtype=engine.config.dtype)
        engine.backward(engine(x, engine.global_rank == 0).square().mean())
        before = ask.safe_get_full_grad(p)
        ask.safe_update_full_grad_vectorized([p], lambda grad, param: 0.5 * grad)
        facts[form] = float(ask.safe_get_full_grad(p).norm() / before.norm())
        engine.step()
    return facts


def saved_by_ids() -> dict[str, object]:
    """Of a model at stage 3: what scripts read and write through variables from before the block, on rank 0 or all."""
    engine = begin("dense, stage 3")
    engine.backward(loss_of(engine, engine.global_rank, 0))
    named, truth = dict(engine.module.named_parameters()), engine.module_state_dict()
    p, full = named["layers.0.weight"], truth["layers.0.weight"]
    kind, grad = type(p), p.grad
    gather, states = deepspeed.zero.GatheredParameters, ZeroParamStatus
    facts: dict[str, object] = {"ids": len({q.ds_id for q in named.values() if is_zero_param(q)}) == len(named)}
    facts["apart"] = [(q.ds_status, q.ds_shape, q.ds_numel) for q in named.values()] == [
        (states.NOT_AVAILABLE, truth[name].shape, truth[name].numel()) for name in named
    ]
    facts["own part"] = all(q.partition_numel() == q.to_local().numel() < q.ds_numel for q in named.values())
    read, copies = {}, []
    for name, q in named.items():  # as FastChat, LLaVA and DeepSpeed-Chat save
        with gather([q] if q.ds_status == states.NOT_AVAILABLE else []):
            read[name] = q.data.detach().cpu().clone()
            torch.save(q, f"of-rank-{engine.global_rank}.pt")
            copies += [q.clone(), copy.deepcopy(q), q.detach(), torch.cat([q, q])[: len(q)], q.float(), q.full_tensor(),
                       torch.load(f"of-rank-{engine.global_rank}.pt")]  # fmt: skip
    facts["read"] = all(type(x) is Tensor and torch.equal(x, truth[name]) for name, x in read.items())
    facts["copied"] = all(
        not hasattr(x, "to_local") and torch.equal(x, truth[name])
        for k, name in enumerate(named) for x in copies[7 * k : 7 * k + 7]
    )  # fmt: skip
    with gather(set(named.values())):  # in another order on each rank
        facts["a set"] = all(torch.equal(q.data, truth[name]) for name, q in named.items())
    seen = {p: 1}
    with gather(list(named.values())):
        whole = engine.module.state_dict()
        facts["state_dict"] = all(type(x) is Tensor and torch.equal(x, truth[name]) for name, x in whole.items())
        facts["here"] = p.ds_status is states.AVAILABLE and p in seen and isinstance(p, nn.Parameter)
        facts["printed"] = repr(p) == repr(nn.Parameter(full))
        facts["grad"] = p.grad is grad
        facts["asked"] = torch.equal(deepspeed.utils.safe_get_full_fp32_param(p), full)
        with gather(p):
            facts["inner"] = torch.equal(p.data, full)
        facts["outer"] = torch.equal(p.data, full)
    with gather(named.values(), modifier_rank=0):
        with torch.no_grad():
            p[3] = 2.0 + engine.global_rank
        nn.init.constant_(named["head.bias"], 5.0 + engine.global_rank)
        with gather(named["head.weight"], modifier_rank=1):
            named["head.weight"].data.fill_(1.0 + engine.global_rank)
        facts["inner, written"] = bool((named["head.weight"].data == 2.0).all())
    after, expected = engine.module_state_dict(), copy.deepcopy(truth)
    expected["layers.0.weight"][3], expected["head.bias"][:], expected["head.weight"][:] = 2.0, 5.0, 2.0
    facts["written"] = all(torch.equal(after[name], expected[name]) for name in truth)
    with gather(named.values(), modifier_rank=0):
        if engine.global_rank == 0:
            engine.module.load_state_dict(truth)
    after = engine.module_state_dict()
    facts["loaded"] = all(torch.equal(after[name], truth[name]) for name in truth)
    try:
        with gather(p):
            raise KeyError("a script's own")
    except KeyError:
        facts["ended"] = type(p) is kind and p.ds_status is states.NOT_AVAILABLE and p.shape == full.shape
    engine.step()
    with gather(p):
        loss_of(engine, engine.global_rank, 1).backward()
    facts["gradient of a pass in the block"] = p.grad is not None and type(p.grad) is kind
    return facts


def gathered(mine: bytes) -> list[bytes]:
    every: list[bytes] = [b""] * deepspeed.comm.get_world_size()
    deepspeed.comm.all_gather_object(every, mine)
    return every


def in_float32(engine: deepspeed.DeepSpeedEngine) -> list[bool]:
    """Whether zero_to_fp32 gives the weights of the checkpoint "c", which the engine has: read, loaded, in files."""
    expected, tools = engine.module_state_dict(), zero_to_fp32
    read = [tools.get_fp32_state_dict_from_zero_checkpoint("tags", "c")]
    other = net()
    for p in other.parameters():
        nn.init.zeros_(p)
    read.append(tools.load_state_dict_from_zero_checkpoint(other, "tags", "c").state_dict())
    for kind, ending, load in (("model", "safetensors", load_file), ("pytorch_model", "bin", torch.load)):
        folder = Path(kind)  # of all ranks, each of which writes the model there
        options = ["--safe_serialization"] if ending == "safetensors" else []
        zero_to_fp32.main(["tags", str(folder), "--tag", "c", "--max_shard_size", "600", *options])
        torch.distributed.barrier()
        files = json.loads((folder / f"{kind}.{ending}.index.json").read_text())["weight_map"]
        assert len(set(files.values())) > 1 and all(x.nbytes <= 600 or len(load(folder / files[name])) == 1
                                                    for name, x in expected.items())  # fmt: skip
        read.append({name: load(folder / file)[name] for name, file in files.items()})
    folder = Path(f"of-rank-{engine.global_rank}")
    tools.convert_zero_checkpoint_to_fp32_state_dict("tags", folder / "one", tag="c")
    smaller = partial(tools.convert_zero_checkpoint_to_fp32_state_dict, "tags", folder / "one", 600, tag="c")
    with patch("torch.save", side_effect=OSError("No space left on device")), pytest.raises(OSError, match="No space"):
        smaller()
    read.append(torch.load(folder / "one" / "pytorch_model.bin"))  # still the model of the folder
    smaller()
    assert not (folder / "one" / "pytorch_model.bin").exists()  # it would be read first
    return [x.keys() == expected.keys() and all(torch.equal(x[name], expected[name]) for name in x) for x in read]


def topologies() -> list[float]:
    """Sums of the ranks in each of a grid's groups, with two stages, two replicas and two slices in turn."""
    found = []
    for sizes in ((2, 1, 1), (1, 1, 2), (1, 2, 1)):
        grid = PipelineParallelGrid(PipeModelDataParallelTopology(*sizes))
        mine = [grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_slice_parallel_group(),
                grid.get_model_parallel_group()]  # fmt: skip
        for group in mine:
            total = torch.tensor(1.0 + grid.global_rank)
            torch.distributed.all_reduce(total, group=group)
            found.append(float(total))
        found += [grid.get_stage_id(), grid.get_data_parallel_rank(), grid.get_slice_parallel_rank(),
                  grid.get_model_parallel_world_size(), grid.stage_to_global(sizes[0] - 1)]  # fmt: skip
        last = grid.get_stage_id() == sizes[0] - 1
        assert (grid.is_first_stage, grid.is_last_stage) == (grid.get_stage_id() == 0, last)
    return found


def checkpoints() -> dict[str, object]:
    """Tags, and parts of a checkpoint."""
    facts: dict[str, object] = {}
    block = {
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.005, "warmup_max_lr": 0.01, "warmup_num_steps": 9},
        }
    }
    first = begin("dense, stage 3", **block)
    kept = {}
    for k, (tag, is_latest) in enumerate((("a", True), ("b", True), ("b", True), ("c", False))):
        step(first, k)
        facts[f"save {k}"] = first.save_checkpoint("tags", tag, {"k": k}, save_latest=is_latest)
        kept[tag] = bits(first)
    again = begin("dense, stage 3", **block)
    for tag in (None, "a", "c"):
        folder, state = again.load_checkpoint("tags", tag)
        counts = [again.global_steps, again.micro_steps, again.global_samples, again.scheduler.last_epoch]
        facts[f"load {tag}"] = [Path(str(folder)).parent.name, state, counts, bits(again) == kept[tag or "b"]]
    facts["folders"] = sorted(os.listdir("tags")) + sorted(os.listdir("tags/b"))
    facts["absent"] = error_of(REFUSALS, again.load_checkpoint, "tags", "d")
    facts["bad"] = [
        error_of(REFUSALS, again.save_checkpoint, "tags", tag) for tag in ("x/y", "step_00000001", "latest", "..")
    ]
    facts["apart"] = error_of(REFUSALS, again.save_checkpoint, "tags", f"rank {again.global_rank}")
    facts["empty"] = list(again.load_checkpoint("nothing here"))
    again.save_checkpoint("only", "best", save_latest=False)
    facts["no latest"] = [list(again.load_checkpoint("only")), again.load_checkpoint("only", "best")[1]]

    facts["in float32"] = in_float32(again)
    parts = {}
    for form in FORMS:
        other = begin(form, **block)
        step(other, 0)
        folder, state = other.load_checkpoint("tags", "c", load_module_only=True)
        counts = [other.global_steps, other.scheduler.last_epoch]
        is_loaded = bits(other) == kept["c"]
        step(other, 1)
        parts[form] = [state, counts, is_loaded, bits(other) != kept["c"], len(set(gathered(bits(other)))) == 1]
    facts["weights alone"] = parts
    other = begin("replicated", **block)
    other.load_checkpoint("tags", "c", load_optimizer_states=False, load_lr_scheduler_states=False)
    facts["anew"] = [
        other.global_steps,
        other.scheduler.last_epoch,
        bits(other) == kept["c"],
        len(other.optimizer.state),
    ]

    partly, model = net(), net()
    partly.embed.requires_grad_(False)
    frozen = begin("dense, stage 3", partly)
    step(frozen, 0)
    frozen.save_checkpoint("frozen", exclude_frozen_parameters=True)
    model.embed.requires_grad_(False)
    nn.init.zeros_(model.embed.weight)
    back = begin("dense, stage 3", model)
    theirs = frozen.module_state_dict()
    facts["frozen"] = []
    for is_strict in (True, False):
        back.load_checkpoint("frozen", load_module_strict=is_strict)
        ours = back.module_state_dict()
        facts["frozen"].append([name for name in theirs if not torch.equal(theirs[name], ours[name])])
        step(back, 1)
    facts["not frozen"] = error_of(REFUSALS, begin("dense, stage 3").load_checkpoint, "frozen")
    longer = net()
    longer.more = nn.Linear(2, 2)
    wider = begin("dense, stage 3", longer)
    facts["strict"] = [
        error_of(REFUSALS, wider.load_checkpoint, "tags", "c", load_module_only=True),
        error_of(REFUSALS, wider.load_checkpoint, "tags", "c", False),
        error_of(REFUSALS, wider.load_checkpoint, "tags", "c", False, load_module_only=True),
    ]
    loaded = wider.module_state_dict()
    facts["not strict"] = all(torch.equal(loaded[name], x) for name, x in again.module_state_dict().items())
    again.load_module_state_dict({"module": theirs})
    facts["module"] = all(torch.equal(again.module_state_dict()[name], theirs[name]) for name in theirs)
    facts["named otherwise"] = error_of(REFUSALS, again.save_16bit_model, "tags", "pytorch_model.bin")
    return facts


def apart(stage: int, kind: type, autocast: dict | None = None, **params: object) -> float:
    """The largest difference of the weights, after three steps, from one process with torch's optimizer on all data."""
    blocks = {"optimizer": {"type": kind.__name__, "params": params}, "torch_autocast": autocast or {}}
    engine, plain = begin(f"dense, stage {stage}", **blocks), net()
    optimizer = kind(plain.parameters(), **params)
    for k in range(3):
        step(engine, k)
        for rank in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
                loss = loss_of(plain, rank, k)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = engine.module_state_dict()
    assert engine.torch_autocast_enabled() == (autocast is not None)
    return max(float((found[name] - x).abs().max()) for name, x in plain.state_dict().items())


def steps() -> dict[str, object]:
    """Boundaries, batch sizes, arguments of step() and backward()."""
    facts: dict[str, object] = {}
    weighed = []
    for is_said in (False, True):  # three micro-batches in a step: counted, and said
        engine = begin("dense, stage 3", sums=1 if is_said else 3)
        for k in range(6):
            if is_said:
                engine.set_gradient_accumulation_boundary(k % 3 == 2)
            loss = loss_of(engine, engine.global_rank, k)
            engine.backward(loss / 3 if is_said else loss)
            engine.step()
        weighed.append([bits(engine), engine.global_steps, engine.micro_steps])
    facts["said"] = [weighed[0][1:], weighed[1][1:], weighed[0][0] == weighed[1][0]]

    engine, plain = begin("dense, stage 0", sums=2), begin("dense, stage 0", sums=2)
    applied = []
    for k in range(4):
        step(engine, k)
        applied.append(engine.was_step_applied())
    within = begin("dense, stage 0", sums=2)
    step(within, 0)
    facts["within"] = error_of(REFUSALS, within.set_train_batch_size, 8)
    engine.set_train_batch_size(32)
    facts["bad size"] = error_of(REFUSALS, engine.set_train_batch_size, 12)
    for k in range(4, 8):
        step(engine, k)
        applied.append(engine.was_step_applied())
    facts["sizes"] = [engine.get_batch_info(), engine.global_steps, engine.global_samples, applied]

    for k in range(4):  # one step of the four, as the engine's own after it was told
        if k % 2 == 0:
            with plain.no_sync():
                plain.backward(loss_of(plain, plain.global_rank, k), scale_wrt_gas=False)
                facts["paused"] = error_of(REFUSALS, plain.step)
        else:
            plain.set_gradient_accumulation_boundary(k == 3)
            plain.backward(loss_of(plain, plain.global_rank, k), scale_wrt_gas=False)
            plain.step()
    facts["passes"] = [plain.global_steps, plain.micro_steps]

    model = net()
    optimizer = torch.optim.SGD([{"params": model.embed.parameters()}, {"params": [*model.layers.parameters(),
                                *model.head.parameters()], "lr": 0.3}], lr=0.1)  # fmt: skip
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    config = {name: x for name, x in config_of(stage=3).items() if name != "optimizer"}
    engine, same, _, scheduler = deepspeed.initialize(
        None, model, optimizer, lr_scheduler=plateau, config_params=config, grid=GRIDS[2]
    )
    before = bits(engine)
    for _ in range(3):
        engine.backward(loss_of(engine, 0, 0), retain_graph=True)
        engine.step(lr_kwargs={"metrics": 1.0})
    facts["given"] = [
        same is optimizer is engine.optimizer, scheduler is plateau is engine.lr_scheduler, engine.get_lr(),
        engine.optimizer_name(), bits(engine) != before, type(optimizer.param_groups[1]["params"][0]).__name__,
        len(set(gathered(bits(engine)))) == 1,
    ]  # fmt: skip
    facts["of torch"] = [
        apart(stage, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01) for stage in (0, 3)
    ] + [apart(3, torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, eps=1e-10), apart(3, torch.optim.SGD,
         {"enabled": True}, lr=0.1)]  # fmt: skip
    facts["takes the place"] = warned(
        lambda: deepspeed.initialize(
            model=(other := net()),
            optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
            config=config_of(),
            grid=GRIDS[1],
        )
    )
    engine = begin("dense, stage 0")
    loss_of(engine, 0, 0).backward()
    overflow = begin("dense, stage 0", fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    shown = []
    for factor in (1.0, float("inf")):
        overflow.backward(loss_of(overflow, 0, 0).float() * factor)
        overflow.step()
        shown.append([overflow.optimizer.overflow, overflow.optimizer.cur_scale, overflow.get_lr()])
    overflow.optimizer.set_lr(0.25)
    facts["shown"] = [*shown, overflow.get_lr()]
    facts["by loss.backward()"] = error_of(REFUSALS, engine.step)
    engine.zero_grad()
    facts["no loss"] = [error_of(REFUSALS, engine.backward, torch.zeros(3)), error_of(REFUSALS, engine.backward, 1.0),
                        error_of(REFUSALS, engine.backward, torch.zeros(()), allreduce_gradients=False)]  # fmt: skip
    never = begin("dense, stage 0", sums=2)
    facts["never stepped"] = warned(
        lambda: [
            never.backward(loss_of(never, 0, k)) for k in range(7) if not never.is_gradient_accumulation_boundary()
        ]
    )
    facts["ranks"] = [
        never.global_rank, never.local_rank, never.world_size, never.dp_world_size, never.mp_world_size,
        never.get_data_parallel_rank(), never.data_parallel_group.size(), str(never.device), never.dist_backend,
        never.to("cpu") is never, error_of(REFUSALS, never.to, "cuda"), never.loss_scale(), never.get_mom(),
    ]  # fmt: skip
    return facts


def warned(act: object) -> list[str]:
    """What onebit warns of while it runs."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onebit").addHandler(handler)
    try:
        act()
    finally:
        logging.getLogger("onebit").removeHandler(handler)
    return lines


def surface(folder: str) -> dict[str, object]:
    """Everything of two ranks."""
    os.chdir(folder)
    deepspeed.init_distributed(dist_backend="gloo")
    again = warned(lambda: deepspeed.init_distributed(dist_backend="nccl"))
    with deepspeed.zero.Init(config_dict_or_path=config_of()):
        copy.deepcopy(net())
    facts: dict[str, object] = {
        "again": again,
        "whole": whole_parameters(),
        "by ids": saved_by_ids(),
        "by parts": set_by_parts(),
        "of one rank": set_of_one_rank(),
        "checkpoints": checkpoints(),
        "steps": steps(),
        "topologies": topologies(),
    }
    for grid in GRIDS.values():
        grid.close()
    return facts
