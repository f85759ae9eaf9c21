"""What each rank of `test_decoders.py` does: cases as the study has them, of other models and grids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from study import models
from study.model_cases import CONTEXT, MODELS, ROWS, SERVED, Batch, Model
from torch import nn
from transformers import LlamaForCausalLM  # noqa: F401  (600 modules, 1 to 2 s: in the process that forks, too)

from onebit import zero
from onebit.model_parallel import gathered, local
from onebit.zero.parallel import tensor
from onebit.zero.parallel.model_plan import training_plan

# torch's grouped product wants rows of whole 16 bytes: 20 floats are, and the 10 of one of two ranks are not.
_NARROW = {"moe_intermediate_size": 20}
# The study's model, and what is changed. A vocabulary of 97 is divided by no number of ranks, 96 by two.
_CHANGED: Mapping[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {"mlp_bias": True}),
    "llama_tied": ("Llama", {"attention_bias": False, "vocab_size": 96, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {}),
    "gemma": ("Gemma", {"vocab_size": 96}),
    "phi3": ("Phi-3", {}),
    "olmo2": ("OLMo-2", {}),
    "gpt_neox": ("GPT-NeoX", {"vocab_size": 96}),
    "mixtral": ("Mixtral", {}),
    "olmoe": ("OLMoE", {}),
    "qwen2_moe": ("Qwen2-MoE", _NARROW),
    "deepseek_v2": ("DeepSeek-V2", _NARROW),
    "gpt2": ("GPT-2", {}),
}


def batch() -> Batch:
    """As a collator for language models makes it: the labels are the inputs, of 64 of 96 words."""
    ids = torch.randperm(96, generator=torch.Generator().manual_seed(1))[: ROWS * CONTEXT].view(ROWS, CONTEXT)
    return {"input_ids": ids, "labels": ids}


def _model(name: str) -> Model:
    """In three layers, which two stages divide badly."""
    of_study, own = _CHANGED[name]
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 3}
    return replace(MODELS[of_study], options=dict(MODELS[of_study].options) | layers | own, batch=batch)


DECODERS = {name: _model(name) for name in _CHANGED}


def decoder(name: str, **changes: object) -> nn.Module:
    model = DECODERS[name]
    return replace(model, options=dict(model.options) | changes).build()


def _layout(stage: int, tensor: int = 1, stages: int = 1, shard: int = 1, replica: int = 1) -> models.Layout:
    sizes = {"pipe": stages, "replica": replica, "shard": shard, "tensor": tensor}
    onebit = ({"tensor": tensor} if tensor > 1 else {}) | ({"ranks_per_node": shard * tensor} if shard > 1 else {})
    blocks = {"zero_optimization": {"stage": stage}, "onebit": onebit}
    blocks |= {"pipeline": {"stages": stages}} if stages > 1 else {}
    return models.Layout(blocks, {axis: size for axis, size in sizes.items() if size > 1})


LAYOUTS = {
    "slices": _layout(0, tensor=2),
    "stages": _layout(0, stages=2),
    "stages, ZeRO 1": _layout(1, stages=2),
    "slices of stages": _layout(1, stages=2, tensor=2),
    **{f"slices of shards, ZeRO {stage}": _layout(stage, tensor=2, shard=2) for stage in (1, 2, 3)},
    "replicas": _layout(0, stages=2, tensor=2, replica=2),
    "one rank": _layout(0),
}


@dataclass(frozen=True)
class Case(models.Case):
    """Of these models and layouts; all steps are of the warm-up."""

    warmup = 2
    after = 0

    @property
    def its(self) -> Model:
        return DECODERS[self.model]

    @property
    def on(self) -> models.Layout:
        return LAYOUTS[self.layout]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layout}-{self.optimizer}"


def run(folder: str, cases: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Of each case what this rank finds, and "evaluated": losses of its model, and of one that its file has filled."""
    logging.disable(logging.WARNING)
    known, results = models.Grids(), []
    for case in (Case(*words) for words in cases):
        place, found = Path(folder) / case.name, models.Found()
        engines = [models.run(case, known, place, found)]
        if case.model != "gemma":  # whose scale `materialize` does not compute
            with torch.device("meta"):
                empty = case.its.build()
            grid = engines[0].grid
            engines.append(zero.initialize(model=empty, config=case.config, grid=grid, weights=place)[0])
        results.append(asdict(found) | {"evaluated": [_evaluated(each) for each in engines]})
    for grid in known.values():
        grid.close()
    return results


def _evaluated(engine: zero.DeepSpeedEngine) -> float:
    if engine.is_pipe_parallel:
        return float(engine.eval_batch(iter([batch()] * models.MICRO_BATCHES)))
    with torch.no_grad():
        return float(engine(**batch()).loss)


def elsewhere(folder: str, cases: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The last step of each case, resumed in one process: its loss, and how far weights are from those of torch's."""
    logging.disable(logging.WARNING)
    known, results = models.Grids(), []
    for case in (Case(*words) for words in cases):
        here = replace(case, layout="one rank")
        engine = zero.initialize(model=here.its.build(), config=here.config, grid=known.of(here.on))[0]
        engine.load_checkpoint(Path(folder) / case.name / "checkpoints")
        loss, (losses, weights) = models.step(here, engine), models.alone(here.its, here.rows, here.warmup)
        off = models.deviations(engine.module_state_dict(), weights)
        results.append({"loss": loss, "expected": losses[-1], "deviations": off})
    for grid in known.values():
        grid.close()
    return results


def gradients(folder: str, names: Sequence[str]) -> None:
    """The furthest that a gradient is from that of one process, in float64, for each of the study's models.

    A rank's part of a parameter must not be a view of the whole, or the whole would stay in memory.
    """
    here = zero.grid.start(tensor=2, shard=1)
    torch.set_default_dtype(torch.float64)  # XGLM masks with a new tensor of the default
    furthest = {}
    for name in names:
        its = (MODELS | SERVED)[name]
        alone, divided = (its.build().double().train(name in MODELS) for _ in range(2))  # others drop at random
        tensor.parallelize(divided, here, training_plan(divided, 2))
        batch = {key: x.double() if x.is_floating_point() else x for key, x in its.batch().items()}
        for model in (alone, divided):
            model(**batch).loss.backward()
        for name_of, p in divided.named_parameters():
            assert local(p).untyped_storage().nbytes() == local(p).nbytes, f"{name}: {name_of} keeps more than its part"
        pairs = zip(alone.parameters(), divided.parameters(), strict=True)
        furthest[name] = max(float((gathered(q.grad) - p.grad).abs().max()) for p, q in pairs if p.grad is not None)
    torch.save(furthest, Path(folder) / f"gradients.{here.world.rank}")
    here.close()


def refusals(folder: str) -> None:
    """Errors of models that ranks cannot divide, before any group of ranks is made."""
    said = {}
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "tensor_parallel": {"autotp_size": 2},
    }
    for case, (name, changes) in {
        "heads": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}),
        "keys": ("llama", {"num_key_value_heads": 3, "num_attention_heads": 6}),
        "width": ("llama", {"intermediate_size": 41}),
        "stacked heads": ("gpt2", {"n_head": 3}),
        "Conv1D": ("gpt2", {"n_inner": 41}),
        "experts": ("mixtral", {"intermediate_size": 41}),
        "plan": ("opt", {}),
    }.items():
        model = torch.nn.Linear(2, 2) if name == "opt" else decoder(name, **changes)
        try:
            zero.initialize(model=model, config=config)
        except ValueError as error:
            said[case] = str(error)
        assert not torch.distributed.is_initialized()
    torch.save(said, Path(folder) / "refusals")
