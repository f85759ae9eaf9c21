"""What each rank of `test_tensor.py` does; started by `ranks.py`, results as files in a folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from errors import error_of
from grid_cases import Cases
from grid_cases import whole as flat
from tensor_cases import OPTIMIZERS, SIZE, STEPS, config_of, gpt, next_byte_loss, note, record, windows
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.data import TensorDataset
from train.layouts import tensor_plan

from onebit import zero
from onebit.agreement.replicas import ReplicaError
from onebit.model_parallel import local
from onebit.zero.grid import Grid
from onebit.zero.parallel import tensor

CASES = case = Cases()


def run_cases(folder: str, names_by_shards: list[tuple[int, list[str]]]) -> None:
    CASES.run(folder, names_by_shards, tensor=2, timeout_s=60.0)


def start(here: Grid, config: dict, net: nn.Module | None = None, **options: object) -> zero.Engine:
    plan = tensor_plan(SIZE.heads, here.shape.size("tensor"))
    model = gpt() if net is None else net
    return zero.initialize(model=model, config=config, grid=here, tensor_plan=plan, **options)[0]


def compute(engine: zero.Engine, step: int, micro: int = 0) -> float:
    """Gradients of this rank's batch; its loss."""
    batch = windows(step, engine.grid.data[0], micro)
    loss = next_byte_loss(engine(batch[:, :-1]), batch)
    engine.backward(loss)
    return float(loss.detach())


def advance(engine: zero.Engine, step: int) -> float:
    """One step; its mean loss on this rank."""
    total, micros = 0.0, engine.gradient_accumulation_steps()
    for micro in range(micros):
        total += compute(engine, step, micro) / micros
        engine.step()
    return total


# -------------------------------------------------------------------------------- like the twin, after the freeze


def like_twin(here: Grid, name: str, stage: int, net: nn.Module | None = None, **blocks: object) -> dict[str, list]:
    engine = start(here, config_of(name, stage, **blocks), net)
    out = record()
    for step in range(STEPS):
        out["loss"].append(advance(engine, step))
        note(out, engine.sharding.held, engine.optimizer, step)
        out["norm"].append(engine.get_global_grad_norm())
    engine.synchronise()
    out["params"].append(flat(engine.module))
    return out


def _twin_case(name: str, stage: int, **blocks: object) -> None:
    key = f"{name}_{stage}" + "".join(f"_{block}" for block in blocks)
    CASES[key] = lambda here: like_twin(here, name, stage, **blocks)


for _name in OPTIMIZERS:
    for _stage in range(4):
        _twin_case(_name, _stage)
        _twin_case(_name, _stage, gradient_clipping=0.5)
        _twin_case(_name, _stage, gradient_accumulation_steps=2)


@case
def computed_again(here: Grid) -> dict[str, Tensor]:
    """Each block's activations computed a second time in backward."""
    stage = 3 if here.shape.size("shard") > 1 else 0
    nets = {"again": gpt(again=True), "once": gpt()}
    return {name: like_twin(here, "OnebitAdam", stage, net)["params"][-1] for name, net in nets.items()}


@case
def low_precision(here: Grid) -> dict[str, object]:
    """Losses and parameters in float16, without shards in bfloat16 too; activations computed again."""
    stage, out = (2 if here.shape.size("shard") > 1 else 0), {}
    dtypes: dict[str, dict] = {"fp16": {"enabled": True, "initial_scale_power": 10}}
    if stage == 0:
        dtypes["bf16"] = {"enabled": True}
    for dtype, block in dtypes.items():
        blocks = {dtype: block, "gradient_clipping": 0.5}
        found = like_twin(here, "OnebitAdam", stage, gpt(again=True), **blocks)
        out[dtype] = {"loss": found["loss"], "params": found["params"][-1]}
    return out


# -------------------------------------------------------------------------------- agreement


@case
def one_bad_part_makes_all_skip(here: Grid) -> list[tuple[bool, int]]:
    """An infinity in one tensor rank's part of one layer, on the last rank, behind the first of two micro-batches."""
    out = []
    for name in ("OnebitAdam", "AdamW"):
        stage = 2 if here.shape.size("shard") > 1 else 0
        engine = start(here, config_of(name, stage, gradient_accumulation_steps=2))
        advance(engine, 0)
        before = flat(engine.module)
        compute(engine, 1)
        engine.step()
        if here.world.rank == here.world.world_size - 1:
            group = engine.optimizer.param_groups[0]["params"]  # FSDP2 may hold gathered parameters now
            row_wise = next(p for p in group if p.shape == (SIZE.width, 4 * SIZE.width))
            local(row_wise.grad).view(-1)[0] = float("inf")
        compute(engine, 1, 1)
        engine.step()
        out.append((torch.equal(flat(engine.module), before), engine.skipped_steps))
    return out


@case
def what_tensor_ranks_hold_alike_is_voted_on(here: Grid) -> str:
    """The same change on one tensor rank of every replica: no two replicas differ."""
    engine = start(here, config_of("OnebitAdam", 0))
    engine.optimizer.check_replicas()
    if here.coordinates["tensor"] == 1:
        with torch.no_grad():
            engine.module.norm.weight[3] += 1.0
    return error_of(ReplicaError, engine.optimizer.check_replicas)


@case
def refused(here: Grid) -> dict[str, str]:
    config = config_of("OnebitAdam", 0)

    def initialize(config: dict = config, **options: object) -> None:
        zero.initialize(model=gpt(), config=config, grid=here, **options)

    plan = tensor_plan(SIZE.heads, 2)
    other = {**config, "onebit": {"tensor": 4}}
    net = gpt()
    tensor.parallelize(net, here, plan)
    return {
        "no plan": error_of(ValueError, lambda: initialize(tensor_plan=None)),
        "another grid": error_of(ValueError, lambda: initialize(other, tensor_plan=plan)),
        "inter_node": error_of(ValueError, lambda: initialize(config_of("OnebitAdam", 1), tensor_plan=plan)),
        "twice": error_of(ValueError, lambda: tensor.parallelize(net, here, plan)),
        "odd length": error_of(ValueError, lambda: net(torch.zeros(1, 15, dtype=torch.long))),
        "heads": error_of(ValueError, lambda: tensor_plan(SIZE.heads, 3)),
    }


# -------------------------------------------------------------------------------- data, weights, other models


@case
def batches_are_those_of_the_replica(here: Grid) -> tuple[list[int], list[int]]:
    """(the batch sizes, what this rank reads first)."""
    data = TensorDataset(torch.arange(64))
    engine = start(here, config_of("AdamW", 0), training_data=data)
    sizes = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), len(engine.loader)]
    return sizes, next(iter(engine.loader))[0].tolist()


@case
def weights_leave_and_return(here: Grid) -> dict[str, bool]:
    """Under the names and shapes of the plain model: one safetensors file, and torch.distributed.checkpoint's."""
    stage = 3 if here.shape.size("shard") > 1 else 0
    engine = start(here, config_of("AdamW", stage))
    advance(engine, 0)
    whole = flat(engine.module)
    folder = [tempfile.mkdtemp(prefix="tensor-") if here.world.rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    place, out = Path(folder[0]), {}
    engine.synchronise()
    zero.export_weights(engine.module, place / "model.safetensors", here.world)
    plain, again = gpt(), start(here, config_of("AdamW", stage))
    zero.import_weights(plain, place / "model.safetensors", here.world)
    zero.import_weights(again.module, place / "model.safetensors", here.world)
    out["file to plain"] = torch.equal(flat(plain), whole)
    out["file to parts"] = torch.equal(flat(again.module), whole)
    dcp.save(get_model_state_dict(engine.module), checkpoint_id=place / "dcp")
    plain, again = gpt(), start(here, config_of("AdamW", stage))
    for name, net in (("plain", plain), ("parts", again.module)):
        state = get_model_state_dict(net)
        dcp.load(state, checkpoint_id=place / "dcp")
        net.load_state_dict(state)
        out[f"dcp to {name}"] = torch.equal(flat(net), whole)
    names = {name: tuple(x.shape) for name, x in get_model_state_dict(engine.module).items()}
    out["names"] = names == {name: tuple(x.shape) for name, x in gpt().state_dict().items()}
    torch.distributed.barrier()
    if here.world.rank == 0:
        shutil.rmtree(place)
    return out


class Tied(nn.Module):
    """Everything that the GPT has not: biases, a frozen norm, an embedding tied to the projection, cut by words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight
        self.norm.weight.requires_grad_(False)

    def forward(self, text_BT: Tensor) -> Tensor:
        x = self.words(text_BT)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


TIED = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@case
def any_module_by_a_plan(here: Grid) -> dict[str, object]:
    """Gradients of two passes against the plain model's; which parameters are tied, frozen and placed how."""
    torch.manual_seed(3 + here.coordinates["tensor"])  # other values on each rank: the first rank's are taken
    net = Tied()
    tensor.parallelize(net, here, TIED)
    plain = Tied()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), net.parameters(), strict=True):
            p.copy_(q.full_tensor())
    text = torch.arange(8).view(1, 8) % 10
    for model in (plain, net):
        for _ in range(2):
            nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten() + 1).backward()
    grads = {name: (p.grad, q.grad) for (name, p), q in zip(plain.named_parameters(), net.parameters(), strict=True)}
    return {
        "error": max(float((p - q.full_tensor()).abs().max()) for p, q in grads.values() if p is not None),
        "placed": all(q.grad is None or q.grad.placements == q.placements for q in net.parameters()),
        "frozen": [name for name, (_, g) in grads.items() if g is None],
        "tied": net.head.weight is net.words.weight,
        "cut": {name: here.model_parallel_group.pieces(p) for name, p in net.named_parameters()},
        "values": flat(net),
    }
