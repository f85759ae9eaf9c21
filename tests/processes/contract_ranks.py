"""What the ranks of test_contracts.py do with every registered form and feature: each class's own example."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from onebit import zero
from onebit.comm import Codec, init
from onebit.comm.messages import gather_bytes
from onebit.zero.features import FEATURES
from onebit.zero.forms import FORMS
from onebit.zero.forms.dense import Dense
from onebit.zero.sequence import SequenceRanks, ring_attention

FIRST, MORE = 6, 3
CONTEXT, VOCABULARY = 16, 20


class Net(nn.Module):
    """Attention over four heads that a configuration may replace, layers that it may quantize, sequences to be cut.

    A layer that is to be dropped is made smaller instead, so that runs can be compared.
    """

    heads, is_causal, sequence = 4, False, None

    def __init__(self) -> None:
        super().__init__()
        self.core_attention = nn.functional.scaled_dot_product_attention
        self.embed, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def split_sequences(self, ranks: SequenceRanks, codec: Codec | None) -> None:
        self.sequence, pieces = ranks, ranks.pieces(CONTEXT)
        self.core_attention = lambda q, k, v: ring_attention(q, k, v, ranks, pieces, is_causal=False, codec=codec)

    def piece(self, x: Tensor) -> Tensor:
        if self.sequence is None:
            return x
        return self.sequence.pieces(x.shape[1]).cut(x, self.sequence.rank)

    def forward(self, tokens: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        x_BHSd = self.embed(self.piece(tokens)).unflatten(2, (4, 4)).transpose(1, 2)
        y_BSD = self.core_attention(x_BHSd, x_BHSd, x_BHSd).transpose(1, 2).flatten(2)
        return self.out(y_BSD * pld_theta if progressive_layer_drop else y_BSD)


def dataset() -> TensorDataset:
    first = torch.randint(VOCABULARY, (256, 1), generator=torch.Generator().manual_seed(2))
    counting = (first + torch.arange(CONTEXT + 1)) % VOCABULARY
    return TensorDataset(counting[:, :-1], counting[:, 1:])


def config_of(example: Mapping[str, object], folder: str, ranks_per_node: int, **more: object) -> dict:
    """The class's own blocks, on nodes of so many ranks. Files are the test's."""
    config: dict[str, Any] = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "steps_per_print": None,
        **copy.deepcopy(dict(example)),
        **more,
    }
    config["onebit"] = {"ranks_per_node": ranks_per_node, **config.get("onebit", {})}
    param = config.get("zero_optimization", {}).get("offload_param", {})
    if "nvme_path" in param:
        param["nvme_path"] = folder
    if str(config["optimizer"]["type"]).startswith("OneBit") and config["onebit"].get("sharding") != "inter_node":
        config["onebit"] |= {"compression": "always"}  # not what the network says
    return config


def start(config: dict) -> zero.DeepSpeedEngine:
    torch.manual_seed(5)
    model: nn.Module = Net()
    if "compression_training" in config:
        model = zero.init_compression(model, config)
    return zero.initialize(model=model, config=copy.deepcopy(config), training_data=dataset())[0]


def train(engine: zero.Engine, steps: int, factors: Mapping[int, float] | None = None) -> list[float]:
    """This rank's losses. factors: of the losses that are backpropagated in some of these steps."""
    losses, batches = [], zero.data.forever(engine.loader)
    for step in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = next(batches)
            logits, targets = engine(tokens).float(), engine.module.piece(targets)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            engine.backward(loss * (factors or {}).get(step, 1.0))
            engine.step()
            losses.append(float(loss))
    return losses


def bits(engine: zero.DeepSpeedEngine) -> bytes:
    """All that the module holds, whole."""
    whole = [x.contiguous().view(-1) for x in engine.module_state_dict().values()]
    return b"".join(x.view(torch.uint8).numpy().tobytes() for x in whole)


def same_everywhere(engine: zero.DeepSpeedEngine) -> bool:
    return len(set(gather_bytes(engine.grid.world, bits(engine)))) == 1


def on_four(folder: str) -> dict[str, dict]:
    """Two nodes of two: train, resume at the start and later, meet a bad batch, go on where one node has all four."""
    world = init("gloo", levels=1)
    facts: dict[str, dict] = {}
    for form in FORMS:
        place = f"{folder}/{form.__name__}"
        config = config_of(form.example, f"{place} files", 2, gradient_clipping=1.0)
        whole, first, second = start(config), start(config), start(config)
        losses = train(whole, FIRST + MORE)
        first.load_checkpoint(place)  # there is none
        first.save_checkpoint(place)
        first.load_checkpoint(place)  # of step 0
        train(first, FIRST)
        first.save_checkpoint(place)
        second.load_checkpoint(place)
        again = train(second, MORE)
        norm = second.get_global_grad_norm()
        mine: dict[str, Any] = {
            "class": type(whole.form).__name__,
            "losses": losses,
            "resumed": again == losses[2 * FIRST :] and bits(whole) == bits(second),
            "same everywhere": same_everywhere(whole),
            "norm": norm is not None and 0 < norm < 100,
        }
        is_bad, before = world.rank == 1, bits(first)
        train(first, 1, {0: math.inf if is_bad else 1.0})
        mine["skipped"] = first.skipped_steps
        mine["left a trace"] = bits(first) != before
        mine["after a bad batch"] = train(first, MORE, {1: 1e4 if is_bad else 1.0})
        mine["same after it"] = same_everywhere(first)
        try:
            wider = start(config_of(form.example, f"{place} wider", 4, gradient_clipping=1.0))
            wider.load_checkpoint(place)
            mine["wider"] = [wider.global_steps, *train(wider, MORE)]
        except zero.CheckpointError as error:
            mine["wider"] = str(error)
        facts[form.__name__] = mine
    return facts


def on_two(folder: str) -> dict[str, dict]:
    """One node of two goes on where two were; with the optimizer's state otherwise than with the weights alone."""
    init("gloo", levels=1)
    facts: dict[str, dict] = {}
    for form in FORMS:
        config = config_of(form.example, f"{folder}/{form.__name__} two", 2, gradient_clipping=1.0)
        engine, weights_alone = start(config), start(config)
        engine.load_checkpoint(f"{folder}/{form.__name__}")
        weights_alone.load_checkpoint(f"{folder}/{form.__name__}", load_optimizer_states=False)
        mine: dict[str, Any] = {"steps": engine.global_steps, "same weights": bits(engine) == bits(weights_alone)}
        mine["losses"] = train(engine, MORE)
        train(weights_alone, MORE)
        facts[form.__name__] = mine | {"state counts": bits(engine) != bits(weights_alone)}
    return facts


def with_features(folder: str) -> dict[str, dict]:
    """Each feature around a dense optimizer: it acts, and a resumed run is the one without a break."""
    init("gloo", levels=1)
    facts: dict[str, dict] = {}
    plain = start(config_of(Dense.example, folder, 2))
    without = train(plain, FIRST + MORE)
    facts["none"] = {"features": [type(feature).__name__ for feature in plain.active_features]}
    for feature in FEATURES:
        config = config_of(Dense.example, folder, 2, **feature.example)
        whole, first, second = start(config), start(config), start(config)
        losses = train(whole, FIRST + MORE)
        train(first, FIRST)
        place = f"{folder}/{feature.__name__}"
        first.save_checkpoint(place)
        second.load_checkpoint(place)
        again = train(second, MORE)
        facts[feature.__name__] = {
            "features": [type(each).__name__ for each in whole.active_features],
            "acts": losses != without,
            "resumed": again == losses[2 * FIRST :] and bits(whole) == bits(second),
        }
    return facts
