"""What the ranks of test_sequence_pipeline.py do: two stages, and sequences over two ranks, or pairs, at each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from errors import error_of
from pipeline_model import CONTEXT, PLAN, VOCABULARY, WIDTH, Block, Positions
from sequence_ranks import decoder
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from onebit import zero
from onebit.comm import init
from onebit.zero import grid as grids
from onebit.zero.sequence.stages import Split
from onebit.zero.sparse_attention import replace_attention

STEPS, RESUMED, ROWS = 3, 2, 8
DENSE = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-3, "eps": 1e-4, "freeze_step": 99}}
COMPRESSING = {"type": "OneBitAdam", "params": {"lr": 1e-3, "eps": 1e-4, "freeze_step": 1}}
PLANS = {
    "layers": dict.fromkeys(("layers.*.qkv", "layers.*.mlp_in"), ColwiseParallel())
    | dict.fromkeys(("layers.*.attention_out", "layers.*.mlp_out"), RowwiseParallel()),
    "even layers": PLAN,  # also divides pieces between layers, so they are even
}
SPARSE = {"mode": "bslongformer", "block": 2}
Case = tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "llama, stage 1": ("llama", 1, DENSE, {"schedule": "gpipe"}, {}),
    "llama, stage 3": ("llama", 3, DENSE, {}, {}),
    "llama, one bit": ("llama", 0, ONE_BIT, {}, {"warmup_codec": "fp32"}),
    "windows": ("windows", 2, DENSE, {}, {}),
    "gpt2": ("gpt2", 0, DENSE, {}, {}),
    "sparse": ("sparse", 2, DENSE, {}, {}),
    "packed": ("packed", 1, DENSE, {}, {}),
    "heads divided": ("llama", 0, DENSE, {}, {"sequence": {"ulysses_degree": "auto"}}),
    "layers": ("layers", 0, DENSE, {}, {}),
    "layers, interleaved": ("layers", 1, DENSE, {"schedule": "interleaved"}, {}),
    "layers, zero-bubble": ("layers", 0, DENSE, {"schedule": "zero-bubble"}, {}),
    "layers, zbv": ("layers", 1, DENSE, {"schedule": "zbv"}, {}),
    "compressed": ("llama", 0, COMPRESSING, {}, {"compression": "always"}),
}
"""Model, ZeRO stage, optimizer, and the blocks "pipeline" and "onebit"; all but the last equal AdamW in one process."""
ELSEWHERE = {
    "one stage": ("layers", 1, 4),
    "whole": ("packed", 2, 1),
    "one module": ("packed", 1, 2),
    "kept": ("packed", 1, 1),
}
"""A case in another number of stages, and of ranks of a sequence; "kept" computes no activations again."""
SLICED: dict[str, Case] = {
    "llama, stage 3": ("llama", 3, DENSE, {"schedule": "gpipe"}, {"tensor": 2, "ranks_per_node": 8}),
    "sparse": ("sparse", 0, DENSE, {}, {"tensor": 2}),
    "heads divided": ("llama", 0, DENSE, {}, {"tensor": 2, "sequence": {"ulysses_degree": "auto"}}),
    "gpt2, one bit": ("gpt2", 0, ONE_BIT, {}, {"tensor": 2, "warmup_codec": "fp32"}),
    "layers, zbv": ("layers", 2, DENSE, {"schedule": "zbv"}, {"tensor": 2, "ranks_per_node": 8}),
    "pieces divided": ("even layers", 1, DENSE, {}, {"tensor": 2, "ranks_per_node": 8}),
    "compressed": ("llama", 0, COMPRESSING, {}, {"tensor": 2, "compression": "always"}),
}
"""The same with two ranks for each layer."""
USUAL = ("llama, stage 3", "heads divided", "pieces divided")
"""Of these. The others join what four ranks show, and test_sparse_engine.py and test_tensor.py do of slices."""
RESUMING = ("llama, stage 1", "compressed")


class PiecePositions(Positions):
    split: Split | None = None

    def compute_pieces(self, split: Split) -> None:
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.split is None else x + self.weight[self.split.positions(x.device)]


class PieceBlock(Block):
    split: Split | None = None

    def compute_pieces(self, split: Split) -> None:
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        if self.split is None:
            return super().forward(x)
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, self.qkv.in_features // 2).permute(3, 0, 2, 1, 4)
        x = x + self.attention_out(self.split.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def token_loss(logits: object, targets: object) -> Tensor:
    assert isinstance(logits, Tensor)
    assert isinstance(targets, Tensor)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def layers(block: type[nn.Module] = PieceBlock) -> zero.PipelineModule:
    return zero.PipelineModule(
        [
            zero.LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
            zero.LayerSpec(PiecePositions if block is PieceBlock else nn.Identity),
            *(zero.LayerSpec(block) for _ in range(2)),
            zero.LayerSpec(nn.Linear, WIDTH, VOCABULARY),
        ],
        loss_fn=token_loss,
        partition_method="uniform",
    )


def model_of(kind: str) -> Any:
    if kind in PLANS:
        return layers()
    if kind == "packed":  # layers are computed again after the next micro-batch, which has other documents
        model = decoder()
        model.gradient_checkpointing_enable()
        return model
    if kind != "gpt2":
        return decoder(in_windows=kind == "windows")
    import transformers

    torch.manual_seed(7)
    off = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_embd=24, n_head=4, n_layer=2, n_positions=64, **off)
    ).train()


def dataset(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    if kind in PLANS:
        ids = torch.randint(VOCABULARY, (STEPS * ROWS, CONTEXT + (kind != "layers")), generator=generator)
        return TensorDataset(ids[:, :-1], ids[:, 1:])
    ids = torch.randint(1, 97, (STEPS * ROWS, 21), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100  # so that pieces count differently
    if kind != "packed":
        return TensorDataset(ids, labels)
    begins = torch.randint(2, 19, (len(ids), 1), generator=generator)  # of each row's second document
    places = torch.arange(ids.shape[1]).expand_as(ids)
    return TensorDataset(ids, labels, places - begins * (places >= begins))


def batch_of(columns: Sequence[Tensor]) -> Any:
    """Inputs and target; of packed documents by name."""
    return columns if len(columns) == 2 else dict(zip(("input_ids", "labels", "position_ids"), columns, strict=True))


def start(case: Case, stages: int = 2, sequence: int = 2, **given: Any) -> Any:
    kind, stage, optimizer, pipeline, ours = case
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "sequence_parallel_size": sequence,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        "pipeline": pipeline | {"stages": stages},
        "onebit": ours,
        "sparse_attention": SPARSE if kind == "sparse" else None,
    }
    if kind in PLANS and "tensor" in ours:
        given = {"tensor_plan": PLANS[kind]} | given
    given = {"model": model_of(kind), "training_data": dataset(kind)} | given
    given |= {"collate_fn": lambda rows: batch_of(default_collate(rows))}
    return zero.initialize(config=config, **given)[0]


def train(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def trained(case: Case) -> tuple[Any, dict[str, Any]]:
    """An engine, and the facts of its training. ZBV has no evaluation."""
    engine = start(case)
    facts: dict[str, Any] = {"data": engine.grid.data}
    if case[3].get("schedule") != "zbv":
        facts["eval"] = float(engine.eval_batch(iter([batch_of(engine.loader.dataset[0:ROWS])] * 2)))
    return engine, facts | {"loss": train(engine, STEPS), "weights": engine.module_state_dict()}


def two_stages(folder: str) -> None:
    """Write what this rank finds to a file."""
    grids.start = functools.cache(grids.start)  # engines of one layout share its groups
    world = init("gloo", levels=1)
    facts: dict[str, Any] = {}
    for name, its in CASES.items():
        facts[name] = trained(its)[1]
        if name in RESUMING:
            first, second = start(its), start(its)
            train(first, RESUMED)
            first.save_checkpoint(f"{folder}/{name}")
            second.load_checkpoint(f"{folder}/{name}")
            again = train(second, STEPS - RESUMED) == facts[name]["loss"][RESUMED:]
            pairs = zip(second.module_state_dict().values(), facts[name]["weights"].values(), strict=True)
            facts[name]["resumed"] = again and all(torch.equal(a, b) for a, b in pairs)
    for name, (case, stages, sequence) in ELSEWHERE.items():
        given = {"model": decoder()} if name == "kept" else {}
        engine = start(CASES[case], stages=stages, sequence=sequence, **given)
        facts[name] = {"loss": train(engine, STEPS), "weights": engine.module_state_dict()}
    torch.save(facts | {"refused": refused()}, f"{folder}/{world.rank}.pt")


def two_sliced_stages(folder: str, names: Sequence[str]) -> None:
    """Write what this rank finds of these cases to a file."""
    grids.start = functools.cache(grids.start)  # engines of one layout share its groups
    world = init("gloo", levels=1)
    facts = {name: trained(SLICED[name])[1] for name in names}
    if names == list(USUAL):
        facts |= sliced_elsewhere(folder)
    torch.save(facts, f"{folder}/{world.rank}.pt")


def sliced_elsewhere(folder: str) -> dict[str, Any]:
    """A run that continues with sequences over four ranks and whole layers, and what is refused."""
    first, second = start(SLICED["llama, stage 3"]), start(CASES["llama, stage 1"], sequence=4)
    losses = train(first, RESUMED)
    first.save_checkpoint(f"{folder}/saved")
    second.load_checkpoint(f"{folder}/saved")
    losses += train(second, STEPS - RESUMED)
    ids, engine = torch.ones(2, 6, dtype=torch.int64), start(SLICED["pieces divided"])
    odd = error_of(ValueError, lambda: engine.train_batch(iter([(ids, ids)] * 2)))
    whole = {"loss": losses, "weights": second.module_state_dict()}
    return {"llama, then whole layers": whole, "odd pieces": odd}


def refused() -> dict[str, str]:
    words: dict[str, str] = {}

    def note(name: str, act: Any) -> None:
        words[name] = error_of(ValueError, act)

    note("no layer", lambda: start(CASES["layers"], model=layers(Block)))
    engine = start(CASES["layers"])
    rank, ids = engine.grid.world.rank, torch.ones(2, 6, dtype=torch.int64)
    note("batches", lambda: engine.train_batch(iter([(ids + rank % 2, ids)] * 2)))
    note("lengths", lambda: engine.train_batch(iter([(ids, ids[:, 1:])] * 2)))
    note("short", lambda: engine.train_batch(iter([(ids[:, :1], ids[:, :1])] * 2)))
    note("hidden", lambda: engine.train_batch(iter([(ids, ids - 101)] * 2)))
    note("hidden among inputs", lambda: engine.train_batch(iter([((ids, ids - 101), ids)] * 2)))
    note("outputs", lambda: engine.eval_batch(iter([(ids, ids)] * 2), compute_loss=False))
    return words


def alone(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same batches by torch, in one process: losses and weights."""
    built = layers().stages([range(5)])[0] if kind in PLANS else model_of(kind)
    if kind == "sparse":
        replace_attention(built, SPARSE)
    data = zero.data.ShardedLoader(dataset(kind), ROWS, rank=0, world_size=1)
    optimizer, losses = torch.optim.AdamW(built.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0), []
    for ids, targets, *places in data:
        named = dict(zip(("position_ids",), places, strict=False))
        loss = token_loss(built(ids), targets) if kind in PLANS else built(input_ids=ids, labels=targets, **named).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, built.state_dict()
