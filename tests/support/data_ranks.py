"""What the ranks of test_zero_data_efficiency.py do: curricula and dropped tokens through the engine."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pipeline_model import CONTEXT, VOCABULARY, WIDTH, Block, Positions
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from train.layouts import tensor_plan
from train.model import ModelSize, build_model, next_byte_loss

from onebit import zero
from onebit.comm import init
from onebit.comm.messages import gather_texts
from onebit.zero import grid as grids
from onebit.zero.data_efficiency import Root, TokenDropping, drop_tokens
from onebit.zero.data_efficiency.token_dropping import arm

SAMPLES, LAYERS, GLOBAL = 20, 4, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), Positions()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.positions(self.table(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def dataset() -> TensorDataset:
    """Sample k begins with the token k."""
    rest = torch.randint(VOCABULARY, (SAMPLES, CONTEXT), generator=torch.Generator().manual_seed(2))
    return TensorDataset(torch.cat([torch.arange(SAMPLES)[:, None], rest], dim=1))


def dropped(low: int = 4, steps: int = 20, **keys: object) -> dict:
    schedule = {"min_value": low, "max_value": CONTEXT, "schedule_config": {"require_steps": steps, "seq_per_step": 2}}
    ltd = {"enabled": True, "total_layer_num": LAYERS, "random_ltd_schedule": schedule, "model_type": "decoder"}
    return {"enabled": True, "random_ltd": ltd | keys}


def sampled(folder: str) -> dict:
    discrete = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [9, 14, 19], "max_step": [2, 4]}}
    linear = {"total_curriculum_step": 8, "difficulty_step": 2}
    shape = {"min_difficulty": 5, "max_difficulty": CONTEXT + 1, "schedule_config": linear}
    metrics = {
        "order": {"index_to_metric_path": f"{folder}/order.npy", **discrete},
        "seqlen_truncate": {"clustering_type": "single_cluster", **shape},
    }
    return {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics}}


def config_of(optimizer: str, stage: int, **blocks: object) -> dict:
    params = {"lr": 0.01, "weight_decay": 0.0} | ({"freeze_step": 2} if optimizer == "OneBitAdam" else {})
    ours = {"onebit": {"compression": "always", "block": 64}} if optimizer == "OneBitAdam" else {}
    return {
        "train_batch_size": GLOBAL,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage},
        **ours,
        **blocks,
    }


def bits(engine: zero.Engine) -> str:
    whole = engine.module_state_dict()  # type: ignore[attr-defined]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in whole.values())).hexdigest()


def next_token(engine: zero.Engine, tokens: Tensor) -> Tensor:
    return F.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())  # type: ignore[attr-defined]


def whole_sequence(engine: zero.Engine, tokens: Tensor) -> Tensor:
    return engine(tokens[:, :CONTEXT]).square().mean()  # type: ignore[attr-defined, no-any-return]


def train(engine: zero.Engine, steps: int, loss_of: Callable[[zero.Engine, Tensor], Tensor] = next_token) -> list[dict]:
    """Of each step: all ranks' samples, sorted, the length of sequences, this rank's losses."""
    rows: list[dict] = []
    assert engine.loader is not None
    batches = zero.data.forever(engine.loader)
    for _ in range(steps):
        seen, losses, length = [], [], 0
        for _ in range(engine.gradient_accumulation_steps()):
            (tokens,) = next(batches)
            seen += tokens[:, 0].tolist()
            length = tokens.shape[1]
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        said = gather_texts(engine.grid.world, json.dumps(seen))
        samples = sorted(k for text in said for k in json.loads(text))
        rows.append({"samples": samples, "length": length, "losses": losses})
    return rows


def start(folder: str, optimizer: str, stage: int) -> zero.Engine:
    """Curricula and dropped tokens; two shards, or one if there is one rank."""
    grid = grids.start(shard=min(2, torch.distributed.get_world_size()))
    blocks = {"data_efficiency": {"enabled": True, "data_routing": dropped(), "data_sampling": sampled(folder)}}
    config = config_of(optimizer, stage, **blocks)
    return zero.initialize(model=net(), config=config, training_data=dataset(), grid=grid)[0]


def writes(folder: str, optimizer: str, stage: int) -> dict:
    """Six steps in one go, and the same with a checkpoint after the third, which is within an epoch."""
    rank = init("gloo", levels=1).rank
    np.save(Path(folder) / "order.npy", np.arange(SAMPLES)) if rank == 0 else None
    torch.distributed.barrier()
    whole, first, second = (start(folder, optimizer, stage) for _ in range(3))
    torch.manual_seed(rank)
    expected = train(whole, 6)
    torch.manual_seed(rank)
    train(first, 3)
    first.save_checkpoint(folder)
    first.wait_for_checkpoint()
    second.load_checkpoint(folder)
    kept = second.random_ltd_scheduler.kept  # type: ignore[attr-defined]
    again = train(second, 3)
    return {"expected": expected, "same": again == expected[3:] and bits(second) == bits(whole), "kept": kept}


def reads(folder: str, optimizer: str, stage: int) -> list:
    """The rest of that run, in a smaller world."""
    init("gloo", levels=1)
    engine = start(folder, optimizer, stage)
    engine.load_checkpoint(folder)
    return train(engine, 3)


# ---------------------------------------------------------------- layouts


def layer_list() -> list:
    def head() -> nn.Module:
        return nn.Linear(WIDTH, VOCABULARY)

    ends = [zero.LayerSpec(nn.Embedding, VOCABULARY, WIDTH), zero.LayerSpec(Positions)]
    return [*ends, *[zero.LayerSpec(Block)] * LAYERS, zero.LayerSpec(head)]


def judge(output: object, target: object) -> Tensor:
    assert isinstance(output, Tensor) and isinstance(target, Tensor)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def micro_batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def layouts() -> dict:
    """Stages and tensor slices against the same model on one rank, without an engine."""
    init("gloo", levels=1)
    facts: dict = {}
    for interval in (0, 1):
        grid = grids.start(pipe=2)
        model = zero.PipelineModule(layer_list(), loss_fn=judge, activation_checkpoint_interval=interval)
        config = config_of("AdamW", 0) | {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2}
        config["data_efficiency"] = {"enabled": True, "data_routing": dropped(layer_name="layers.?", total_layer_num=7)}
        config["data_efficiency"]["data_routing"]["random_ltd"]["random_ltd_layer_id"] = [3, 4]
        engine = zero.initialize(model=model, config=config, grid=grid)[0]
        losses = [float(engine.train_batch(iter([micro_batch(step, k) for k in range(3)]))) for step in range(4)]
        facts[f"pipe {interval}"] = losses
    (plain,) = zero.PipelineModule(layer_list(), loss_fn=judge).stages([range(7)])
    facts["one stage"] = losses_of(plain, drop_tokens(plain, ["layers.3", "layers.4"], kept_by(dropped())))
    size = ModelSize(layers=3, width=32, heads=2, context=CONTEXT)
    grid = grids.start(tensor=2)
    config = config_of("AdamW", 0) | {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2}
    config["data_efficiency"] = {"enabled": True, "data_routing": dropped(total_layer_num=3)}
    engine = zero.initialize(model=build_model(size, 1), config=config, grid=grid, tensor_plan=tensor_plan(2, 2))[0]
    found = []
    for step in range(4):
        total = 0.0
        for k in range(3):
            x, y = micro_batch(step, k)
            loss = next_byte_loss(engine(x), torch.cat([x[:, :1], y], dim=1))  # type: ignore[arg-type]
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / 3
        found.append(total)
    facts["two slices"] = found
    whole = build_model(size, 1)
    dropping = _ByHalves(kept_by(dropped()))
    arm(dropping, whole, ["blocks.1"])
    facts["one slice"] = losses_of(whole, dropping)
    return facts


class _ByHalves(TokenDropping):
    """On a whole sequence what two slices of it keep."""

    def _draw(self, name: str, number: int, hidden: Tensor, *given: object) -> Tensor:
        halves = TokenDropping(self.pacing, seed=self.seed, parts=2)
        halves.advance(self.step)
        return halves._draw(name, number, hidden, *given)  # type: ignore[arg-type]


def kept_by(block: dict) -> Root:
    schedule = block["random_ltd"]["random_ltd_schedule"]
    steps, multiple = schedule["schedule_config"]["require_steps"], schedule["schedule_config"]["seq_per_step"]
    return Root(schedule["min_value"], schedule["max_value"], steps, multiple)


def losses_of(plain: nn.Module, dropping: TokenDropping) -> list[float]:
    """Without an engine, on one rank."""
    optimizer, found = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0), []
    for step in range(4):
        losses = [judge(plain(x), y) / 3 for x, y in (micro_batch(step, k) for k in range(3))]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dropping.advance()
        found.append(float(sum(float(loss.detach()) for loss in losses)))
    return found


# ---------------------------------------------------------------- the other parts


class Told(Net):
    """Is told how many tokens of a sequence to take, as models for DeepSpeed are."""

    def forward(self, tokens: Tensor, curriculum_seqlen: int | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(tokens[:, :curriculum_seqlen])


def others(folder: str) -> dict:
    """The older curriculum, batches by tokens, rates by tokens; two ranks."""
    init("gloo", levels=1)
    grid, facts = grids.start(shard=1), {}

    def start(model: nn.Module | None = None, data: object = None, **blocks: object) -> zero.Engine:
        config = config_of("AdamW", 0, **blocks)
        return zero.initialize(model=model or net(), config=config, training_data=data, grid=grid)[0]  # type: ignore[arg-type]

    schedule = {
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [4, 6, CONTEXT + 1], "max_step": [2, 3]},
    }
    older = {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **schedule}}
    engine = start(data=dataset(), **older)
    facts["legacy"] = train(engine, 4, whole_sequence)
    engine = start(Told(), **older)
    facts["told"] = []
    for _ in range(3):
        for _ in range(engine.gradient_accumulation_steps()):
            out = engine(micro_batch(0, 0)[0])
            engine.backward(out.square().mean())  # type: ignore[attr-defined]
            engine.step()
        facts["told"].append(out.shape[1])  # type: ignore[attr-defined]
    try:
        start(**older)(micro_batch(0, 0)[0])
    except ValueError as error:
        facts["too long"] = str(error)
    custom = {"curriculum_learning": {"enabled": True, "schedule_type": "custom"}}
    engine = start(data=dataset(), **custom)
    try:
        next(iter(engine.loader))  # type: ignore[arg-type]
    except RuntimeError as error:
        facts["no function"] = str(error)
    engine.set_custom_curriculum_learning_schedule(lambda step: 3 + step)  # type: ignore[attr-defined]
    facts["custom"] = [row["length"] for row in train(engine, 3, whole_sequence)]

    np.save(Path(folder) / "lengths.npy", 1 + np.arange(SAMPLES) % 5) if grid.world.rank == 0 else None
    torch.distributed.barrier()
    dynamic = {
        "enabled": True,
        "max_tokens_per_batch": 6,
        "lengths_path": f"{folder}/lengths.npy",
        "samples_order": "order",
    }
    block = {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": dynamic}}
    engine = start(data=dataset(), data_efficiency=block)
    rates, step = [], engine.optimizer.step

    def noting() -> object:
        rates.append(engine.get_lr()[0])
        return step()

    engine.optimizer.step = noting  # type: ignore[assignment]
    seen = [row["samples"] for row in train(engine, 2, whole_sequence)]
    facts["dynamic"] = {"rates": rates, "samples": seen, "after": engine.get_lr()[0]}

    ltd = dropped(layer_token_lr_schedule={"enabled": True, "total_layer_tokens": 3000, "warmup_layer_tokens": 100})
    engine = start(data=dataset(), data_efficiency={"enabled": True, "data_routing": ltd})
    train(engine, 2, whole_sequence)
    facts["tokens"] = [engine.scheduler.tokens, engine.efficiency.layer_tokens, engine.get_lr()[0]]  # type: ignore[union-attr]
    engine.save_checkpoint(Path(folder) / "tokens")
    again = start(data=dataset(), data_efficiency={"enabled": True, "data_routing": ltd})
    again.load_checkpoint(Path(folder) / "tokens")
    facts["tokens again"] = [again.scheduler.tokens, again.efficiency.layer_tokens, again.get_lr()[0]]  # type: ignore[union-attr]
    return facts


def examples(folder: str) -> dict:
    """The losses of both examples of Hugging Face's models: of a whole run, and of one in two parts."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples" / "deepspeed"))
    import bert_data
    import gpt2_data

    facts = {}
    for module in (gpt2_data, bert_data):
        place = Path(folder) / module.__name__
        steps = ["--steps", "30", "--folder"]
        whole = module.main([*steps, f"{place}/whole"])
        first = module.main([*steps, f"{place}/parts", "--stop-after", "11"])
        facts[module.__name__] = [whole, first, module.main([*steps, f"{place}/parts"])]
    return facts
