"""Curricula without ranks: schedules and clusters against hand tables, metrics, lengths, and a place to resume from."""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_torchrun
from torch import Tensor, nn

from onebit.zero.data_efficiency import (
    CurriculumLoader,
    CurriculumMetric,
    CurriculumSampler,
    Discrete,
    EffectiveLength,
    Length,
    Root,
    TokenLR,
    TokenSampler,
    UserMetric,
    VocabularyRarity,
    count_vocabulary,
    measure,
    measuring,
    read_metric,
    reshape,
    truncate,
)
from onebit.zero.data_efficiency.efficiency import Efficiency
from onebit.zero.data_efficiency.sampler import Sampler


class Texts:
    """Samples of rising length: k tokens of k, padded to `width` where it is given. reads: how many were asked for."""

    def __init__(self, n: int, width: int = 0, shift: int = 0):
        self.n, self.width, self.shift, self.reads = n, width, shift, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        tokens = torch.full((index % 5 + 1,), index % 5 + 1 + self.shift)
        return nn.functional.pad(tokens, (0, max(0, self.width - len(tokens))))


# ---------------------------------------------------------------- pacing


@pytest.mark.parametrize(
    ("pacing", "table"),
    [
        # worked out by hand: floor((t/T)^(1/degree)·(last - first) + first), less its remainder
        (Root(8, 64, 10, 8), {0: 8, 1: 8, 2: 16, 3: 24, 5: 32, 9: 56, 10: 64, 99: 64}),
        (Root(10, 20, 4), {1: 12, 2: 15, 3: 17, 4: 20}),
        (Root(0, 100, 100, 10, 2.0), {1: 10, 4: 20, 25: 50, 50: 70, 81: 90, 99: 90, 100: 100}),
        (Root(7, 20, 10, 8), {1: 8, 4: 8, 8: 16, 10: 20}),  # at 1 floor(8.3) = 8
        (Root(3, 20, 100, 8), {1: 3, 30: 8, 99: 16, 100: 20}),  # never below the first, nor above the last
        (Discrete((1, 2, 3), (5, 10)), {1: 1, 5: 1, 6: 2, 10: 2, 11: 3, 1000: 3}),
        (Discrete((4,), ()), {1: 4, 7: 4}),
    ],
)
def test_pacing_is_the_table(pacing: object, table: dict[int, int]) -> None:
    assert {t: pacing(t) for t in table} == table  # type: ignore[operator]


@settings(max_examples=50)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40), st.integers(1, 9), st.floats(0.5, 4))
def test_pacing_rises_from_first_to_last(first: int, more: int, total: int, multiple: int, degree: float) -> None:
    values = [Root(first, first + more, total, multiple, degree)(t) for t in range(total + 3)]
    assert values == sorted(values) and values[0] == first and values[total] == first + more


def test_pacing_that_makes_no_sense() -> None:
    for wrong in ({"first": 5, "last": 4}, {"first": -1, "last": 4}):
        refused(ValueError, "expected 0 <= first <= last", Root, **wrong, total_steps=3)
    refused(ValueError, "total_steps = 0", Root, 1, 2, 0)
    refused(ValueError, "a table of 3 difficulties needs 2 steps", Discrete, (1, 2, 3), (5,))
    refused(ValueError, "must rise", Discrete, (1, 2, 3), (5, 5))


# ---------------------------------------------------------------- metrics


def test_metrics_by_hand() -> None:
    samples = [torch.tensor(row) for row in ([1, 1, 2], [], [3, 0, 0, 0])]
    assert Length()(samples).tolist() == [3, 0, 4]
    assert EffectiveLength(padding=0)(samples).tolist() == [3, 0, 1]
    counts = np.array([3, 2, 1, 1])  # of 7 tokens; without padding of 4
    expected = [2 * np.log(7 / 2) + np.log(7), 0.0, 3 * np.log(7 / 3) + np.log(7)]
    np.testing.assert_allclose(VocabularyRarity(counts)(samples), expected, rtol=1e-14)
    expected = [2 * np.log(4 / 2) + np.log(4), 0.0, np.log(4)]
    np.testing.assert_allclose(VocabularyRarity(counts, padding=0)(samples), expected, rtol=1e-14)
    assert UserMetric(lambda sample: float(sample.sum()))(samples).tolist() == [4.0, 0.0, 3.0]
    named = [{"input_ids": [1, 2], "labels": [1, 2, 3]}]
    assert Length()(named).tolist() == [2] and Length(field="labels")(named).tolist() == [3]
    assert Length()([(torch.tensor([1, 2]), torch.tensor(1))]).tolist() == [2] and Length()([[4, 5, 6]]).tolist() == [3]


def test_metrics_of_what_has_none() -> None:
    refused(TypeError, "the entries tokens, not 'input_ids'; pass field=", Length(), [{"tokens": [1]}])
    refused(TypeError, "one row of integers, got float32 of shape", Length(), [torch.randn(3)])
    refused(ValueError, "token 2 was never counted", VocabularyRarity(np.array([1, 1, 0])), [torch.tensor([0, 2])])
    refused(ValueError, "must be a finite number", UserMetric(lambda sample: float("nan")), [1])
    with pytest.raises(ValueError, match="token 5 is beyond a vocabulary of 4"):
        count_vocabulary(Texts(5), 4, shows_progress=False)  # type: ignore[arg-type]


def _measured(folder: Path, texts: Texts, workers: int = 0) -> dict[str, np.ndarray]:
    counts = count_vocabulary(texts, 8, workers=workers, shows_progress=False)  # type: ignore[arg-type]
    metrics = {"length": Length(), "rarity": VocabularyRarity(counts)}
    paths = measure(texts, metrics, folder, workers=workers, shows_progress=False)  # type: ignore[arg-type]
    return {name: read_metric(path, texts) for name, path in paths.items()}  # type: ignore[arg-type]


def test_a_pass_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PART", 10)
    monkeypatch.setattr(measuring, "_SECONDS_BETWEEN_STAMPS", -1.0)
    whole = _measured(tmp_path / "whole", Texts(47))
    assert whole["length"].tolist() == [k % 5 + 1 for k in range(47)]

    class Failing(Length):
        calls = 0

        def __call__(self, samples: object) -> np.ndarray:
            Failing.calls += 1
            if Failing.calls == 4:
                raise KeyboardInterrupt
            return super().__call__(samples)  # type: ignore[arg-type]

    texts = Texts(47)
    counts = count_vocabulary(texts, 8, shows_progress=False)  # type: ignore[arg-type]
    metrics = {"length": Failing(), "rarity": VocabularyRarity(counts)}
    with pytest.raises(KeyboardInterrupt):
        measure(texts, metrics, tmp_path / "cut", shows_progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"length\.npy is not finished: 30 of 47"):
        read_metric(tmp_path / "cut" / "length.npy", texts)  # type: ignore[arg-type]
    texts.reads = 0
    paths = measure(texts, metrics, tmp_path / "cut", shows_progress=False)  # type: ignore[arg-type]
    assert texts.reads < 47 + 2 * 32 - 20, "what was measured is not measured again"
    for name, path in paths.items():
        assert np.array_equal(read_metric(path, texts), whole[name])  # type: ignore[arg-type]
    Failing.calls = 0
    measure(texts, metrics, tmp_path / "cut", shows_progress=False)  # type: ignore[arg-type]
    assert Failing.calls == 0, "a finished pass measures nothing"


def test_a_pass_on_a_full_disk_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a map that the disk has no room for would end the process by SIGBUS."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        refused(OSError, r"No space left on device: .*length\.npy", _measured, tmp_path, Texts(47))
    assert _measured(tmp_path, Texts(47))["length"].tolist() == [k % 5 + 1 for k in range(47)]


def measure_the_same(folder: str) -> bool:
    one, two = (_measured(Path(folder, str(n)), Texts(5000), n) for n in (0, 2))
    return all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.processes
@pytest.mark.slow
def test_several_processes_measure_what_one_does(tmp_path: Path) -> None:
    """In a process of its own: a loader's workers are forks, and those of a session with other threads may hang."""
    assert run_torchrun(1, measure_the_same, str(tmp_path)).check().results == (True,)


def test_metrics_of_another_dataset_are_refused(tmp_path: Path) -> None:
    texts = Texts(47)
    measure(texts, {"length": Length()}, tmp_path, shows_progress=False)  # type: ignore[arg-type]
    path = tmp_path / "length.npy"
    with pytest.raises(ValueError, match="of another dataset: expected 48 numbers, one for each sample"):
        read_metric(path, Texts(48))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of another dataset with the same number of samples"):
        read_metric(path, Texts(47, shift=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"holds metrics of another dataset.*name another folder"):
        measure(Texts(47, shift=1), {"length": Length()}, tmp_path, shows_progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds the metrics length, this pass measures other"):
        measure(texts, {"other": Length()}, tmp_path, shows_progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected a \.npy file.*measure"):
        read_metric(tmp_path / "seqlen_index", texts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a map-style dataset"):
        measure(iter([1]), {"length": Length()}, tmp_path)  # type: ignore[arg-type]
    np.save(tmp_path / "own.npy", np.arange(47))
    assert read_metric(tmp_path / "own.npy", texts)[46] == 46  # type: ignore[arg-type]


def test_progress_is_said_on_a_terminal_and_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal:
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None: ...

    out = Terminal()
    with measuring.Progress("metrics length", 100, out=out) as progress:  # type: ignore[arg-type]
        progress.at(50)
        progress.at(100)
    assert "===============               ] metrics length: 50 of 100 samples" in out.text and out.text.endswith("\n")


# ---------------------------------------------------------------- the sampler


def curriculum(batch: int = 6, seed: int = 3, **metrics: CurriculumMetric) -> CurriculumSampler:
    return CurriculumSampler(20, batch, metrics, seed=seed)


VALUES = np.arange(20)[::-1].copy()  # sample 19 is the easiest
BY_VALUE = CurriculumMetric(Discrete((4, 9, 19), (2, 4)), VALUES)
BY_PERCENTILE = CurriculumMetric(Discrete((25, 50, 100), (1, 3)), VALUES // 2, "percentile")


def numbers(sampler: Sampler, batches: int) -> list[list[int]]:
    return [np.concatenate(sampler.draw().parts).tolist() for _ in range(batches)]


def test_clusters_are_the_table() -> None:
    sampler = curriculum(metric=BY_VALUE)
    sizes, seen = [], []
    for _ in range(5):
        drawn = sampler.draw()
        sizes.append(sampler.cluster_sizes)
        seen.append(drawn.difficulties["metric"])
        assert all(VALUES[k] <= drawn.difficulties["metric"] for k in drawn.parts[0])
    assert seen == [4, 4, 9, 9, 19] and sizes == [[5], [5], [5, 5], [5, 5], [5, 5, 10]]
    sampler = curriculum(metric=BY_PERCENTILE)
    sizes = [(sampler.draw(), sampler.cluster_sizes)[1] for _ in range(4)]
    assert sizes == [[5], [5, 5], [5, 5], [5, 5, 10]]
    first = curriculum(metric=BY_PERCENTILE)
    assert set(numbers(first, 1)[0]) == {14, 16, 17, 18, 19}  # 14 and 15 have one value: the first number comes first


def test_several_metrics_select_what_all_do() -> None:
    other = CurriculumMetric(Discrete((10, 19), (3,)), np.arange(20))
    shape = CurriculumMetric(Discrete((8, 16), (1,)), clustering_type="single_cluster")
    sampler = curriculum(metric=CurriculumMetric(Discrete((9, 19), (1,)), VALUES), other=other, shape=shape)
    sets = [set(numbers(sampler, 1)[0]) for _ in range(3)]
    # sample k has metric 19 - k and other k: at first only 10 has both within 9 and 10
    assert sets[0] == {10} and sets[1] <= set(range(11)) and sampler.cluster_sizes == [1, 10]
    drawn = sampler.draw()
    assert drawn.difficulties == {"metric": 19, "other": 19, "shape": 16} and sampler.cluster_sizes == [1, 10, 9]


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(1, 7), st.integers(0, 5))
def test_an_epoch_of_one_cluster_is_every_sample_once(samples: int, batch: int, seed: int) -> None:
    sampler = CurriculumSampler(samples, batch, {}, seed=seed)
    counts: Counter[int] = Counter()
    for done, row in enumerate(numbers(sampler, samples), 1):
        counts.update(row)
        epochs, rest = divmod(done * batch, samples)
        assert sorted(counts[k] - epochs for k in range(samples)) == [0] * (samples - rest) + [1] * rest


def test_of_a_cluster_no_sample_comes_again_before_all_have_come() -> None:
    sampler = curriculum(metric=BY_VALUE)
    counts: Counter[int] = Counter()
    for row in numbers(sampler, 200):
        counts.update(row)
        for cluster in ([19, 18, 17, 16, 15], [14, 13, 12, 11, 10], list(range(10))):
            of = [counts[k] for k in cluster]
            assert max(of) - min(of) <= 1
    shares = [sum(counts[k] for k in cluster) for cluster in (range(10), range(10, 20))]
    assert sum(shares) == 1200 and abs(shares[0] - 0.49 * 1200) < 90  # from the fifth batch on by size, one half


@pytest.mark.parametrize("done", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_resumed_sampler_goes_on_to_the_bit(done: int, seed: int) -> None:
    whole = curriculum(seed=seed, metric=BY_VALUE, percent=BY_PERCENTILE)
    expected = numbers(whole, 14)
    first, second = (curriculum(seed=seed, metric=BY_VALUE, percent=BY_PERCENTILE) for _ in range(2))
    numbers(first, done)
    second.load_state_dict(first.state_dict())
    assert numbers(second, 14 - done) == expected[done:]
    assert second.state_dict() == whole.state_dict()


def test_what_the_sampler_refuses() -> None:
    with pytest.raises(ValueError, match="the first difficulties select no sample: metric: at most 4, values from 10"):
        curriculum(metric=CurriculumMetric(BY_VALUE.pacing, VALUES + 10))
    with pytest.raises(ValueError, match="metric 'metric' has 3 values for a dataset of 20 samples"):
        curriculum(metric=CurriculumMetric(BY_VALUE.pacing, VALUES[:3]))
    refused(ValueError, "selects samples by their values", CurriculumMetric, BY_VALUE.pacing)
    with pytest.raises(ValueError, match='difficulty_type must be "value" or "percentile"'):
        CurriculumMetric(BY_VALUE.pacing, VALUES, "quantile")
    with pytest.raises(ValueError, match=r"the metric of 2 samples is no finite number, first that of sample 3"):
        CurriculumMetric(BY_VALUE.pacing, np.where(np.isin(np.arange(20), (3, 7)), np.nan, 1.0))
    refused(ValueError, "a batch of 6 samples cannot be split into 4 parts", curriculum().draw, 4)
    state = curriculum(metric=BY_VALUE)
    state.draw()
    with pytest.raises(ValueError, match="from a curriculum by metric, not by other"):
        curriculum(other=BY_VALUE).load_state_dict(state.state_dict())
    with pytest.raises(ValueError, match="over 20 samples, not from a curriculum over 7"):
        CurriculumSampler(7, 1, {}).load_state_dict(state.state_dict())


# ---------------------------------------------------------------- batches by tokens


LENGTHS = np.array([5, 1, 3, 3, 2, 8, 1, 1, 4, 6, 2, 2])


@pytest.mark.parametrize("order", ["random", "order", "seqlen"])
@pytest.mark.parametrize("is_padded", [True, False])
def test_micro_batches_hold_so_many_tokens(order: str, is_padded: bool) -> None:
    sampler = TokenSampler(LENGTHS, 8, 3, order=order, is_padded=is_padded, seed=2)
    parts = [sampler.draw().parts[0] for _ in range(sampler.batches_per_pass)]
    assert sorted(int(k) for part in parts for k in part) == list(range(12))
    for part in parts:
        tokens = LENGTHS[part]
        assert (tokens.max() * len(part) if is_padded else tokens.sum()) <= 8
    if order == "order":
        assert [int(k) for part in parts for k in part] == list(range(12))
    assert len(parts) < 12


def test_micro_batches_in_order_are_the_table_and_scale_the_rate() -> None:
    sampler = TokenSampler(LENGTHS, 8, 4, parts=2, order="order", max_samples=3)
    drawn = [sampler.draw(2) for _ in range(3)]
    # lengths 5 | 1 3 | 3 2 | 8 | 1 1 (4: 12 > 8) | 4 | 6 | 2 2
    assert [[p.tolist() for p in d.parts] for d in drawn] == [[[0], [1, 2]], [[3, 4], [5]], [[6, 7], [8]]]
    assert [d.lr_scale for d in drawn] == [0.75, 0.75, 0.75]
    root = TokenSampler(LENGTHS, 8, 12, parts=2, order="order", scaling="sqrt")
    assert root.draw(2).lr_scale == 0.5
    assert TokenSampler(LENGTHS, 8, 12, scaling="none").draw().lr_scale == 1.0
    few = TokenSampler(LENGTHS, 8, 4, order="order", min_samples=2)
    assert min(len(few.draw().parts[0]) for _ in range(few.batches_per_pass)) >= 2


def test_the_rate_of_a_step_that_was_given_up_is_not_that_of_the_next() -> None:
    """As if a script calls engine.zero_grad() in place of engine.step(), and goes on with its next batch."""
    optimizer, efficiency = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), Efficiency()
    for scale in (0.5, 2.0, 1.0):
        efficiency.begin_rates(optimizer, scale)
        assert optimizer.param_groups[0]["lr"] == scale
    efficiency.end_rates(optimizer)
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("done", [0, 1, 7, 8, 15])
def test_batches_by_tokens_resume_to_the_bit(done: int) -> None:
    def make() -> TokenSampler:
        return TokenSampler(LENGTHS, 8, 4, order="seqlen", seed=5)

    whole = make()
    expected = numbers(whole, 20)
    first, second = make(), make()
    numbers(first, done)
    second.load_state_dict(first.state_dict())
    assert numbers(second, 20 - done) == expected[done:]


def test_what_batches_by_tokens_refuse() -> None:
    refused(ValueError, "sample 5 has 8 tokens, a micro-batch at most 7", TokenSampler, LENGTHS, 7, 4)
    with pytest.raises(ValueError, match="makes 8 micro-batches of 8 tokens, and a step needs 12"):
        TokenSampler(LENGTHS, 8, 4, parts=12, order="order")
    refused(ValueError, "batches of 2 micro-batches, asked for 3", TokenSampler(LENGTHS, 8, 4, parts=2).draw, 3)
    with pytest.raises(ValueError, match="not from one of batches by tokens"):
        TokenSampler(LENGTHS, 8, 4).load_state_dict(curriculum().state_dict())


# ---------------------------------------------------------------- the loader


def loaders(world_size: int, *, batch: int = 8, micro: int = 2, **options: object) -> list[CurriculumLoader]:
    """Of all ranks; global batches of 8 in micro-batches of 2, whatever the world."""
    made = []
    for rank in range(world_size):
        metrics = {
            "metric": CurriculumMetric(Discrete((9, 19, 39), (3, 6)), np.arange(40)),
            "seqlen_truncate": CurriculumMetric(Discrete((2, 3), (2,)), clustering_type="single_cluster"),
        }
        sampler = CurriculumSampler(40, batch, metrics, seed=1)
        where = {"rank": rank, "world_size": world_size, "parts_per_rank": batch // micro // world_size}
        made.append(CurriculumLoader(Numbered(), sampler, **where, **options))  # type: ignore[arg-type]
    return made


class Numbered:
    """Sample k: 4 times the number k."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index)


def steps(of: list[CurriculumLoader], count: int) -> list[list[int]]:
    """The samples of so many global batches, in order of their number."""
    streams = [iter(loader) for loader in of]
    found = []
    for _ in range(count):
        seen: list[int] = []
        for k, loader in enumerate(of):
            for _ in range(loader._parts):
                batch = next(streams[k], None)
                if batch is None:
                    streams[k] = iter(loader)
                    batch = next(streams[k])
                seen += batch[:, 0].tolist()
        found.append(sorted(seen))
    return found


def test_all_worlds_see_the_same_samples_in_each_step() -> None:
    expected = steps(loaders(1), 12)
    assert len({tuple(row) for row in expected}) > 6 and all(len(row) == 8 for row in expected)
    assert steps(loaders(2), 12) == expected and steps(loaders(4), 12) == expected


@pytest.mark.parametrize(("old", "new"), [(4, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("done", [0, 3, 5, 7])  # a pass is 5
def test_a_resumed_loader_goes_on_in_another_world(old: int, new: int, done: int) -> None:
    expected = steps(loaders(1), 12)
    first, second = loaders(old), loaders(new)
    assert steps(first, done) == expected[:done]
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    for loader in second:
        loader.load_state_dict(states[0])
    assert steps(second, 12 - done) == expected[done:]


def test_a_place_within_a_step_holds_in_this_world() -> None:
    (whole,), (first,), (second,) = loaders(1), loaders(1), loaders(1)
    expected = [batch.tolist() for batch in whole]
    stream = iter(first)
    for _ in range(7):
        next(stream)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == expected[7:]
    for loader in loaders(2, micro=1):
        with pytest.raises(ValueError, match="3 micro-batches within a global batch of 4, and one has 8 here"):
            loader.load_state_dict(first.state_dict())


@pytest.mark.processes
@pytest.mark.slow
def test_what_workers_read_ahead_does_not_count() -> None:
    (whole,), (first,), (second,) = loaders(1), loaders(1, num_workers=2, prefetch_factor=3), loaders(1)
    expected = [batch.tolist() for batch in whole]
    stream = iter(first)
    assert [next(stream).tolist() for _ in range(8)] == expected[:8]
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == expected[8:]
    del stream


def test_batches_are_cut_to_the_difficulty() -> None:
    (loader,) = loaders(1)
    shapes = [tuple(batch.shape) for batch in loader]
    assert shapes == [(2, 2)] * 8 + [(2, 3)] * 12 and loader.difficulties == {"metric": 19, "seqlen_truncate": 3}
    (loader,) = loaders(1)
    loader.process = lambda batch, state: (batch, state)
    batch, state = next(iter(loader))
    assert batch.shape == (2, 2) and state == {"current_difficulties": {"metric": 9, "seqlen_truncate": 2}}


def test_what_the_loader_refuses() -> None:
    (loader,) = loaders(1, passes=1)
    assert len(list(loader)) == len(loader) == 20
    refused(RuntimeError, r"all 1 passes over the data have been read; raise data_sampling", next, iter(loader))
    with pytest.raises(ValueError, match="that of a run without a curriculum"):
        loader.load_state_dict({"epoch": 1, "samples_done": 3, "seed": 0})
    refused(ValueError, "fewer samples than a global batch", loaders, 1, batch=48)


# ---------------------------------------------------------------- shorter sequences


def test_truncation_cuts_all_that_runs_along_the_sequence() -> None:
    batch = {
        "input_ids": torch.arange(12).view(2, 6),
        "attention_mask": torch.ones(2, 1, 6, 6),
        "labels": (torch.arange(12).view(2, 6), torch.tensor([1, 2])),
        "name": "text",
    }
    cut = truncate(batch, 4)
    assert cut["input_ids"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]] and cut["attention_mask"].shape == (2, 1, 4, 4)
    labels = cut["labels"]
    assert labels[0].shape == (2, 4) and labels[1].tolist() == [1, 2] and cut["name"] == "text"  # type: ignore[union-attr]
    assert truncate(batch, 6) is batch and truncate(batch, 9) is batch
    embedded = torch.randn(2, 6, 6)  # features as many as tokens: they stay
    assert truncate(embedded, 4).shape == (2, 4, 6) and truncate(torch.ones(2, 6, 6).bool(), 4).shape == (2, 4, 4)


@dataclass
class TextBatch:
    """A batch as a user's `collate_fn` may make it."""

    input_ids: torch.Tensor
    labels: torch.Tensor | None = None
    source: str = "web"


def test_a_batch_may_be_a_dataclass() -> None:
    x = torch.arange(12).view(2, 6)
    whole = TextBatch(x, x + 1)
    cut, folded = truncate(whole, 4), reshape([whole], 3)[0]
    assert cut.input_ids.equal(x[:, :4]) and cut.labels is not None and cut.labels.equal(x[:, :4] + 1)
    assert folded.input_ids.equal(x.view(4, 3)) and folded.source == cut.source == "web"
    assert whole.input_ids is x and truncate(whole, 6) is whole
    assert truncate({"kind": TextBatch, "input_ids": x}, 4)["kind"] is TextBatch  # the class is no batch
    assert cut.input_ids.is_contiguous() and cut.labels.is_contiguous()  # as BERT's loss asks


def test_reshaping_keeps_all_tokens() -> None:
    x, y = torch.arange(12).view(2, 6), torch.randn(2, 6, 5)
    a, b = reshape((x, y), 3)
    assert a.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] and torch.equal(b[1], y[0, 3:])
    assert reshape(x, 4).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]  # what is no whole piece is dropped
    for wrong in (torch.tensor([1, 2]), torch.ones(2, 1, 6, 6), torch.ones(2, 6, 6).bool()):
        refused(ValueError, "cannot be reshaped with its sequences of 6 tokens to ones of 3", reshape, (x, wrong), 3)


# ---------------------------------------------------------------- rates by tokens


class TakesLength(nn.Module):
    def forward(self, tokens: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        return tokens[:, :curriculum_seqlen]


class LooksLengthUp(nn.Module):
    """As DeepSpeed's own test model finds what it is told."""

    def forward(self, tokens: Tensor, **named: int) -> Tensor:
        return tokens[:, : named.get("curriculum_seqlen")]


def test_a_model_that_shortens_sequences_itself_is_told_the_length() -> None:
    tokens, efficiency = torch.zeros(2, 5), Efficiency(lengths=Discrete((2, 3), (2,)))
    for model in (TakesLength(), LooksLengthUp()):
        assert efficiency.prepare(model, 0, (tokens,), {}, rank=0) == {"curriculum_seqlen": 2}
    refused(ValueError, "expects sequences of 2 tokens", efficiency.prepare, nn.ReLU(), 0, (tokens,), {}, rank=0)


def test_rates_follow_tokens_not_steps() -> None:
    def rates(chunks: list[int], decay: str = "cosine") -> float:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        schedule = TokenLR(optimizer, 100, 20, decay=decay)
        for tokens in chunks:
            optimizer.step()
            schedule.step(tokens=tokens)
        return float(optimizer.param_groups[0]["lr"])

    assert rates([]) == 0.1 and rates([10]) == 1.0 and rates([20]) == 2.0
    assert rates([60]) == rates([20, 40]) == rates([1] * 60) == pytest.approx(1.0)
    assert rates([40], "linear") == pytest.approx(1.5) and rates([100]) == rates([400]) == pytest.approx(0.0)
    assert rates([90], "constant") == 2.0
    with pytest.raises(ValueError, match=r"0 <= warmup_tokens < total_tokens"):
        TokenLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0), 10, 10)


def test_rates_by_tokens_resume() -> None:
    def make() -> TokenLR:
        return TokenLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0), 100, 20)

    first, second = make(), make()
    first.optimizer.step()
    first.step(tokens=50)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [group["lr"] for group in second.optimizer.param_groups]
    second.optimizer.step()
    second.step(tokens=25)
    first.step(tokens=25)
    assert second.get_last_lr() == first.get_last_lr()
