"""What each rank of `test_fsdp.py` does; started by `ranks.py`, results as files in a folder."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from errors import error_of
from fsdp_cases import COMMON, FREEZE, STEPS, aligned_net, loss_of, make, note, odd_net
from grid_cases import Cases
from grid_cases import whole as flat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onebit
from onebit.agreement.replicas import ReplicaError
from onebit.agreement.step_vote import DesyncError
from onebit.comm import IdentityCodec
from onebit.dense import DenseAverager, average_gradients
from onebit.model_parallel import local
from onebit.optimizer import CompressedOptimizer
from onebit.zero.grid import Grid
from onebit.zero.parallel import fsdp
from onebit.zero.utils import set_z3_leaf_modules

CASES = case = Cases()


def run_cases(folder: str, names_by_shards: list[tuple[int, list[str]]]) -> None:
    CASES.run(folder, names_by_shards)


def sharded(here: Grid, net: nn.Module, stage: int, **options: object) -> nn.Module:
    return fsdp.shard(net, here, stage, **options)


def backward(here: Grid, net: nn.Module, step: int, stage: int, micros: int = 1) -> None:
    for k in range(micros):
        fsdp.begin_micro_batch(net, stage, is_last=k == micros - 1)
        (loss_of(net, step, here.world.rank, k) / micros).backward()


def make_here(here: Grid, name: str, net: nn.Module, **options: object) -> CompressedOptimizer:
    """The optimizer of this rank's shards."""
    return make(name, net, here.transport, model_parallel_group=here.model_parallel_group, **options)


def train(here: Grid, net: nn.Module, optimizer: CompressedOptimizer, stage: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(here, net, step, stage)
        optimizer.step()


# -------------------------------------------------------------------------------- like the twin, after the freeze


def like_twin(here: Grid, case: str) -> dict[str, list]:
    """case: optimizer, stage, micro-batches, and an option that is 0.1."""
    name, stage_of, count, *options = case.split("_", 3)
    stage, micros = int(stage_of), int(count)
    net = sharded(here, aligned_net(), stage)
    optimizer = make_here(here, name, net, **dict.fromkeys(options, 0.1))
    names = ("params", "clip", "fallback", "layers", "early", "bits", "phases")
    out: dict[str, list] = {name: [] for name in names}
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(here, net, step, stage, micros)
        out["early"].append(optimizer._driver.launched / len(optimizer.buckets))
        optimizer.step()
        note(out, net, optimizer)
        out["bits"].append(optimizer.stats.bits_per_parameter)
        out["phases"].append(optimizer.stats.phase)
    if isinstance(optimizer, onebit.ZeroOneAdam):
        optimizer.sync()
        note(out, net, optimizer)
    return out


# Every optimizer and every stage; two micro-batches where buckets leave during backward.
TWINS = (
    *("OnebitAdam_2_1", "OnebitAdam_3_1", "OnebitMuon_2_1", "OnebitLamb_3_1", "ZeroOneAdam_1_1", "ZeroOneAdam_3_1"),
    *("OnebitAdam_1_2", "OnebitAdam_3_2", "OnebitAdam_2_1_max_grad_norm"),
)
for _name in TWINS:
    CASES[_name] = partial(like_twin, case=_name)


# -------------------------------------------------------------------------------- the model as a whole


@case
def clipping_is_torchs(here: Grid) -> dict[str, list]:
    """Dense steps of odd shapes, clipped, against AdamW and clip_grad_norm_ in one process."""
    R, S = here.shape.size("replica"), here.shape.size("shard")
    replica = here.coordinates["replica"]
    net = sharded(here, odd_net(uses_extra=replica == 0), 3)
    dense = {"freeze_step": 100, "warmup_codec": IdentityCodec()}
    optimizer = make_here(here, "OnebitAdam", net, max_grad_norm=0.3, **dense)
    plain = [odd_net(uses_extra=r == 0) for r in range(R)]
    adamw = torch.optim.AdamW(plain[0].parameters(), lr=0.01)
    out: dict[str, list] = {"ours": [], "torchs": [], "factors": [], "torch_factors": []}
    for step in range(4):
        optimizer.zero_grad()
        backward(here, net, step, 3)
        optimizer.step()
        adamw.zero_grad()
        for r in range(R):
            plain[r].load_state_dict(plain[0].state_dict())
            plain[r].zero_grad()
            for s in range(S):
                (loss_of(plain[r], step, r * S + s) / (R * S)).backward()
        for p, *others in zip(*(net.parameters() for net in plain), strict=True):
            for other in others:
                if other.grad is not None:
                    p.grad = other.grad.clone() if p.grad is None else p.grad + other.grad
        norm = nn.utils.clip_grad_norm_(plain[0].parameters(), 0.3)
        adamw.step()
        out["ours"].append(flat(net))
        out["torchs"].append(flat(plain[0]).clone())
        out["factors"].append(optimizer.stats.clip_factor)
        out["torch_factors"].append(min(1.0, 0.3 / (float(norm) + 1e-6)))
    return out


@case
def lamb_measures_whole_layers(here: Grid) -> dict[str, Tensor]:
    """Dense LAMB three ways: one-bit's warm-up over shards, Lamb over shards, Lamb in one process."""
    R, S = here.shape.size("replica"), here.shape.size("shard")
    options = {"lr": 0.02, "weight_decay": 0.01}
    one_bit, dense, plain = (odd_net() for _ in range(3))
    sharded(here, one_bit, 3)
    sharded(here, dense, 2)
    ours = make_here(here, "OnebitLamb", one_bit, freeze_step=100, warmup_codec=IdentityCodec())
    theirs = onebit.Lamb(dense.parameters(), model_parallel_group=here.model_parallel_group, **options)
    reference = onebit.Lamb(plain.parameters(), **options)
    used = [p for name, p in dense.named_parameters() if name != "unused"]  # it makes gradients that are not there
    averager = DenseAverager(used, here.transport, bucket_cap_mb=0.0005)
    for step in range(4):
        for optimizer in (ours, theirs, reference):
            optimizer.zero_grad()
        backward(here, one_bit, step, 3)
        ours.step()
        backward(here, dense, step, 2)
        averager.finish()
        theirs.step()
        for source in range(R * S):
            (loss_of(plain, step, source) / (R * S)).backward()
        reference.step()
    return {"one_bit": flat(one_bit), "dense": flat(dense), "plain": flat(plain)}


@case
def torchs_adamw_after_averaging(here: Grid) -> dict[str, Tensor]:
    """The dense baseline over shards: average_gradients along the transport, then torch's AdamW."""
    R, S = here.shape.size("replica"), here.shape.size("shard")
    net, plain = sharded(here, odd_net(), 2), odd_net()
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, plain)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(here, net, step, 2)
        average_gradients(net.parameters(), here.transport)
        for source in range(R * S):
            (loss_of(plain, step, source) / (R * S)).backward()
        plain.unused.grad = torch.zeros_like(plain.unused)  # average_gradients makes what is not there
        for optimizer in optimizers:
            optimizer.step()
    return {"ours": flat(net), "plain": flat(plain)}


# -------------------------------------------------------------------------------- agreement


def state_bytes(optimizer: CompressedOptimizer) -> bytes:
    """All of the state but the count of skipped steps."""
    state = copy.deepcopy(optimizer.state_dict())
    del state["onebit"]["skipped_steps"]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def spoil_a_gradient(here: Grid, net: nn.Module) -> None:
    """An infinity in one shard of the last replica."""
    if here.world.rank == here.world.world_size - 1:
        held = (local(p.grad) for p in net.parameters() if p.grad is not None)
        next(grad for grad in held if grad.numel() > 1).view(-1)[1] = float("inf")


@case
def one_bad_shard_makes_all_skip(here: Grid) -> list:
    """An infinity in one shard of the last replica: before the freeze, after it, where the step clips, local steps."""
    out = []
    for name, step, options in (
        ("OnebitAdam", 1, {}),
        ("OnebitAdam", FREEZE + 1, {"max_grad_norm": 1.0}),
        ("OnebitLamb", FREEZE + 1, {}),
        ("ZeroOneAdam", 2, {}),
    ):
        net = sharded(here, odd_net(), 2)
        optimizer = make_here(here, name, net, overlap=False, **options)
        train(here, net, optimizer, 2, range(step))
        before, state = flat(net), state_bytes(optimizer)
        backward(here, net, step, 2)
        spoil_a_gradient(here, net)
        optimizer.step()
        skipped = torch.equal(flat(net), before), state_bytes(optimizer) == state, optimizer.stats.skipped_steps
        train(here, net, optimizer, 2, range(step + 1, step + 2))
        out.append((*skipped, not torch.equal(flat(net), before), optimizer.stats.skipped_steps))
    return out


@case
def a_bad_shard_in_a_local_step_is_its_replicas_alone(here: Grid) -> tuple[int, bool, bool]:
    net = sharded(here, odd_net(), 2)
    optimizer = make_here(here, "ZeroOneAdam", net, overlap=False, local_step_clipper=4, lr=0.02)
    step, rule = 0, optimizer.rule

    def comes_local() -> bool:
        rule.begin_step()
        is_local = rule.round_name() == "local"
        rule.end_step()
        return is_local

    while not comes_local():
        train(here, net, optimizer, 2, range(step, step + 1))
        step += 1
    backward(here, net, step, 2)
    spoil_a_gradient(here, net)
    optimizer.step()
    was_local, skipped = optimizer.stats.sent_bytes == 0, optimizer.stats.skipped_steps
    optimizer.sync()
    fsdp.reshard(net)
    return skipped, was_local, bool(flat(net).isfinite().all())


@case
def errors_are_everybodys(here: Grid) -> dict[str, str]:
    """What one rank alone finds wrong, at construction and in a vote, ends all."""
    last = here.world.rank == here.world.world_size - 1
    out = {}
    net = sharded(here, odd_net(), 2)
    options = {"error_dtype": torch.bfloat16} if last else {}
    out["options"] = error_of(ValueError, lambda: make_here(here, "OnebitAdam", net, **options))
    options = {"variance_floor": 0.02} if here.coordinates["shard"] else {}
    out["shards"] = error_of(ValueError, lambda: make_here(here, "OnebitAdam", net, **options))
    optimizer = make_here(here, "OnebitAdam", net)
    train(here, net, optimizer, 2, range(2))
    if last:
        with torch.no_grad():
            next(local(p) for p in net.parameters() if local(p).numel() > 1).view(-1)[0] += 1.0
    out["replicas"] = error_of(ReplicaError, optimizer.check_replicas)
    return out


@case
def shards_that_do_not_fit_are_refused(here: Grid) -> dict[str, str]:
    net, plain = sharded(here, odd_net(), 2), odd_net()
    states = make_here(here, "OnebitAdam", net)
    other = copy.deepcopy(states.state_dict())
    other["onebit"]["shard"] = 1 - other["onebit"]["shard"]
    return {
        "no shards": error_of(ValueError, lambda: make("OnebitAdam", net, here.transport)),
        "dense": error_of(ValueError, lambda: onebit.Lamb(net.parameters())),
        "plain": error_of(ValueError, lambda: make_here(here, "OnebitAdam", plain)),
        "another's": error_of(ValueError, lambda: states.load_state_dict(other)),
        "stage": error_of(ValueError, lambda: fsdp.shard(odd_net(), here, 0)),
        "not sharded": error_of(TypeError, lambda: fsdp.begin_micro_batch(odd_net(), 1, is_last=True)),
    }


# -------------------------------------------------------------------------------- ranks that use different parts


class Choosing(nn.Module):
    """Four experts between a trunk and two heads; which of them run, and how often, is the caller's."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.trunk = nn.Linear(6, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x: Tensor, plan: list[int], head: int) -> Tensor:
        h = self.run(torch.tanh(self.trunk(x)), plan)
        return [head_(h) for head_ in self.heads][head]

    def run(self, h: Tensor, plan: list[int]) -> Tensor:
        for k in plan:
            h = h + (checkpoint(self.layers[k], h, use_reentrant=False) if self.checkpoints else self.layers[k](h))
        return h


class Nest(Choosing):
    """The experts lie in one block."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__(checkpoints)
        self.layers = nn.ModuleList([Experts(self.layers)])

    def run(self, h: Tensor, plan: list[int]) -> Tensor:
        block = self.layers[0]
        return checkpoint(block, h, plan, use_reentrant=False) if self.checkpoints else block(h, plan)


def kept_whole() -> Choosing:
    net = Choosing()
    set_z3_leaf_modules(net, [nn.ModuleList])
    return net


class Experts(nn.Module):
    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, h: Tensor, plan: list[int]) -> Tensor:
        for k in plan:
            h = h + self.experts[k](h)
        return h


# By rank of two: the step's backward passes, each of forward passes, each the experts that it runs, and its head.
Passes = list[list[tuple[list[int], int]]]
USES: dict[str, Callable[[int], Passes]] = {
    "its own": lambda rank: [[([rank], 0)]],
    "one runs none": lambda rank: [[([rank] if rank == 0 else [], 0)]],
    "all skip one": lambda rank: [[([0, 3], 0)]],
    "layers dropped": lambda rank: [[([k for k in range(4) if (k + rank) % 3], 0)]],
    "in another order": lambda rank: [[([3, 1, 0, 2][rank:], 0)]],
    "again and again": lambda rank: [[([rank] * (rank + 1), 0)]],
    "another head": lambda rank: [[([0, 1], rank % 2)]],
    "two forward passes": lambda rank: [[([rank], 0), ([3 - rank, 1], 1)]],
    "a window": lambda rank: [[([rank], 0)], [([rank + 1], 0)]],
}


def choosing_loss(net: nn.Module, step: int, rank: int, passes: list[tuple[list[int], int]]) -> Tensor:
    losses = []
    for k, (plan, head) in enumerate(passes):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + k))
        dtype = next(net.parameters()).dtype
        losses.append(net(x.to(dtype if dtype == torch.float64 else torch.float32), plan, head).float().square().mean())
    return torch.stack(losses).sum()


def uses_of(here: Grid, stage: int, make_net: Callable[[], nn.Module], names: Sequence[str], **options: object) -> dict:
    """How far two steps of SGD, with decay, lead from where they lead in float64 on one rank; by what ranks use."""
    out, rank, world_size = {}, here.world.rank, here.world.world_size
    for name in names:
        torch.manual_seed(3)
        net = sharded(here, make_net(), stage, **options)
        torch.manual_seed(3)
        plain = make_net().double()
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (net, plain))
        first = flat(plain)
        for step in range(2):
            windows = [USES[name](source) for source in range(world_size)]
            for k, passes in enumerate(windows[rank]):
                fsdp.begin_micro_batch(net, stage, is_last=k == len(windows[rank]) - 1)
                choosing_loss(net, step, rank, passes).backward()
            for source, window in enumerate(windows):
                for passes in window:
                    (choosing_loss(plain, step, source, passes) / world_size).backward()
            held = [(p.grad is None, q.grad is None) for p, q in zip(net.parameters(), plain.parameters(), strict=True)]
            assert all(a == b for a, b in held), (name, held)
            assert all(hasattr(p, "full_tensor") for p in net.parameters()), f"{name}: not let go of"
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        moved = float((flat(plain) - first).abs().max())
        out[name] = float((flat(net).double() - flat(plain)).abs().max()) / moved
    return out


@case
def ranks_use_other_parts(here: Grid) -> dict[str, dict]:
    low = {"dtype": torch.bfloat16}
    few = ["its own", "a window", "layers dropped"]
    return {
        "1": uses_of(here, 1, Choosing, ["a window"]),
        "1, bf16": uses_of(here, 1, Choosing, ["a window"], **low),
        "2": uses_of(here, 2, Choosing, list(USES)),
        "2, checkpointed": uses_of(here, 2, lambda: Choosing(True), few),
        "2, nested": uses_of(here, 2, Nest, ["its own"]),
        "3, nested": uses_of(here, 3, Nest, [name for name in USES if name != "another head"]),
        "3, nested, checkpointed": uses_of(here, 3, lambda: Nest(True), ["its own"]),
        "3, nested, bf16": uses_of(here, 3, Nest, ["a window"], **low),
        "3, kept whole": uses_of(here, 3, kept_whole, ["its own", "another head"]),
        "3, all the same": uses_of(here, 3, Choosing, ["all skip one"]),
    }


@case
def blocks_of_other_ranks_at_stage_3(here: Grid) -> dict[str, str]:
    """The last case of its grid: nobody knows what has been gathered."""
    net = sharded(here, Choosing(), 3)
    rank = here.world.rank
    return {
        "runs": error_of(DesyncError, lambda: choosing_loss(net, 0, rank, [([0, 1] if rank else [0, 2], 0)]).backward())
    }


# -------------------------------------------------------------------------------- state, masks, precision


@case
def resume_is_no_interruption(here: Grid) -> dict[str, bool]:
    """From each rank's own state and shards, in warm-up, at the freeze, between synchronisations."""
    out = {}
    for name, stage, at in (("OnebitAdam", 2, 2), ("OnebitLamb", 1, 4), ("ZeroOneAdam", 3, 6)):
        net = sharded(here, odd_net(), stage)
        optimizer = make_here(here, name, net, max_grad_norm=2.0)
        train(here, net, optimizer, stage, range(at))
        buffer = io.BytesIO()
        torch.save(
            {"model": [local(p).detach() for p in net.parameters()], "optimizer": optimizer.state_dict()}, buffer
        )
        train(here, net, optimizer, stage, range(at, at + 3))
        again = sharded(here, odd_net(), stage)
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        resumed = make_here(here, name, again, max_grad_norm=2.0)
        with torch.no_grad():  # after construction, which makes replicas equal: between synchronisations they are not
            for p, kept in zip(again.parameters(), saved["model"], strict=True):
                local(p).copy_(kept)
        resumed.load_state_dict(saved["optimizer"])
        train(here, again, resumed, stage, range(at, at + 3))
        pairs = zip(net.parameters(), again.parameters(), strict=True)
        out[f"{name} {stage} {at}"] = all(torch.equal(local(p), local(q)) for p, q in pairs)
    return out


@case
def groups_may_share_a_module(here: Grid) -> dict[str, object]:
    """The matrices leave while FSDP2 still adds to the first module's bias, which it reduces with its matrix."""
    net = sharded(here, aligned_net(), stage=2)
    groups = [{"params": [p for p in net.parameters() if (p.dim() > 1) == is_matrix]} for is_matrix in (True, False)]
    common: dict = COMMON | {"bucket_cap_mb": 16.0}
    mine = {"transport": here.transport, "model_parallel_group": here.model_parallel_group}
    optimizer = onebit.OnebitAdam(groups, lr=0.01, freeze_step=FREEZE, **mine, **common)
    early = []
    for step in range(3):
        optimizer.zero_grad()
        backward(here, net, step, stage=2, micros=2)
        early.append(optimizer._driver.launched)
        if step == 2:
            with torch.no_grad():
                local(groups[0]["params"][0].grad).mul_(2.0)
        optimizer.step()
    return {"early": early, "resent": optimizer.stats.resent_steps}


@case
def masked_elements_stay(here: Grid) -> tuple[bool, bool]:
    """A mask is the whole parameter's: rows that it forbids stay, on whatever rank they are."""
    net = sharded(here, aligned_net(), 3)
    weight = next(net.parameters())
    mask = (torch.arange(128) % 3 > 0).unsqueeze(1).expand(128, 8)
    optimizer = onebit.OnebitAdam(
        [{"params": [weight], "exp_avg_mask": mask}],
        transport=here.transport,
        model_parallel_group=here.model_parallel_group,
        lr=0.01,
        weight_decay=0.0,
        freeze_step=FREEZE,
        compression="always",
    )
    before = weight.full_tensor().detach().clone()
    train(here, net, optimizer, 3, range(FREEZE + 2))
    moved = weight.full_tensor().detach() != before
    return bool(moved[mask].all()), bool(moved[~mask].any())


@case
def low_precision_has_float32_masters(here: Grid) -> dict[str, object]:
    """bfloat16 on the way, float32 in parameters, gradients and their mean over the shards."""
    out: dict[str, object] = {}
    S = here.shape.size("shard")
    replica = here.coordinates["replica"]
    for stage in fsdp.STAGES:
        net, plain = sharded(here, aligned_net(), stage, dtype=torch.bfloat16), aligned_net().bfloat16()
        optimizer = make_here(here, "OnebitAdam", net, overlap=False)
        backward(here, net, 0, stage)
        mean = [torch.zeros_like(p, dtype=torch.float32) for p in plain.parameters()]
        for source in range(replica * S, (replica + 1) * S):
            plain.zero_grad()
            generator_loss(plain, source).backward()
            for total, p in zip(mean, plain.parameters(), strict=True):
                total += p.grad.float()
        grads = [p.grad.full_tensor() for p in net.parameters()]
        out[f"gradients {stage}"] = all(torch.equal(g, total / S) for g, total in zip(grads, mean, strict=True))
        optimizer.step()
        train(here, net, optimizer, stage, range(1, FREEZE + 2))
        dtypes = {local(p).dtype for p in net.parameters()} | {p.grad.dtype for p in net.parameters()}
        out[f"dtypes {stage}"] = dtypes == {torch.float32}
        out[f"params {stage}"] = flat(net)
    masters, rounded = sharded(here, aligned_net().bfloat16(), 3, dtype=torch.float16), aligned_net().bfloat16()
    out["of another"] = torch.equal(flat(masters), flat(rounded).float())
    return out


def generator_loss(plain: nn.Module, source: int) -> Tensor:
    """As `loss_of`, for a model whose inputs nobody casts."""
    with cast_inputs(plain):
        return loss_of(plain, 0, source)


@contextmanager
def cast_inputs(net: nn.Module) -> Iterator[None]:
    handle = net.register_forward_pre_hook(lambda _, inputs: tuple(x.bfloat16() for x in inputs))
    try:
        yield
    finally:
        handle.remove()


@case
def what_a_rank_holds(here: Grid) -> dict[str, object]:
    """Coordinates as the mesh has them; state of the own shard only; gathered parameters let go of."""
    S = here.shape.size("shard")
    net = sharded(here, aligned_net(), 1)
    optimizer = make_here(here, "OnebitAdam", net)
    elements = sum(p.numel() for p in net.parameters())
    with torch.no_grad():
        loss_of(net, 0, 0)
    gathered = not any(hasattr(p, "to_local") for p in net.parameters())
    fsdp.reshard(net)
    return {
        "coordinates": tuple(here.coordinates.values()) == tuple(here.mesh.get_coordinate()),
        "transports": (
            here.transport.rank,
            here.transport.world_size,
            here.model_parallel_group.transport.rank,
            here.model_parallel_group.transport.world_size,
        ),
        "state": optimizer.state_bytes() <= 8 * (elements // S + 2 * 64 * len(optimizer.buckets)),
        "gathered": gathered and all(hasattr(p, "to_local") for p in net.parameters()),
        "blocks": len(fsdp.blocks_of(odd_net())),
    }
