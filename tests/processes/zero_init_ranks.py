"""Ranks of test_zero_init.py: models built in zero.Init, beside the same models built whole."""

from __future__ import annotations

import copy
import gc
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed_ranks import warned
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from onebit import zero
from onebit.zero.zero import GatheredParameters, Init

VOCABULARY, WIDTH, STEPS = 11, 16, 4


class Block(nn.Module):
    """Its __init__ writes to parameters of modules that are complete by then, in as many ways as there are."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 3 * width), nn.Linear(3 * width, width), nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.randn(width))
        nn.init.orthogonal_(self.down.weight)
        nn.init.xavier_uniform_(self.up.weight[:width])
        with torch.no_grad():
            self.up.bias[0] = 7.0
            self.up.bias.add_(1.0)
            self.up.weight[3].copy_(self.down.bias.new_ones(width) * self.norm.weight)
            self.up.weight[4].add_(self.norm.weight)
            first, second = self.up.weight[0], self.up.weight.view(-1)
            first.fill_(0.25)
            second[-3:] = 0.5
            self.down.bias.copy_(self.norm.weight * 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, a parameter of its own, and initial values as scripts draw them: by apply, and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.blocks = nn.Sequential(*[Block(WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.place = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))  # no dimension to divide
        self.apply(self.draw)
        for name, p in self.named_parameters():
            if name.endswith("up.weight"):
                nn.init.normal_(p, std=0.03)

    def draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.weight.data.normal_(1, 0.1)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_()
            module.weight.data[module.padding_idx].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * self.head(self.blocks(self.table(ids) + self.place))


class TiedBefore(nn.Module):
    """Two modules share a parameter before either is part of another."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        self.first, self.second = first, second


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 5, 2))


BUILT: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "tied before": TiedBefore,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 2),
    "lstm": lambda: nn.Sequential(nn.LSTM(5, 3, num_layers=2)),
    "normalised": Normalised,
    "lists": lambda: nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (1, 5)]),
    "narrow": lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)),
    "copied": lambda: nn.ModuleList([copy.deepcopy(layer) for layer in [nn.Sequential(nn.Linear(4, 4))] * 2]),
}


def values(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def of_rank_0(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.broadcast(x, 0)
    return x


def equal(model: nn.Module, whole: nn.Module) -> bool:
    found, wanted = values(model), dict(whole.named_parameters(remove_duplicate=False))
    return list(found) == list(wanted) and all(torch.equal(found[name], of_rank_0(p)) for name, p in wanted.items())


def built() -> dict[str, object]:
    """Each model as rank 0 builds it alone; and what is left of a rank's own random numbers."""
    rank, facts = dist.get_rank(), dict[str, object]()
    for name, build in BUILT.items():
        for seed in (1, 1 + rank):
            torch.manual_seed(seed)
            whole = build()
            drawn = torch.rand(1)
            torch.manual_seed(seed)
            with Init():
                model = build()
            own = torch.rand(1)
            torch.manual_seed(seed)
            is_own = torch.equal(own, drawn if seed == 1 or rank == 0 else torch.rand(1))
            parts = [p for p in model.parameters() if hasattr(p, "ds_id")]
            is_divided = all(p.partition_numel() < p.ds_numel or p.ds_numel == 1 for p in parts)  # type: ignore[attr-defined]
            shapes = [p.shape for p in model.parameters()] == [p.shape for p in whole.parameters()]
            facts[f"{name}, {seed == 1}"] = equal(model, whole) and is_own and is_divided and shapes and bool(parts)
    facts["siblings"], facts["nested"], facts["entered again"] = siblings(), nested(), entered_again()
    facts["copied sets"], facts["refused"] = copied_sets(), all(refused())
    facts["order"] = all(refused_in_another_order())
    return facts


def refused_in_another_order() -> Iterator[bool]:
    """Of models whose layers rank 0 builds in another order: whether all ranks say so, by shapes or by names."""
    order = "ab" if dist.get_rank() == 0 else "ba"

    def build(width: int, device: str | None = None) -> nn.Module:
        with Init(remote_device=device):
            return nn.ModuleDict({name: nn.Linear(4, {"a": 4, "b": width}[name]) for name in order})

    with pytest.raises(ValueError, match=r"that zero\.Init divides differ between ranks: entry 0 is Linear"):
        build(5)
    yield True
    for use in (
        lambda model: zero.initialize(model=model, config=config_of(3)),
        lambda model: zero.initialize(model=model, config=config_of(1)),
        lambda model: zero.init_inference(model, dtype=torch.float32),
        with_weights,
    ):
        with pytest.raises(ValueError, match=r"the model's parameters differ between ranks: entry 0 is a\."):
            use(build(4, "meta" if use is with_weights else None))
        yield True


def with_weights(model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        file.write_bytes(save(nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"}).state_dict()))
        zero.initialize(model=model, weights=file, config=config_of(3))


def siblings() -> bool:
    """Whether models beside each other are divided in one order, and garbage of one rank is left out."""
    rank, taken = dist.get_rank(), [bytearray(1000 + 900 * k) for k in range(500 * dist.get_rank())]
    gc.disable()
    torch.manual_seed(4)
    whole = [nn.Linear(4 + k % 2, 4) for k in range(20)]
    torch.manual_seed(4)
    with Init():
        models = [nn.Linear(4 + k % 2, 4) for k in range(20)]
        dropped = nn.Linear(2, 2)
        dropped.itself = [dropped]  # type: ignore[assignment]
        del dropped
        if rank == 0:
            gc.collect()
    gc.enable()
    del taken
    return all(equal(model, plain) for model, plain in zip(models, whole, strict=True))


def nested() -> bool:
    """Whether a weight stays tied if one of its modules is built in a block within the other's."""
    with Init():
        table = nn.Embedding(6, 4)
        with Init():
            head = nn.Linear(4, 6, bias=False)
            head.weight = table.weight
    return table.weight is head.weight and hasattr(head.weight, "ds_id")


def entered_again() -> bool:
    """Whether one block can be entered twice, also within itself, and a parameter of both stays tied."""
    block, shared = Init(), nn.Parameter(torch.randn(6, 4))
    heads = []
    for _ in range(2):
        with block:
            head = nn.Linear(4, 6, bias=False)
            with block:
                head.weight = shared
        heads.append(head)
    return heads[0].weight is heads[1].weight and hasattr(heads[0].weight, "ds_id")


def copied_sets() -> bool:
    """Whether ranks gather a model and its deep copy, in one set, in the same order."""
    with Init():
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    others = [nn.Parameter(torch.ones(1)) for _ in range(37 * dist.get_rank())]  # for other addresses on each rank
    average = copy.deepcopy(model)
    del others
    with torch.no_grad():
        for p in average.parameters():
            p.fill_(1.0)
    with GatheredParameters({*average.parameters(), *model.parameters()}):
        mixed = [p for p in model.parameters() if (p == 1).any()] + [p for p in average.parameters() if (p != 1).any()]
    return not mixed


def refused() -> Iterator[bool]:
    """Uses that would mix up parts or wait for others: whether they are errors on all ranks."""
    rank = dist.get_rank()
    with Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for modifier in (-1, 7):
        with (
            pytest.raises(ValueError, match=f"modifier_rank {modifier} is no rank"),
            GatheredParameters(model[0].weight, modifier_rank=modifier),
        ):
            pass
        yield True
    with pytest.raises(ValueError, match="ranks gather differ between ranks"):
        model[min(rank, 1)].weight.sum()
    yield True
    params = [model[0].weight, model[1].weight]
    with (
        pytest.raises(ValueError, match="ranks gather differ between ranks"),
        GatheredParameters(params if rank else params[::-1]),
    ):
        pass
    yield True
    whole = {nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))}
    with pytest.raises(ValueError, match="a list in place of the set"), GatheredParameters(whole, modifier_rank=0):
        pass
    yield True


def written() -> dict[str, bool]:
    torch.manual_seed(3)
    whole, rank = Net(), dist.get_rank()
    model = copy.deepcopy(whole)
    with Init(module=model):
        pass
    facts = {"at once": equal(model, whole) and hasattr(model.place, "ds_id")}
    table = model.table.weight
    with GatheredParameters(table, modifier_rank=1):
        if rank == 1:
            table.data[2] = 5.0
    with GatheredParameters(table):
        facts["modified"] = bool((table[2] == 5).all()) and model.head.weight is table
    with GatheredParameters(table):
        table.data.zero_()
    facts["lost"] = not bool((values(model)["table.weight"] == 0).all())
    model.load_state_dict({name: of_rank_0(x) for name, x in whole.state_dict().items()})
    facts["loaded"] = equal(model, whole)
    facts["layer's sizes"] = table.to_local().shape == whole.table.weight.shape  # as PEFT reads them
    norms = torch._foreach_norm([p.detach() for p in model.parameters()])
    facts["lists"] = [x.item() for x in norms] == [p.detach().norm().item() for p in whole.parameters()]
    turned = [torch._weight_norm(p, p[:, :1]) for p in (model.blocks[0].up.weight, whole.blocks[0].up.weight)]
    facts["weight norm"] = torch.equal(*turned)
    facts["type"] = torch.equal(table.type(torch.float64).sum(), whole.table.weight.type(torch.float64).sum())
    facts["reads"] = torch.equal(table[3] * 2, whole.table.weight[3] * 2)
    ids = torch.arange(6).view(1, 6) % VOCABULARY
    with torch.no_grad():
        facts["computes"] = warned(lambda: facts.update(computed=torch.equal(model(ids), whole(ids)))) == []
    facts["warns"] = [line[:22] for line in warned(lambda: (model(ids), model(ids)))] == ["a layer whose paramete"]
    with torch.no_grad():
        before = table[5] * 1
        model.table.weight += 1
        facts["added"] = model.table.weight is table and torch.equal(table[5] * 1, before + 1)
        torch.mul(table, 2, out=table)
        facts["out"] = torch.equal(values(model)["table.weight"][5], (before + 1) * 2)
    kept = [table[0]][rank:]  # in a variable of rank 0, and gone on rank 1
    facts["reads again"] = torch.equal(table[5] * 1, values(model)["table.weight"][5]) and len(kept) == (rank == 0)
    larger = torch.arange(3.0 * WIDTH).view(3, WIDTH) + rank
    model.table.weight.data = larger
    with GatheredParameters(table):
        facts["replaced"] = torch.equal(table, of_rank_0(larger)) and table.ds_shape == larger.shape  # type: ignore[attr-defined]
    for act in (lambda: table.data.unsqueeze_(0), lambda: table.resize_(1)):
        with pytest.raises(ValueError, match="assign a new parameter"):
            act()
    for reads in (pickle.dumps, Tensor.data_ptr, Tensor.share_memory_, lambda p: save({"p": p.detach()})):
        with pytest.raises(RuntimeError, match="this one has a part"):
            reads(table)  # type: ignore[arg-type]
    table.data = whole.table.weight.data
    facts["converted"] = equal(model.to(torch.float64), whole.to(torch.float64)) and hasattr(model.place, "ds_id")
    served = zero.init_inference(model.float(), dtype=torch.float32)
    with torch.no_grad():
        facts["served"] = torch.allclose(served.module(ids), whole.float()(ids), atol=1e-5)
    return facts


def config_of(stage: int, **more: object) -> dict[str, object]:
    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    base = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "optimizer": adamw}
    return base | more


FORMS: dict[str, dict[str, object]] = {
    "stage 3": config_of(3),
    "bf16": config_of(3, bf16={"enabled": True}),
    "host": config_of(3, zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}),
    "1-bit": config_of(3, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-2}}, onebit={"compression": "always"}),
    "one node each": config_of(3, onebit={"ranks_per_node": 1}),
    "rounds": config_of(3, onebit={"local_steps": {"every": 2}, "ranks_per_node": 2}),
    "slices": config_of(3, onebit={"tensor": 2}),
    "slices, stage 1": config_of(1, onebit={"tensor": 2}),
    "stage 2": config_of(2),
    "stage 0": config_of(0),
}


def groups(model: nn.Module) -> list[dict[str, object]]:
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    others = [p for name, p in model.named_parameters() if "bias" not in name]
    return [{"params": biases, "weight_decay": 0.0}, {"params": others}]


def losses(config: dict[str, object], *, in_parts: bool, own_optimizer: bool) -> list[float]:
    torch.manual_seed(1)
    with Init(enabled=in_parts):
        model = Net()
    model.register_parameter("later", nn.Parameter(torch.ones(VOCABULARY)))  # whole: nobody has divided it
    model.head.register_forward_hook(lambda module, args, out: out + 0 * model.later)
    more: dict[str, object] = {"model_parameters": groups(model)}
    if own_optimizer:
        more = {"optimizer": torch.optim.AdamW(groups(model), lr=1e-2)}
    if has_slices := "tensor" in config.get("onebit", {}):  # type: ignore[operator]
        more["tensor_plan"] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    engine, *_ = zero.initialize(model=model, config=config, **more)  # type: ignore[arg-type]
    draw, found = torch.Generator().manual_seed(5 if has_slices else 5 + dist.get_rank()), []
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (2, 7), generator=draw)
        loss = nn.functional.cross_entropy(engine(ids).view(-1, VOCABULARY).float(), ids.view(-1))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def trained() -> dict[str, bool]:
    facts = {}
    for name, config in FORMS.items():
        own_optimizer = name in ("stage 3", "stage 2")
        for own in (False, True) if own_optimizer else (False,):
            pair = [losses(config, in_parts=in_parts, own_optimizer=own) for in_parts in (True, False)]
            facts[f"{name}, {own}"] = pair[0] == pair[1] and pair[0][-1] < pair[0][0]
    return facts


def surface(folder: str) -> dict[str, object]:
    zero.init_distributed(dist_backend="gloo")
    return {"built": built(), "written": written(), "trained": trained() if dist.get_world_size() == 2 else {}}


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def grown_mib(act: Callable[[], object]) -> float:
    """By how much this process grows at most while it runs."""
    before, peak, is_over = anonymous_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            peak[0] = max(peak[0], anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        act()
    finally:
        is_over.set()
        watcher.join()
    return peak[0] - before


class Wide(nn.Module):
    """Eight matrices of 36 MiB, which malloc gives back when they are freed."""

    def __init__(self, width: int = 3072) -> None:
        super().__init__()
        for k in range(8):
            setattr(self, f"layer{k}", nn.Linear(width, width, bias=False))


def memory() -> list[float]:
    """MiB that a rank grows by at most, while a model of 288 MiB is built, and sharded."""
    zero.init_distributed(dist_backend="gloo")
    models: list[nn.Module] = []

    def build(*width: int) -> None:
        with Init():
            models.append(Wide(*width))

    def shard() -> None:
        zero.initialize(model=models.pop(), config=config_of(3))

    build(8)
    shard()  # what is imported first
    return [grown_mib(build), grown_mib(shard)]
