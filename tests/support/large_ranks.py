"""What the ranks of test_large_models.py do: models in bfloat16, without values, in files, on one and on several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from errors import error_of
from family import same
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from onebit import zero
from onebit.comm import init

Results = dict[str, object]


class Rotary(nn.Module):
    """A table that no file holds."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.register_buffer("table", self.compute(), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def compute(self) -> Tensor:
        return torch.arange(self.n, dtype=torch.float32).add(1).log()

    def reset_buffers(self) -> None:
        self.table.copy_(self.compute())
        self.count.zero_()


class Lora(nn.Module):
    """A linear layer, and an adapter beside it."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, n)
        self.a, self.b = nn.Linear(n, 4, bias=False), nn.Linear(4, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Net(nn.Module):
    """Tied weights, a layer with an odd number of rows, buffers of both kinds."""

    def __init__(self, n: int = 12) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(21, n), Rotary(n)
        self.layers = nn.ModuleList([Lora(n), Lora(n)])
        self.norm, self.head = nn.LayerNorm(n), nn.Linear(n, 21, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.rotary.table.to(self.embed.weight.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def net(dtype: torch.dtype = torch.float32, *, freezes: bool = False) -> Net:
    torch.manual_seed(5)
    made = Net()
    for name, p in made.named_parameters():
        p.data = p.data.to(torch.bfloat16).to(dtype)
        p.requires_grad_(not freezes or ".a." in name or ".b." in name)
    return made


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def config_of(name: str, stage: int, low: bool = True, **ours: object) -> dict:
    params = {"lr": 1e-3, "weight_decay": 0.01} | ({"freeze_step": 2} if name.startswith("OneBit") else {})
    params |= {"head": ""} if name == "OneBitMuon" else {}
    if name != "AdamW" and ours.get("sharding") != "inter_node":
        ours["compression"] = "auto" if init().world_size == 1 else "always"  # one rank measures nothing
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": {"type": name, "params": params},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": low},
        "onebit": ours,
    }


def train(engine: zero.Engine, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(21, (4,), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = nn.functional.cross_entropy(engine(tokens).float(), (tokens * 2) % 21)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def adapters_over_a_frozen_base(folder: str, rank: int, name: str, stage: int) -> Results:
    """Base in bfloat16, and in float32 with the same values."""
    found: Results = {}
    runs = []
    for dtype in (torch.bfloat16, torch.float32):
        engine = zero.initialize(model=net(dtype, freezes=True), config=config_of(name, stage))[0]
        losses = train(engine, range(5), rank)
        frozen = {p.dtype for p in engine.module.parameters() if not p.requires_grad}
        trained = {p.dtype for p in engine.sharding.held.parameters() if p.requires_grad}
        runs.append((losses, {name: x.float() for name, x in whole(engine.sharding.held).items()}))
        if dtype == torch.bfloat16:
            found |= {"frozen": [str(d) for d in frozen], "trained": [str(d) for d in trained]}
        engine.close()
    found["same"] = runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    return found


def of_files_as_of_memory(folder: str, rank: int, name: str, stage: int, **ours: object) -> Results:
    """A model on "meta", of a Hugging Face folder: the same training as of the model that was saved."""
    config = config_of(name, stage, **ours)
    plain = zero.initialize(model=net(), config=config)[0]
    files = zero.initialize(model=on_meta(), config=config, weights=f"{folder}/hf")[0]
    found: Results = {
        "form": plain.form.name,
        "weights": same(whole(plain.sharding.held), whole(files.sharding.held)),
        "table": torch.equal(files.module.rotary.table, plain.module.rotary.table),
        "tied": files.module.head.weight is files.module.embed.weight,
        "losses": train(plain, range(4), rank) == train(files, range(4), rank),
        "trained": same(whole(plain.sharding.held), whole(files.sharding.held)),
    }
    tag_folder = f"{folder}/own-{name}-{stage}-{len(ours)}-{init().world_size}"
    plain.save_checkpoint(tag_folder)
    plain.wait_for_checkpoint()
    own = zero.initialize(model=on_meta(), config=config, weights=tag_folder)[0]
    found["own"] = same(whole(plain.sharding.held), whole(own.sharding.held))
    for engine in (plain, files, own):
        engine.close()
    return found


def initial_values(folder: str, rank: int) -> Results:
    """The same whatever the stage is."""
    engines = [
        zero.initialize(model=on_meta(), config=config_of("AdamW", stage), weights="reset_parameters", seed=3)[0]
        for stage in (0, 1, 3)
    ]
    values = [whole(engine.sharding.held) for engine in engines]
    return {
        "same": all(same(values[0], other) for other in values[1:]),
        "drawn": bool(values[0]["layers.0.base.weight"].std() > 0.01),
        "norm": bool((values[0]["norm.weight"] == 1).all()),
    }


def there_and_back(folder: str, rank: int) -> Results:
    """A sharded engine's weights as a folder of small files, which transformers' reader would take, and back."""
    out = Path(folder) / f"out-{init().world_size}"
    first = zero.initialize(model=net(), config=config_of("AdamW", 3))[0]
    train(first, range(2), rank)
    zero.export_weights(first.sharding.held, out, first.grid.world, max_file_bytes=800)
    held = whole(first.sharding.held)
    table = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    sizes = [sum(x.nbytes for x in load_file(file).values()) for file in sorted(out.glob("*.safetensors"))]
    second = zero.initialize(model=on_meta(), config=config_of("AdamW", 1), weights=out)[0]
    third = zero.initialize(model=net(), config=config_of("AdamW", 0))[0]
    zero.import_weights(third.sharding.held, out, third.grid.world)
    return {
        "same": same(held, whole(second.sharding.held)) and same(held, whole(third.sharding.held)),
        "files": len(sizes) > 3 and max(sizes) <= max(800, held["embed.weight"].nbytes),
        "names": sorted(table) == sorted({*held, "rotary.count"}),
    }


def masters_of_a_low_model(folder: str, rank: int) -> Results:
    """A configuration in float32 of a model in bfloat16: the optimizer's masters, as DeepSpeed's names give them."""
    engine = zero.initialize(model=net(torch.bfloat16), config=config_of("OneBitAdam", 0, low=False))[0]
    train(engine, range(4), rank)
    pairs = [(p, zero.utils.safe_get_full_fp32_param(p)) for p in engine.module.parameters()]
    rounded = all(p.dtype == torch.bfloat16 and torch.equal(p, x.to(torch.bfloat16)) for p, x in pairs)
    finer = any(not torch.equal(p.float(), x) for p, x in pairs)
    first = engine.module.norm.weight
    exact = torch.full(first.shape, 1.0 + 2.0**-20)
    zero.utils.safe_set_full_fp32_param(first, exact)
    engine.optimizer.state_dict()  # looks for what has been written into parameters
    return {
        "set": torch.equal(zero.utils.safe_get_full_fp32_param(first), exact) and bool((first == 1).all()),
        "rounded": rounded,
        "finer": finer,
    }


def in_stages_and_slices(folder: str, rank: int) -> Results:
    """A pipeline's stages and a tensor plan's slices, of one folder that has all."""
    found: Results = {}
    specs = [zero.LayerSpec(nn.Linear, 12, 12), torch.tanh, zero.LayerSpec(nn.Linear, 12, 12)]
    out = Path(folder) / "pipeline"
    low = config_of("AdamW", 1) | {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    pipe = zero.PipelineModule(specs, num_stages=2, loss_fn=nn.functional.mse_loss)
    first = zero.initialize(model=pipe, config=low)[0]
    zero.export_weights(first.sharding.held, out, first.grid.world, grid=first.grid, max_file_bytes=400)
    again = zero.PipelineModule(specs, num_stages=2, loss_fn=nn.functional.mse_loss, base_seed=99)
    second = zero.initialize(model=again, config=low, weights=out)[0]
    found["stages"] = (
        same(whole(first.sharding.held), whole(second.sharding.held)) and len(whole(first.sharding.held)) == 2
    )
    plan = {"layers.*.a": ColwiseParallel(), "layers.*.b": RowwiseParallel()}
    config = config_of("AdamW", 1, tensor=2)
    plain = zero.initialize(model=net(), config=config, tensor_plan=plan)[0]
    files = zero.initialize(model=on_meta(), config=config, tensor_plan=plan, weights=f"{folder}/hf")[0]
    found["slices"] = same(whole(plain.sharding.held), whole(files.sharding.held))
    found["losses"] = train(plain, range(2), 0) == train(files, range(2), 0)
    return found


def differences(folder: str, rank: int) -> Results:
    """Named errors, with the rank, on all ranks."""
    messages: Results = {}

    def refuse(name: str, model: nn.Module, weights: str | None, config: dict | None = None) -> None:
        given = {"model": model, "config": config or config_of("AdamW", 3), "weights": weights}
        messages[name] = error_of(Exception, zero.initialize, **given)

    with torch.device("meta"):
        larger, other = Net(16), nn.Linear(3, 3)
    refuse("shape", larger, f"{folder}/hf")
    refuse("name", other, f"{folder}/hf")
    refuse("nothing", on_meta(), f"{folder}/none")
    for stage in (0, 2):
        refuse(f"low {stage}", net(torch.bfloat16), None, config_of("AdamW", stage, low=False))
    return messages


# name, stage, sharding; low: parameters in bfloat16, whose masters are the optimizer's. A stage's form must be said
# where one rank is to become several: "auto" takes another.
WORLDS = [
    ("OneBitAdam", 0, "auto"),
    ("OneBitAdam", 1, "inter_node"),
    ("OneBitAdam", 2, "intra_node"),
    ("OneBitLamb", 0, "auto"),
    ("ZeroOneAdam", 1, "intra_node"),
    ("OneBitMuon", 2, "auto"),
    ("AdamW", 3, "auto"),
    ("OneBitAdam low", 0, "auto"),
    ("ZeroOneAdam low", 3, "intra_node"),
]


def continues_elsewhere(folder: str) -> Results:
    """Loads what a world of another size saved, and saves for the next: one rank and two in turn."""
    found: Results = {}
    rank = init().rank
    for name, stage, sharding in WORLDS:
        path = Path(folder) / f"worlds-{name}-{stage}"
        kind, _, low = name.partition(" ")
        config = config_of(kind, stage, low=not low, sharding=sharding)
        engine = zero.initialize(model=net(torch.bfloat16 if low else torch.float32), config=config)[0]
        begin = 0
        if path.exists():
            engine.load_checkpoint(str(path))
            begin = engine.global_steps
        if low and path.exists():
            saved = torch.load(path.with_suffix(".masters"), weights_only=True)
            masters = [zero.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
            assert all(map(torch.equal, saved, masters)), f"{name}: masters are not those that were saved"
        losses = train(engine, range(begin, begin + 3), rank)
        engine.save_checkpoint(str(path))
        engine.wait_for_checkpoint()
        masters = [zero.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()] if low else []
        if low and rank == 0:
            torch.save(masters, path.with_suffix(".masters"))
        may_compress = getattr(getattr(engine.optimizer, "policy", None), "compresses", True) is not False
        found[f"{name} {stage}"] = [begin, all(loss < 20 for loss in losses), may_compress]
        engine.close()
    return found


CASES: dict[str, Callable[[str, int], Results]] = {
    **{
        f"lora {name} {stage}": lambda f, r, n=name, s=stage: adapters_over_a_frozen_base(f, r, n, s)  # type: ignore[misc]
        for name, stage in (("AdamW", 3), ("OneBitAdam", 0), ("OneBitAdam", 2))
    },
    **{
        f"files {name} {stage}": lambda f, r, n=name, s=stage: of_files_as_of_memory(f, r, n, s)  # type: ignore[misc]
        for name, stage in (("AdamW", 3), ("OneBitAdam", 1))
    },
    "files across": lambda f, r: of_files_as_of_memory(f, r, "OneBitAdam", 1, sharding="inter_node"),
    "initial values": initial_values,
    "there and back": there_and_back,
    "differences": differences,
    "low": masters_of_a_low_model,
}
ON_TWO = {"stages and slices": in_stages_and_slices}


def run_cases(folder: str) -> dict[str, Results]:
    found: dict[str, Results] = {}
    rank = init().rank
    for name, case in (CASES | (ON_TWO if init().world_size == 2 else {})).items():
        found[name] = case(folder, rank)
    return found


def write_folder(folder: Path, model: nn.Module) -> None:
    """As Hugging Face: two files and an index, tied weights once."""
    folder.mkdir()
    state = {name: x.contiguous() for name, x in model.state_dict().items() if name != "head.weight"}
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, folder / file)
    table = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
