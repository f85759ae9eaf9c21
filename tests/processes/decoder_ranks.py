"""What each rank of `test_decoders.py` does: it trains decoders of transformers on a grid, saves and resumes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from decoders import ROWS, STEPS, batches, config_of, decoder
from torch import Tensor
from transformers import LlamaForCausalLM  # noqa: F401  (600 modules, 1 to 2 s: in the process that forks, too)

from onebit import zero
from onebit.model_parallel import gathered, local
from onebit.zero.grid import Grid
from onebit.zero.parallel import tensor
from onebit.zero.parallel.model_plan import training_plan

from study.model_cases import MODELS, SERVED  # isort: skip  (decoders.py puts scripts/ on the path)

MICRO_BATCHES = 2


def run(folder: str, blocks: dict[str, dict[str, object]], cases: Sequence[tuple[str, str, int]]) -> None:
    """Cases (decoder, optimizer, ZeRO stage); the configuration's blocks are the layout. Results go to the folder."""
    logging.disable(logging.WARNING)
    here: Grid | None = None
    for name, optimizer, stage in cases:
        place = Path(folder) / f"{name}.{optimizer}.{stage}"
        engine = _start(here, blocks, name, optimizer, stage)
        here = engine.grid
        again = _start(here, blocks, name, optimizer, stage)
        torch.save(_case(engine, again, place), f"{place}.{here.world.rank}")
    if here is not None:
        here.close()


def _case(engine: zero.DeepSpeedEngine, again: zero.DeepSpeedEngine, place: Path) -> dict[str, object]:
    """Losses and weights of a run, and of one resumed before its last step; the run writes a file."""
    losses, read = [], batches(STEPS * MICRO_BATCHES)
    for step in range(STEPS):
        if step == STEPS - 1:
            engine.save_checkpoint(place / "checkpoints")
        losses.append(_step(engine, read))
    engine.save_16bit_model(place)
    engines = [engine]
    if "gemma" not in place.name:  # whose scale `materialize` does not compute
        with torch.device("meta"):
            empty = decoder(place.name.split(".")[0])
        config = engine.config.to_dict()
        engines.append(zero.initialize(model=empty, config=config, grid=engine.grid, weights=place)[0])
    again.load_checkpoint(place / "checkpoints")
    resumed = _step(again, iter(list(batches(STEPS * MICRO_BATCHES))[-MICRO_BATCHES:]))
    return {
        "losses": losses,
        "weights": engine.module_state_dict(),
        "evaluated": [_evaluated(each) for each in engines],
        "resumed": (resumed, again.module_state_dict()),
    }


def _evaluated(engine: zero.DeepSpeedEngine) -> float:
    """The mean loss of some batches."""
    if engine.is_pipe_parallel:
        return float(engine.eval_batch(batches(MICRO_BATCHES)))
    with torch.no_grad():
        return sum(float(engine(**batch).loss) / MICRO_BATCHES for batch in batches(MICRO_BATCHES))


def elsewhere(places: Sequence[str]) -> None:
    """The last step of each case, resumed in one process."""
    logging.disable(logging.WARNING)
    here: Grid | None = None
    for place in places:
        name, optimizer, _ = Path(place).name.split(".")
        engine = _start(here, {}, name, optimizer, 0)
        here = engine.grid
        engine.load_checkpoint(Path(place) / "checkpoints")
        loss = _step(engine, iter(list(batches(STEPS * MICRO_BATCHES))[-MICRO_BATCHES:]))
        torch.save({"loss": loss, "weights": engine.module_state_dict()}, f"{place}.elsewhere")
    if here is not None:
        here.close()


def _start(here: Grid | None, blocks: dict, name: str, optimizer: str, stage: int) -> zero.DeepSpeedEngine:
    config = config_of(optimizer, gradient_accumulation_steps=MICRO_BATCHES, zero_optimization={"stage": stage})
    ranks = int(os.environ["WORLD_SIZE"])
    together = blocks.get("onebit", {}).get("tensor", 1) * blocks.get("pipeline", {}).get("stages", 1)
    config["train_micro_batch_size_per_gpu"] = ROWS * together // ranks
    return zero.initialize(model=decoder(name), config=config | blocks, grid=here)[0]


def _step(engine: zero.DeepSpeedEngine, read: Iterator[dict[str, Tensor]]) -> float:
    """One step; its mean loss over this rank's micro-batches."""
    place, count = engine.grid.data
    rows = slice(place * ROWS // count, (place + 1) * ROWS // count)
    mine = ({key: x[rows] for key, x in batch.items()} for batch in read)
    if engine.is_pipe_parallel:
        return float(engine.train_batch(mine))
    total = 0.0
    for _ in range(MICRO_BATCHES):
        loss = engine(**next(mine)).loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / MICRO_BATCHES
    return total


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
            zero.initialize(model=model, config=config_of("AdamW", tensor_parallel={"autotp_size": 2}))
        except ValueError as error:
            said[case] = str(error)
        assert not torch.distributed.is_initialized()
    torch.save(said, Path(folder) / "refusals")
