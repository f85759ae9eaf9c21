"""The doctor's arithmetic: buckets as they are made, steps as an event queue has them, links, verdicts.

And what it finds wrong with an installation.
"""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PathDistribution
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from onebit import OnebitAdam
from onebit.cli.doctor import links, samples
from onebit.cli.doctor.contenders import FIRST, METHODS, WARMUP_STEPS, EmulatedModel
from onebit.cli.doctor.installation import examine
from onebit.cli.doctor.links import Link, Node, rounds, slow
from onebit.cli.doctor.prediction import Line, Schedule, StepCost, predict, shapes_of, verdict
from onebit.comm import SimTransport, kernels, run_ranks, torch_versions
from onebit.usage.marks import is_inspected
from onebit.version import VERSION

DDP = next(m for m in METHODS if m.name == "DDP float32")
ONEBIT = next(m for m in METHODS if m.name == "OnebitAdam")
MODEL = shapes_of(30e6)
NUMELS = samples.numels_of(MODEL)


def cost(exchange_s: float, launching_s: float, update_s: float, numels: list[int]) -> StepCost:
    """Lines through the origin that give these seconds for the whole model."""
    n = sum(numels)
    return StepCost(*(Line(0.0, s / n) for s in (exchange_s, launching_s, update_s)))


# ---------------------------------------------------------------- buckets


def test_buckets_of_ddp_are_torchs() -> None:
    """As DDP rebuilds them: in the order of gradients, the first of 1 MiB, the others of 25 MiB."""
    tensors = [torch.empty(n) for n in reversed(NUMELS)]
    made, _ = dist._compute_bucket_assignment_by_size(tensors, [1 << 20, 25 << 20])
    assert DDP.schedule.buckets(NUMELS) == [sum(tensors[k].numel() for k in members) for members in made]


def test_buckets_of_ours_are_the_optimizers() -> None:
    transport = SimTransport()
    model = EmulatedModel(MODEL[:9], transport)
    optimizer = OnebitAdam(model.parameters(), transport=transport)
    expected = [bucket.layout.parameter_numel for bucket in optimizer.buckets]
    assert ONEBIT.schedule.buckets(NUMELS[:9]) == expected and len(expected) > 1


# ---------------------------------------------------------------- steps


def test_without_computing_a_step_is_traffic_and_update() -> None:
    for method in (DDP, ONEBIT):
        made = predict(cost(0.6, 0.0, 0.1, NUMELS), method.schedule, NUMELS, 0.0)
        assert made.hidden == pytest.approx(0.7) and made.behind == pytest.approx(0.7)


def test_what_hides_is_all_but_the_last_bucket() -> None:
    """Behind much computing. Ours: phase 1 of the last bucket, phase 2 of the last two."""
    sizes = DDP.schedule.buckets(NUMELS)
    made = predict(cost(0.6, 0.0, 0.1, NUMELS), DDP.schedule, NUMELS, 100.0)
    assert made.hidden == pytest.approx(100.1 + 0.6 * sizes[-1] / sum(sizes))
    sizes = ONEBIT.schedule.buckets(NUMELS)
    assert len(sizes) > 4
    made = predict(cost(0.6, 0.0, 0.1, NUMELS), ONEBIT.schedule, NUMELS, 100.0)
    assert made.hidden == pytest.approx(100.1 + 0.3 * (2 * sizes[-1] + sizes[-2]) / sum(sizes))


def test_launching_makes_backward_longer() -> None:
    much = predict(cost(0.6, 0.2, 0.1, NUMELS), DDP.schedule, NUMELS, 100.0)
    none = predict(cost(0.4, 0.0, 0.1, NUMELS), DDP.schedule, NUMELS, 100.0)
    assert much.hidden == pytest.approx(none.hidden + 0.2)


@given(
    sizes=st.lists(st.integers(1, 40).map(lambda n: n << 17), min_size=1, max_size=12),
    exchange_s=st.floats(0.01, 5), update_s=st.floats(0, 1), compute_s=st.floats(0, 5),
)  # fmt: skip
def test_a_step_lies_between_its_limits(sizes: list[int], exchange_s: float, update_s: float, compute_s: float) -> None:
    for schedule in (DDP.schedule, ONEBIT.schedule, Schedule(hides=0.2, phases=1), Schedule(hides=0.0)):
        made = predict(cost(exchange_s, 0.0, update_s, sizes), schedule, sizes, compute_s)
        least = max(compute_s, schedule.hides * exchange_s) + (1.0 - schedule.hides) * exchange_s + update_s
        assert least - 1e-9 <= made.hidden <= made.behind + 1e-9
        assert made.behind == pytest.approx(compute_s + exchange_s + update_s)


@given(
    sizes=st.lists(st.integers(1, 60).map(lambda n: n << 17), min_size=1, max_size=14),
    exchange_s=st.floats(0.01, 5), compute_s=st.floats(0, 5),
)  # fmt: skip
def test_the_wire_is_an_event_queue(sizes: list[int], exchange_s: float, compute_s: float) -> None:
    """Oracle: one wire that serves phases first come, first served, as the driver launches them."""
    buckets, n = ONEBIT.schedule.buckets(sizes), sum(sizes)
    ready, complete = [], 0
    for size in buckets:
        complete += size
        ready.append(compute_s / 3 + 2 / 3 * compute_s * complete / n)
    jobs = []  # (launch, turn, phase, seconds)
    for k, size in enumerate(buckets):
        seconds = exchange_s * size / n / 2
        jobs.append((ready[k], k, 0, seconds))
        behind = k + 1
        jobs.append((ready[behind] if behind < len(buckets) else compute_s, behind, 1, seconds))
    wire_free = 0.0
    for launch, _, _, seconds in sorted(jobs):
        wire_free = max(wire_free, launch) + seconds
    made = predict(cost(exchange_s, 0.0, 0.0, sizes), ONEBIT.schedule, sizes, compute_s)
    assert made.hidden == pytest.approx(max(wire_free, compute_s))


def test_lines_never_fall_and_go_through_what_was_measured() -> None:
    line = Line.through([(100, 1.0), (300, 2.0)])
    assert (line.at(100), line.at(300), line.at(500)) == (1.0, 2.0, 3.0)
    for points in ([(100, 2.0)], [(50, 3.0), (100, 2.0)]):
        line = Line.through(points)
        assert line.at(100) == 2.0 and line.at(200) == 4.0
    assert Line.through([(100, 0.1), (200, 2.0)]) == Line(0.0, 0.01)  # no negative start


@pytest.mark.parametrize(("params", "width"), [(124e6, 768), (340e6, 1024), (1.5e9, 1536), (8e9, 4096)])
def test_models_are_about_as_large_as_asked(params: float, width: int) -> None:
    shapes = shapes_of(params)
    assert shapes[1] == (width, width)
    assert sum(samples.numels_of(shapes)) == pytest.approx(params, rel=0.1)


# ---------------------------------------------------------------- samples


def test_samples_are_as_large_as_a_second_allows_and_never_larger_than_the_model() -> None:
    small, large = samples.sample_shapes(MODEL, DDP, world_size=4, bytes_per_s=12e6)
    n = sum(samples.numels_of(large))
    assert 1.5 * 4 * n / 12e6 < 1.5 * samples.STEP_S + 1.5 * 4 * max(NUMELS) / 12e6
    assert sum(samples.numels_of(small)) < n
    tiny = MODEL[:1]
    assert samples.sample_shapes(tiny, DDP, 4, 12e6) == [tiny]


@pytest.mark.slow
def test_every_method_takes_its_steps_and_tells_its_warmup() -> None:
    """Over simulated ranks, which have no process group: what does not need one."""
    methods = [m for m in METHODS if not m.needs_group]
    shapes = [(64, 64), (64, 256)]

    def work(transport: SimTransport) -> dict[str, samples.Timed]:
        rows: dict[str, samples.Timed] = {}
        for method in methods:
            rows |= samples.measure(method, shapes, transport, compute_s=0.002, repeats=2)
        return rows

    every = run_ranks(2, work)
    assert every[0] == every[1]  # the slowest rank's, everywhere
    warm = {m.name + samples.WARMUP for m in methods if m.has_warmup}
    assert set(every[0]) == {m.name for m in methods} | warm and len(warm) == 2
    for step in every[0].values():
        assert 0.002 <= step.backward_s <= step.seconds and 0 <= step.update_s <= step.seconds
    assert WARMUP_STEPS >= FIRST + 2 and not is_inspected(FIRST - 1)


def test_predictions_have_a_row_for_each_sample() -> None:
    step = samples.Timed(1.0, 0.2, 0.1)
    found = {
        name: [samples.Sample(n, 1, step) for n in (1 << 20, 1 << 22)] for name in ("OnebitAdam", "OnebitAdam, warm-up")
    }
    assert list(samples.predictions([ONEBIT, DDP], found, MODEL, 0.5)) == list(found)


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_no_node_is_twice_in_a_round(nodes: int) -> None:
    met = []
    for pairs in rounds(nodes):
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        met += pairs
    assert sorted(met) == list(combinations(range(nodes), 2))


def test_links_of_one_host_are_none() -> None:
    assert run_ranks(3, lambda transport: links.measure(transport, links.find_nodes(transport))) == [[], [], []]


def test_two_nodes_measure_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node("a", (0, 1)), Node("b", (2,))]
    monkeypatch.setattr(links, "ENOUGH_S", 0.001)
    every = run_ranks(3, lambda transport: links.measure(transport, nodes))
    (link,) = every[0]
    assert every[1] == every[2] == every[0]
    assert (link.a, link.b) == (0, 1) and link.bytes_per_s > 0 and link.latency_s > 0


NAMES = [Node(name, (k,)) for k, name in enumerate(("north", "east", "south", "west"))]


def world(slow_pairs: set[tuple[int, int]]) -> list[Link]:
    return [Link(a, b, 3e7 if (a, b) in slow_pairs else 1.2e8, 1e-4) for a, b in combinations(range(4), 2)]


def test_the_slow_one_is_named() -> None:
    assert slow(world(set()), NAMES) is None and slow([], NAMES[:1]) is None
    node = slow(world({(0, 2), (1, 2), (2, 3)}), NAMES)
    assert node is not None and node.startswith("south is slow: its links pass 0.24 Gbit/s at most, others 0.96")
    pair = slow(world({(1, 3)}), NAMES)
    assert pair is not None and "between east and west" in pair and "0.24 Gbit/s" in pair


# ---------------------------------------------------------------- verdicts


def test_the_verdict_names_the_best_and_both_dense_ones() -> None:
    said = verdict({"DDP float32": 4.2, "DDP bfloat16": 2.1}, {"OnebitAdam": 1.0, "OnebitLamb": 1.1}, 0.5)
    assert said.pays and said.factor == pytest.approx(2.1)
    assert said.text.startswith("OnebitAdam pays 4.2 times: 4.2 times as fast as DDP float32, 2.1 times as")


def test_the_verdict_says_why_not() -> None:
    hidden = verdict({"DDP float32": 1.05, "DDP bfloat16": 1.02}, {"OnebitAdam": 1.01}, 1.0)
    assert not hidden.pays and "a step computes 1 s" in hidden.text and "0.02 s" in hidden.text
    fast = verdict({"DDP float32": 0.2, "DDP bfloat16": 0.1}, {"OnebitAdam": 0.15}, 0.0)
    assert not fast.pays and "fast for its processors" in fast.text and "0.15 s against 0.1 s" in fast.text
    assert not verdict({"DDP float32": 1.0}, {"OnebitAdam": 0.96}, 0.0).pays  # less than 5 %


# ---------------------------------------------------------------- the installation


def installed(site: Path, *, version: str = VERSION, url: object = None, requires: str = "") -> Distribution:
    """What an installer writes beside a package, without the package."""
    folder = site / f"onebit-{version}.dist-info"
    folder.mkdir(parents=True)
    requirement = f"Requires-Dist: {requires}\n" if requires else ""
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: onebit\nVersion: {version}\n{requirement}\n")
    (folder / "INSTALLER").write_text("pip\n")
    if url:
        (folder / "direct_url.json").write_text(json.dumps(url))
    return PathDistribution(folder)


def wrong_with(package: Path, *found: Distribution) -> str:
    """Problems other than those of this machine itself."""
    here = examine({}, package=package, found=()).problems
    return "\n".join(line for line in examine({}, package=package, found=found).problems if line not in here)


def test_sound_installations(tmp_path: Path) -> None:
    wheel, checkout = installed(tmp_path / "a site"), tmp_path / "my code"
    editable = installed(tmp_path / "b", url={"url": checkout.as_uri(), "dir_info": {"editable": True}})
    for package, found, said in (
        (tmp_path / "a site" / "onebit", (wheel,), f"{VERSION} by pip, in {tmp_path}/a site"),
        (checkout / "onebit", (editable,), f"{VERSION} by pip, editable, in {checkout}"),
        (checkout / "onebit", (), f"not by an installer: imported from {checkout}"),
    ):
        assert wrong_with(package, *found) == ""
        assert examine({}, package=package, found=found).facts["installed"].startswith(said)


def test_what_is_wrong_with_an_installation_is_a_sentence(tmp_path: Path) -> None:
    one, two, old = installed(tmp_path / "1"), installed(tmp_path / "2"), installed(tmp_path / "3", version="0.0.9")
    assert f"imported from {tmp_path}/x, but installed in {tmp_path}/1" in wrong_with(tmp_path / "x" / "onebit", one)
    assert f"installed again in {tmp_path}/2" in wrong_with(tmp_path / "1" / "onebit", one, two)
    assert f"files are those of onebit {VERSION}, the installer wrote 0.0.9" in wrong_with(tmp_path / "3/onebit", old)


def test_a_library_that_is_too_old_for_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = installed(tmp_path / "1", requires='rich>=999.1; extra == "train"')
    assert "is older than 999.1: pip install --upgrade 'onebit[train]'" in wrong_with(tmp_path / "1" / "onebit", one)
    monkeypatch.setattr("onebit.cli.doctor.installation.util.find_spec", lambda name: None)
    assert examine({}, package=tmp_path / "1" / "onebit", found=[one]).facts["absent"] == "rich (onebit[train])"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.BACKENDS["triton"], "why_not", lambda: "")
    said = examine({"TRITON_CACHE_DIR": str(tmp_path / "new")}, found=())
    assert f"triton {tmp_path}/new (writable)" in said.facts["caches"] and "TRITON_CACHE_DIR" not in str(said.problems)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    (problem,) = (line for line in examine({}, found=()).problems if "cache" in line or "TRITON" in line)
    assert "is not writable, so triton compiles its kernels in every process: set TRITON_CACHE_DIR" in problem


def test_kernels_of_another_version_and_an_untested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.BACKENDS["cpu"], "why_not", lambda: "_kernels.so has ABI 8 and this package needs 9")
    monkeypatch.setattr(torch_versions, "NEWEST", (1, 9))
    said = examine({}, found=())
    assert "_kernels.so has ABI 8 and this package needs 9" in said.problems
    assert any(f"torch {torch.__version__} is newer than what onebit {VERSION} was tested" in s for s in said.problems)
