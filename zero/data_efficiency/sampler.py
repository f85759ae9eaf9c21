"""The curriculum sampler: which samples are in global batch t, the same on every rank, without communication.

    pacing = Root(first=64, last=512, total_steps=10_000, multiple=8)
    rarity = CurriculumMetric(pacing, read_metric("metrics/rarity.npy", dataset), difficulty_type="percentile")
    sampler = CurriculumSampler(len(dataset), batch_size=256, metrics={"rarity": rarity}, seed=1)
    drawn = sampler.draw()

A sample is eligible if all its metrics are at most the current difficulties. When a difficulty rises, the newly
eligible samples form a new cluster. A batch is drawn from the clusters by a multinomial over their sizes; each cluster
is read to its end in a shuffled order, then reshuffled. Every draw is a function of (seed, batch) or (seed, cluster,
pass), so the state to save is a few counts, the same for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from .metrics import Array
from .pacing import Pacing

State = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A global batch, as sample numbers.

    Attributes:
        parts: The micro-batches of all ranks, in the order in which ranks take them: arrays of sample numbers.
        difficulties: The difficulty of each metric for this batch; empty for batches by tokens.
        lr_scale: The factor for the learning rate in this step (dynamic batching); 1 by default.
    """

    parts: Sequence[Array]
    difficulties: Mapping[str, int] = field(default_factory=dict)
    lr_scale: float = 1.0

    @property
    def samples(self) -> int:
        return sum(map(len, self.parts))


class Sampler(Protocol):
    """What a `CurriculumLoader` reads from: a `CurriculumSampler` or a `TokenSampler`.

    `batches_per_pass` is the number of global batches that together have about as many samples as the dataset.
    """

    @property
    def batches_done(self) -> int: ...
    @property
    def batches_per_pass(self) -> int: ...
    def draw(self, parts: int = 1) -> Drawn: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, eq=False)
class CurriculumMetric:
    """How one metric decides which samples are eligible at a step.

    Args:
        pacing: The difficulty as a function of the global batch, counted from 1, as `Root` or `Discrete`.
        values: The metric of every sample, from `read_metric`. None (default) only for "single_cluster".
        difficulty_type: "value" (default) selects samples of at most this value; "percentile" selects the easiest so
            many per cent of the samples, ties in the order of the sample numbers.
        clustering_type: "schedule_based" (default) selects samples; "single_cluster" selects none: the difficulty is
            only passed on with the batch, for example for truncation.

    Raises:
        ValueError: An unknown type, a schedule_based metric without values, or values that are not finite.
    """

    pacing: Pacing
    values: Array | None = None
    difficulty_type: str = "value"
    clustering_type: str = "schedule_based"

    def __post_init__(self) -> None:
        if self.difficulty_type not in ("value", "percentile"):
            raise ValueError(f'difficulty_type must be "value" or "percentile", got {self.difficulty_type!r}')
        if self.clustering_type not in ("schedule_based", "single_cluster"):
            raise ValueError(
                f'clustering_type must be "schedule_based" or "single_cluster", got {self.clustering_type!r}'
            )
        if self.clustering_type == "schedule_based" and self.values is None:
            raise ValueError(
                "a schedule_based metric selects samples by their values: measure the dataset and pass them"
            )
        if self.values is not None and (bad := np.flatnonzero(~np.isfinite(self.values))).size:
            raise ValueError(
                f"the metric of {bad.size} samples is no finite number, first that of sample {bad[0]}, which would "
                "never be drawn: write a number for each"
            )

    @property
    def selects(self) -> bool:
        return self.clustering_type == "schedule_based"


class CurriculumSampler:
    """Draws global batches whose samples become more difficult, the same on every rank without communication.

    Source: arXiv 2212.03597, section 3.1.

    Args:
        samples: How many samples the dataset has.
        batch_size: Samples in a global batch, over all ranks.
        metrics: The metrics by name. A sample is eligible if all of them select it.
        seed: Seed of every draw, 1234 by default. Must be the same on all ranks.

    Raises:
        ValueError: The first difficulties select no sample, or a metric has another number of samples.
    """

    def __init__(self, samples: int, batch_size: int, metrics: Mapping[str, CurriculumMetric], *, seed: int = 1234):
        if samples < 1 or batch_size < 1:
            raise ValueError(f"expected samples and batch_size of at least 1, got {samples} and {batch_size}")
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self._metrics = dict(metrics)
        self._ranks: dict[str, Array] = {}
        for name, metric in self._metrics.items():
            if metric.values is not None and len(metric.values) != samples:
                raise ValueError(
                    f"metric {name!r} has {len(metric.values)} values for a dataset of {samples} samples: it is of "
                    "another dataset; measure this one"
                )
        self._batch = 0
        self._clusters: list[_Cluster] = []
        self._history: list[dict[str, int]] = []
        self._difficulties: dict[str, int] | None = None
        self._is_taken = np.zeros(samples, bool)
        if all(getattr(metric.pacing, "function", True) for metric in self._metrics.values()):
            self._check(self.difficulties(1))

    def _check(self, first: Mapping[str, int]) -> None:
        if not self._selected(first).any():
            raise ValueError(
                f"the first difficulties select no sample: {self._said(first)}; begin with a higher min_difficulty"
            )

    @property
    def batches_done(self) -> int:
        return self._batch

    @property
    def batches_per_pass(self) -> int:
        """How many whole global batches the samples of the dataset fill; a remainder does not count."""
        return self.samples // self.batch_size

    @property
    def pacings(self) -> list[Pacing]:
        return [metric.pacing for metric in self._metrics.values()]

    @property
    def cluster_sizes(self) -> list[int]:
        return [len(cluster.members) for cluster in self._clusters]

    def difficulties(self, batch: int) -> dict[str, int]:
        """The difficulty of each metric in global batch `batch`, counted from 1."""
        return {name: int(metric.pacing(batch)) for name, metric in self._metrics.items()}

    def draw(self, parts: int = 1) -> Drawn:
        """The next global batch, split into `parts` micro-batches of one size.

        Raises:
            ValueError: `parts` does not divide the batch size.
        """
        if self.batch_size % parts:
            raise ValueError(f"a batch of {self.batch_size} samples cannot be split into {parts} parts of one size")
        difficulties = self.difficulties(self._batch + 1)
        self._batch += 1
        if difficulties != self._difficulties:
            self._grow(difficulties)
        if not self._clusters:  # the function of a custom schedule was set after the constructor could check it
            self._check(difficulties)
        generator = np.random.default_rng([self.seed, 0, self._batch])
        sizes = np.array(self.cluster_sizes, float)
        counts = generator.multinomial(self.batch_size, sizes / sizes.sum())
        taken = [c.take(int(n)) for c, n in zip(self._clusters, counts, strict=True)]
        chosen = np.concatenate(taken)
        generator.shuffle(chosen)
        return Drawn(np.split(chosen, parts), difficulties)

    def _grow(self, difficulties: dict[str, int]) -> None:
        """Form a new cluster from the samples that have become eligible, if there are any."""
        self._difficulties = difficulties
        fresh = self._selected(difficulties) & ~self._is_taken
        if fresh.any():
            members = np.flatnonzero(fresh)
            self._is_taken[members] = True
            self._clusters.append(_Cluster(members, [self.seed, 1, len(self._clusters)]))
            self._history.append(difficulties)

    def _selected(self, difficulties: Mapping[str, int]) -> Array:
        """Whether each sample is eligible: bool [samples]."""
        selected = np.ones(self.samples, bool)
        for name, metric in self._metrics.items():
            if not metric.selects:
                continue
            if metric.difficulty_type == "value":
                selected &= np.asarray(metric.values) <= difficulties[name]
            else:
                selected &= self._rank(name) < self.samples * difficulties[name] // 100
        return selected

    def _rank(self, name: str) -> Array:
        """Each sample's place in the order of its metric."""
        if name not in self._ranks:
            order = np.argsort(np.asarray(self._metrics[name].values), kind="stable")
            self._ranks[name] = np.empty(self.samples, np.int64)
            self._ranks[name][order] = np.arange(self.samples)
        return self._ranks[name]

    def _said(self, difficulties: Mapping[str, int]) -> str:
        lines = []
        for name, metric in self._metrics.items():
            if metric.selects:
                values = np.asarray(metric.values)
                limit = f"{difficulties[name]} %" if metric.difficulty_type == "percentile" else f"{difficulties[name]}"
                kind = "the easiest" if metric.difficulty_type == "percentile" else "at most"
                lines.append(f"{name}: {kind} {limit}, values from {values.min():g} to {values.max():g}")
        return "; ".join(lines)

    def state_dict(self) -> State:
        """The position in the data: plain numbers, the same on every rank."""
        return {
            "kind": "curriculum",
            "seed": self.seed,
            "samples": self.samples,
            "batch": self._batch,
            "clusters": [
                {"difficulties": d, "read": c.read} for d, c in zip(self._history, self._clusters, strict=True)
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the position that `state_dict` gave.

        Raises:
            ValueError: The state is from another dataset, or from a sampler with other metrics.
        """
        if state_dict.get("kind") != "curriculum" or state_dict["samples"] != self.samples:
            raise ValueError(
                f"this state comes from a {state_dict.get('kind')} sampler over {state_dict.get('samples')} samples, "
                f"not from a curriculum over {self.samples}; resume with the configuration and dataset that it was "
                "saved with"
            )
        if any(cluster["difficulties"].keys() != self._metrics.keys() for cluster in state_dict["clusters"]):
            there = ", ".join(state_dict["clusters"][0]["difficulties"])
            raise ValueError(
                f"this state comes from a curriculum by {there}, not by {', '.join(self._metrics)}; resume with the "
                "metrics that it was saved with"
            )
        self.seed, self._batch = state_dict["seed"], state_dict["batch"]
        self._clusters, self._history, self._is_taken = [], [], np.zeros(self.samples, bool)
        for saved in state_dict["clusters"]:
            before = len(self._clusters)
            self._grow(dict(saved["difficulties"]))
            if len(self._clusters) == before:
                raise ValueError(
                    f"a cluster of this state is empty with these metrics ({saved['difficulties']}): the metrics have "
                    "changed since it was saved; resume with the old ones"
                )
            self._clusters[-1].read = saved["read"]
        self._difficulties = self.difficulties(self._batch) if self._batch else None


class _Cluster:
    """Samples read in a shuffled order, pass after pass. `read` counts those read so far, over all passes."""

    def __init__(self, members: Array, key: Sequence[int]):
        self.members, self._key, self.read = members, list(key), 0
        self._pass, self._order = -1, members

    def take(self, count: int) -> Array:
        """The next `count` samples."""
        taken = []
        while count:
            number, first = divmod(self.read, len(self.members))
            if number != self._pass:
                self._pass = number
                self._order = np.random.default_rng([*self._key, number]).permutation(self.members)
            piece = self._order[first : first + count]
            taken.append(piece)
            self.read += len(piece)
            count -= len(piece)
        return np.concatenate(taken) if taken else self.members[:0]


class TokenSampler:
    """Draws global batches by tokens: micro-batches of about equally many tokens, so short samples come many at a time.

    Micro-batches left over at the end of a pass, too few for a global batch, are skipped.

    Args:
        lengths: The length of every sample in tokens.
        max_tokens: The most tokens in a micro-batch; with `is_padded`, its samples times its longest sample.
        batch_size: The number of samples that the learning rate is meant for.
        parts: Micro-batches in a global batch, over all ranks; 1 by default.
        scaling: How the rate of a batch of n samples is scaled: by n/batch_size ("linear", default), by its square
            root ("sqrt"), or not at all ("none").
        min_samples: Micro-batches with fewer samples are left out; 1 by default.
        max_samples: The most samples in a micro-batch; None (default) for no limit.
        order: "random" (default) shuffles every pass; "order" keeps the dataset's order; "seqlen" shuffles, then sorts
            by length within stretches of about 100 micro-batches, so that little is padded.
        is_padded: Whether a micro-batch is padded to its longest sample, True by default.
        seed: Seed of the orders, 1234 by default. Must be the same on all ranks.

    Raises:
        ValueError: A sample is longer than max_tokens, there are too few micro-batches for one global batch, or `order`
            or `scaling` is unknown.
    """

    def __init__(
        self,
        lengths: Array,
        max_tokens: int,
        batch_size: int,
        *,
        parts: int = 1,
        scaling: str = "linear",
        min_samples: int = 1,
        max_samples: int | None = None,
        order: str = "random",
        is_padded: bool = True,
        seed: int = 1234,
    ):
        if order not in ("random", "order", "seqlen") or scaling not in ("linear", "sqrt", "none"):
            raise ValueError(
                f'expected order "random", "order" or "seqlen" and scaling "linear", "sqrt" or "none", got {order!r} '
                f"and {scaling!r}"
            )
        self._lengths = np.asarray(lengths)
        self.seed, self.parts, self.batch_size = seed, parts, batch_size
        self._max_tokens, self._scaling, self._order, self._is_padded = max_tokens, scaling, order, is_padded
        self._min, self._max = min_samples, max_samples or len(self._lengths)
        if len(self._lengths) and self._lengths.max() > max_tokens:
            worst = int(self._lengths.argmax())
            raise ValueError(
                f"sample {worst} has {self._lengths[worst]} tokens, a micro-batch at most {max_tokens}; raise "
                "max_tokens_per_batch, or shorten the sample"
            )
        self._pass, self._done = 0, 0
        self._micro = self._packed(0)
        if len(self._micro) < parts:
            raise ValueError(
                f"the dataset makes {len(self._micro)} micro-batches of {max_tokens} tokens, and a step needs {parts}; "
                "lower max_tokens_per_batch, or use a larger dataset"
            )
        self._batches, self._batches_of_first = 0, len(self._micro) // parts

    @property
    def batches_done(self) -> int:
        return self._batches

    @property
    def batches_per_pass(self) -> int:
        """Global batches in the first pass; later passes may have one more or fewer."""
        return self._batches_of_first

    def draw(self, parts: int = 1) -> Drawn:
        """The next global batch.

        Raises:
            ValueError: `parts` differs from the constructor's.
        """
        if parts != self.parts:
            raise ValueError(f"this sampler makes batches of {self.parts} micro-batches, asked for {parts}")
        if self._done + parts > len(self._micro):
            self._pass, self._done = self._pass + 1, 0
            self._micro = self._packed(self._pass)
        chosen = self._micro[self._done : self._done + parts]
        self._done += parts
        self._batches += 1
        return Drawn(chosen, {}, self._scale(sum(map(len, chosen))))

    def _scale(self, samples: int) -> float:
        ratio = samples / self.batch_size
        return 1.0 if self._scaling == "none" else ratio if self._scaling == "linear" else math.sqrt(ratio)

    def _packed(self, number: int) -> list[Array]:
        """The micro-batches of a pass. Greedy, in order: a sample that does not fit starts the next one."""
        n = len(self._lengths)
        generator = np.random.default_rng([self.seed, 2, number])
        order = np.arange(n) if self._order == "order" else generator.permutation(n)
        if self._order == "seqlen":
            stretch = max(1, 100 * self._max_tokens // max(1, int(self._lengths.mean())))
            pieces = [order[k : k + stretch] for k in range(0, n, stretch)]
            order = np.concatenate([p[np.argsort(self._lengths[p], kind="stable")] for p in pieces])
        lengths, found, first, longest, tokens = self._lengths[order].tolist(), [], 0, 0, 0
        for k, length in enumerate(lengths):
            longest, tokens = max(longest, length), tokens + length
            filled = longest * (k - first + 1) if self._is_padded else tokens
            if k > first and (filled > self._max_tokens or k - first >= self._max):
                found.append(order[first:k])
                first, longest, tokens = k, length, length
        if first < n:
            found.append(order[first:])
        found = [part for part in found if len(part) >= self._min]
        if self._order == "seqlen":
            found = [found[k] for k in generator.permutation(len(found))]
        return cast(list[Array], found)

    def state_dict(self) -> State:
        """The position in the data: plain numbers, the same on every rank."""
        return {
            "kind": "tokens",
            "seed": self.seed,
            "samples": len(self._lengths),
            "pass": self._pass,
            "done": self._done,
            "batch": self._batches,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the position that `state_dict` gave.

        Raises:
            ValueError: The state is from another dataset or another kind of sampler.
        """
        if state_dict.get("kind") != "tokens" or state_dict["samples"] != len(self._lengths):
            raise ValueError(
                f"this state comes from a {state_dict.get('kind')} sampler over {state_dict.get('samples')} samples, "
                f"not from one of batches by tokens over {len(self._lengths)}; resume with the configuration and "
                "dataset that it was saved with"
            )
        self.seed, self._pass, self._done = state_dict["seed"], state_dict["pass"], state_dict["done"]
        self._batches, self._micro = state_dict["batch"], self._packed(state_dict["pass"])
