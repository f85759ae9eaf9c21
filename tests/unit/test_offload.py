"""`zero/offload`: stores, layouts, and that offloaded training is resident training, to the bit."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from errors import refused
from family import same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import onebit
from onebit.comm import PeerError, SimTransport, run_ranks
from onebit.dense import average_gradients
from onebit.zero import Offload
from onebit.zero.offload import MODES, FileStore, MemoryStore, StoreError, files
from onebit.zero.offload.layout import UNIT, Layout, cut, kept
from onebit.zero.offload.store import PAGE, Extent

MAKES: dict[str, Callable] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "HostAdam": lambda ps: onebit.HostAdam(ps, lr=1e-2, moment_dtype=torch.bfloat16),
    "HostAdam, 8 bits": lambda ps: onebit.HostAdam(ps, lr=1e-2, variance_dtype=torch.uint8),
    "Lamb": lambda ps: onebit.Lamb(ps, lr=1e-2),
    "LaProp": lambda ps: onebit.LaProp(ps, lr=1e-2),
    "Lion": lambda ps: onebit.Lion(ps, lr=1e-2),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}
PLACES = [("none", False), *((mode, in_files) for mode in MODES[1:-1] for in_files in (False, True)), ("full", False)]
PLACES.append(pytest.param("full", True, marks=pytest.mark.slow))


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """12,496 parameters: the first weight is two chunks of UNIT and a rest."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 130), nn.ReLU(), nn.Linear(130, 30), nn.ReLU(), nn.Linear(30, 4)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> list[Tensor]:
    """Of two micro-batches each; every third step leaves the last layer out."""
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        for micro in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + micro)).to(dtype)
            part = model[:3] if step % 3 == 1 else model
            part(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def train_with_masters(model: nn.Module, make: Callable) -> list[Tensor]:
    """The textbook: a float32 copy of each parameter is stepped with its gradient, and rounded into it."""
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = make(masters)

    class Stepped:
        def step(self) -> None:
            for p, master in zip(model.parameters(), masters, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            optimizer.step()
            for p, master in zip(model.parameters(), masters, strict=True):
                p.data.copy_(master)

        def zero_grad(self) -> None:
            model.zero_grad()

    return train(model, Stepped())  # type: ignore[arg-type]


def offloaded(model: nn.Module, name: str, mode: str, to: object, **options: object) -> Offload:
    return Offload(model, MAKES[name], mode, to, **{"chunk_mb": 0.05, **options})  # type: ignore[arg-type]


class TestEquality:
    @pytest.mark.pairwise
    @pytest.mark.parametrize(("mode", "in_files"), PLACES)
    @pytest.mark.parametrize("name", MAKES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_offloaded_is_resident(
        self, name: str, mode: str, in_files: bool, dtype: torch.dtype, tmp_path: Path
    ) -> None:
        if dtype == torch.float32:
            expected = train(model := small_model(), MAKES[name](model.parameters()))
        else:
            expected = train_with_masters(small_model(dtype), MAKES[name])
        model = small_model(dtype)
        offload = offloaded(model, name, mode, tmp_path if in_files else "cpu")
        assert same(train(model, offload), expected)
        offload.close()

    @pytest.mark.parametrize(("mode", "in_files"), PLACES[1:])
    def test_clipping_does_not_depend_on_where_things_lie(self, mode: str, in_files: bool, tmp_path: Path) -> None:
        expected = train(model := small_model(), offloaded(model, "AdamW", "none", "cpu", max_grad_norm=0.01))
        model = small_model()
        offload = offloaded(model, "AdamW", mode, tmp_path if in_files else "cpu", max_grad_norm=0.01, chunk_mb=0.2)
        assert same(train(model, offload), expected)
        model = small_model()
        assert not same(train(model, MAKES["AdamW"](model.parameters())), expected)

    @pytest.mark.pairwise
    @pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("name", MAKES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_share_in_the_store_is_resident(
        self, name: str, ratio: float, dtype: torch.dtype, tmp_path: Path
    ) -> None:
        expected = train(model := small_model(dtype), offloaded(model, name, "none", "cpu", max_grad_norm=0.5))
        model = small_model(dtype)
        offload = offloaded(model, name, "state", tmp_path, ratio=ratio, max_grad_norm=0.5)
        assert same(train(model, offload), expected)
        stored = sum(store.nbytes for store in offload._stores.all if isinstance(store, FileStore))
        whole = sum(store.nbytes for store in offload._stores.all)
        assert ratio * whole <= stored + PAGE <= (ratio + 0.7 * (0 < ratio < 1)) * whole + PAGE
        offload.close()

    def test_the_norm_is_the_norm(self) -> None:
        offload = offloaded(model := small_model(), "SGD", "gradients", "cpu", max_grad_norm=1.0)
        model(torch.ones(1, 64)).sum().backward()
        twin = small_model()
        twin(torch.ones(1, 64)).sum().backward()
        exact = sum(p.grad.double().square().sum().item() for p in twin.parameters()) ** 0.5
        offload.step()
        assert offload.stats.grad_norm == pytest.approx(exact, rel=1e-6)

    def test_gradients_leave_the_parameters(self) -> None:
        offload = offloaded(model := small_model(), "AdamW", "gradients", "cpu")
        model(torch.ones(1, 64)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        offload.step()
        assert not same(before, list(model.parameters()))

    @pytest.mark.parametrize("mode", MODES)
    def test_a_step_that_is_not_finite_leaves_no_trace(self, mode: str) -> None:
        offload = offloaded(model := small_model(), "AdamW", mode, "cpu")
        twin_offload = offloaded(twin := small_model(), "AdamW", mode, "cpu")
        expected = train(twin, twin_offload)
        (model(torch.ones(1, 64)).sum() * float("inf")).backward()
        offload.step()
        offload.zero_grad()
        assert offload.stats.skipped_steps == 1 and offload.stats.grad_norm is None
        assert same(train(model, offload), expected)

    def test_a_scheduler_sets_the_rate(self) -> None:
        offload = offloaded(model := small_model(), "SGD", "state", "cpu")
        scheduler = torch.optim.lr_scheduler.StepLR(offload, 1, 0.0)
        train(model, offload, 1)
        scheduler.step()
        before = [p.detach().clone() for p in model.parameters()]
        assert same(train(model, offload, 1), before)


def of_ranks(models: list[nn.Module], make: Callable, before: Callable | None = None) -> list[list[Tensor]]:
    """Threads train a replica each, two micro-batches of their own in a step; one in three leaves the last layer out.

    before: what comes between backward and the step.
    """

    def work(rank: SimTransport) -> list[Tensor]:
        model = models[rank.rank]
        optimizer, dtype = make(model, rank), next(model.parameters()).dtype
        for step in range(3):
            part = model[:3] if (step + rank.rank) % 3 == 1 else model
            for micro in range(2):
                seed = 10 * rank.rank + 2 * step + micro
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
                part(x).float().square().mean().backward()
            if before is not None:
                before(model, rank)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    return run_ranks(len(models), work)


class TestRanks:
    @pytest.mark.slow
    @pytest.mark.pairwise
    @pytest.mark.parametrize("world_size", [2, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("mode", "in_files"), [("gradients", False), ("gradients", True), ("full", True)])
    def test_means_in_the_store_are_those_of_resident_gradients(
        self, mode: str, in_files: bool, dtype: torch.dtype, world_size: int, tmp_path: Path
    ) -> None:
        resident = of_ranks(
            [small_model(dtype) for _ in range(world_size)],
            lambda model, rank: offloaded(model, "AdamW", "none", "cpu", max_grad_norm=0.01),
            lambda model, rank: average_gradients(model.parameters(), rank),
        )
        to = tmp_path if in_files else "cpu"
        found = of_ranks(
            [small_model(dtype) for _ in range(world_size)],
            lambda model, rank: offloaded(model, "AdamW", mode, to, max_grad_norm=0.01, transport=rank, buffer_count=2),
        )
        assert all(same(params, resident[0]) for params in [*resident, *found])

    def test_one_rank_is_none(self) -> None:
        expected = train(model := small_model(), offloaded(model, "AdamW", "gradients", "cpu"))
        model = small_model()
        assert same(train(model, offloaded(model, "AdamW", "gradients", "cpu", transport=SimTransport())), expected)

    def test_what_no_rank_has_used_is_not_stepped(self) -> None:
        models = [small_model(), small_model()]

        def work(rank: SimTransport) -> bool:
            model = models[rank.rank]
            offload = offloaded(model, "AdamW", "gradients", "cpu", transport=rank)
            before = model[4].weight.detach().clone()
            model[:3](torch.ones(1, 64)).sum().backward()
            offload.step()
            return torch.equal(before, model[4].weight) and model[4].weight not in offload.state

        assert run_ranks(2, work) == [True, True]

    def test_all_skip_what_is_not_finite_on_one(self) -> None:
        models = [small_model(), small_model()]

        def work(rank: SimTransport) -> int:
            model = models[rank.rank]
            offload = offloaded(model, "AdamW", "gradients", "cpu", transport=rank)
            before = [p.detach().clone() for p in model.parameters()]
            (model(torch.ones(1, 64)).sum() * (float("inf") if rank.rank else 1.0)).backward()
            offload.step()
            return offload.stats.skipped_steps if same(before, list(model.parameters())) else -1

        assert run_ranks(2, work) == [1, 1]

    def test_a_file_cut_short_on_one_rank_ends_the_step_of_all(self, tmp_path: Path) -> None:
        models, ended = [small_model(), small_model()], []

        def work(rank: SimTransport) -> None:
            model = models[rank.rank]
            offload = offloaded(model, "AdamW", "gradients", tmp_path, transport=rank)
            model(torch.ones(1, 64)).sum().backward()
            if rank.rank == 1:
                store = offload._gradients.store  # type: ignore[union-attr]
                offload._gradients._settle()  # type: ignore[union-attr]
                store.flush()
                os.ftruncate(store._fd, PAGE)  # type: ignore[attr-defined]
            try:
                offload.step()
            except (StoreError, PeerError) as error:
                ended.append(type(error))
                raise

        refused(StoreError, "cut short", run_ranks, 2, work, timeout_s=20)
        assert set(ended) == {StoreError, PeerError}

    @pytest.mark.parametrize("mode", ["none", "state"])
    def test_resident_gradients_are_the_callers_to_average(self, mode: str) -> None:
        with pytest.raises(ValueError, match=r"onebit\.dense\.average_gradients before step"):
            offloaded(small_model(), "AdamW", mode, "cpu", transport=SimTransport())


class TestState:
    @pytest.mark.pairwise
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("in_files", [False, True])
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({}, {"mode": "gradients"}),
            ({"mode": "full"}, {"mode": "full"}),
            ({"mode": "full"}, {}),
            ({"ratio": 0.3}, {"ratio": 0.8}),
            ({"ratio": 0.8}, {}),
            ({"ratio": 0.0}, {"ratio": 0.3}),
        ],
        ids=str,
    )
    def test_resumed_is_uninterrupted(
        self, before: dict, after: dict, in_files: bool, dtype: torch.dtype, tmp_path: Path
    ) -> None:
        """In another mode and with another share; the plainest has all of the state in the store."""
        plain = {"name": "AdamW", "mode": "state", "to": tmp_path if in_files else "cpu"}
        expected = train(model := small_model(dtype), offloaded(model, **plain), 6)
        first = offloaded(model := small_model(dtype), **plain | before)
        train(model, first, 3)
        torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, tmp_path / "saved.pt")
        first.close()
        saved = torch.load(tmp_path / "saved.pt", mmap=True)
        second = offloaded(model := small_model(dtype), **plain | {"chunk_mb": 0.3} | after)
        second.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])  # behind the optimizer's: masters stay what they round to
        assert same(train(model, second, 3, first=3), expected)

    def test_a_resident_state_loads_and_is_shown(self, tmp_path: Path) -> None:
        resident = MAKES["AdamW"]((model := small_model()).parameters())
        train(model, resident)
        twin = small_model()
        twin.load_state_dict(model.state_dict())
        offload = offloaded(twin, "AdamW", "state", tmp_path)
        offload.load_state_dict(resident.state_dict())
        shown = offload.state_dict()["state"]
        for key, entry in resident.state_dict()["state"].items():
            assert all(torch.equal(entry[name], shown[key][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
        assert same(train(twin, offload, first=3), train(model, resident, first=3))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mode", MODES[1:])
    def test_values_that_others_write_are_taken_over(self, mode: str, dtype: torch.dtype) -> None:
        offload = offloaded(model := small_model(dtype), "SGD", mode, "cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(3.0)
        offload.param_groups[0]["lr"] = 0.0
        train(model, offload, 1)
        assert all((p == 3.0).all() for p in model.parameters())

    def test_others_states_are_refused(self) -> None:
        offload = offloaded(small_model(), "AdamW", "state", "cpu")
        train(other := small_model(), momentum := MAKES["momentum"](other.parameters()))
        refused(ValueError, "no exp_avg there", offload.load_state_dict, momentum.state_dict())
        with pytest.raises(ValueError, match="its groups have"):
            offload.load_state_dict(MAKES["AdamW"](other[0].parameters()).state_dict())


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"mode": "half"}, "expected mode of"),
            ({"ratio": 1.5}, "0 <= ratio <= 1, got 1.5"),
            ({"ratio": 0.5, "mode": "gradients"}, "whose gradients stay with the parameters, got mode 'gradients'"),
            ({"chunk_mb": 0.0}, "chunk_mb > 0"),
            ({"buffer_count": 1}, "buffer_count >= 2, got .* 1$"),
            ({"buffer_count": 0, "mode": "full", "to": "cpu"}, "buffer_count >= 2, got .* 0$"),
        ],
    )
    def test_are_checked(self, options: dict, text: str, tmp_path: Path) -> None:
        refused(ValueError, text, Offload, small_model(), MAKES["AdamW"], **{"to": tmp_path, **options})

    def test_a_used_optimizer_is_refused(self) -> None:
        train(model := small_model(), made := MAKES["AdamW"](model.parameters()))
        refused(ValueError, "fresh", Offload, model, lambda ps: made)

    def test_a_closed_one_says_so(self) -> None:
        offload = offloaded(small_model(), "AdamW", "state", "cpu")
        offload.close()
        refused(RuntimeError, "closed", offload.load_state_dict, offload.state_dict())


class TestLayout:
    @given(st.lists(st.integers(0, 100), max_size=8), st.floats(0, 1))
    def test_a_share_is_what_was_asked_for_and_no_parameter_more(self, numels: list[int], ratio: float) -> None:
        near, total = kept(numels, ratio), sum(numels)
        assert sum(numels[near:]) >= ratio * total - 1e-9
        assert near == len(numels) or ratio == 1.0 or sum(numels[near + 1 :]) < ratio * total + 1e-9

    @pytest.mark.parametrize("may_split", [False, True])
    def test_every_element_is_in_one_piece(self, may_split: bool) -> None:
        numels = [0, 1, UNIT, 3 * UNIT + 5, 7, 2 * UNIT, 0]
        chunks = cut(numels, 2 * UNIT, may_split=may_split)
        covered: list[list[int]] = [[] for _ in numels]
        for chunk in chunks:
            assert chunk.start % UNIT == chunk.size % UNIT == 0
            assert chunk.size <= 2 * UNIT or not may_split
            places = [x for piece in chunk.pieces for x in range(piece.at, piece.at + piece.stop - piece.start)]
            assert len(set(places)) == len(places) and all(0 <= x < chunk.size for x in places)
            for piece in chunk.pieces:
                covered[piece.param] += range(piece.start, piece.stop)
        assert covered == [list(range(numel)) for numel in numels]

    def test_fields_do_not_overlap(self) -> None:
        layout = Layout(cut([100, 5000], UNIT, may_split=True), {"a": torch.float32, "b": torch.uint8})
        extents = [extent for chunk in layout.chunks for extent in layout.extents(chunk)]
        assert not any(a.overlaps(b) for a in extents for b in extents if a is not b)
        assert max(e.offset + e.nbytes for e in extents) <= layout.nbytes
        assert all(e.offset % PAGE == e.nbytes % PAGE == 0 for e in extents)


def fill(store: FileStore | MemoryStore, extents: list[Extent], value: int) -> None:
    lease = store.read(extents, fresh=True)
    for part in lease.wait():
        part.fill_(value)
    store.write(lease)


class TestStores:
    @pytest.mark.parametrize("kind", ["memory", "direct", "ordinary"])
    def test_gives_back_what_was_written(self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if kind == "ordinary":
            monkeypatch.setattr(files, "_takes_direct", lambda fd, nbytes: False)
        store = MemoryStore(8 * PAGE) if kind == "memory" else FileStore(tmp_path, 8 * PAGE, 2 * PAGE, buffer_count=3)
        for k in range(4):
            fill(store, [Extent(k * PAGE, PAGE), Extent((4 + k) * PAGE, PAGE)], k)
        for k in range(4):
            lease = store.read([Extent(k * PAGE, PAGE), Extent((4 + k) * PAGE, PAGE)])
            assert all((part == k).all() for part in lease.wait())
            store.drop(lease)
        assert (store.view(6 * PAGE, PAGE) == 2).all()
        assert kind not in store.describe() or kind == "memory"
        store.close()

    def test_says_which_way_it_takes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_takes_direct", lambda fd, nbytes: False)
        store = FileStore(tmp_path, PAGE, PAGE)
        assert not store.is_direct and "has no O_DIRECT" in store.describe()

    def test_nothing_is_left_in_the_folder(self, tmp_path: Path) -> None:
        first, second = (FileStore(tmp_path, PAGE, PAGE) for _ in range(2))  # two runs in one folder
        fill(first, [Extent(0, PAGE)], 1)
        fill(second, [Extent(0, PAGE)], 2)
        assert (first.view(0, PAGE) == 1).all() and (second.view(0, PAGE) == 2).all()
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("act", ["read", "write", "view"])
    def test_a_file_cut_short_is_named(self, act: str, tmp_path: Path) -> None:
        store = FileStore(tmp_path, 4 * PAGE, PAGE)
        fill(store, [Extent(3 * PAGE, PAGE)], 1)
        store.flush()
        os.ftruncate(store._fd, PAGE)
        with pytest.raises(StoreError, match="cut short below this run"):
            if act == "read":
                store.read([Extent(3 * PAGE, PAGE)]).wait()
            elif act == "write":
                fill(store, [Extent(3 * PAGE, PAGE)], 1)
                store.flush()
            else:
                store.view(0, PAGE)

    def test_a_full_disk_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match=r"is full: it has .* GB left, this run's file needs") as caught:
            FileStore(tmp_path, 1 << 50, PAGE)
        assert caught.value.errno == errno.ENOSPC
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("call", "number", "text"),
        [
            ("pwritev", errno.ENOSPC, "is full"),
            ("pwritev", errno.EIO, "could not be written: Input/output error"),
            ("open", errno.EACCES, "is not writable: Permission denied"),
        ],
    )
    def test_what_a_disk_refuses_is_named(
        self, call: str, number: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files.os, call, refuse)
        with pytest.raises(StoreError, match=text):
            fill(store := FileStore(tmp_path, PAGE, PAGE), [Extent(0, PAGE)], 1)
            store.flush()

    def test_a_folder_that_is_none_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        refused(StoreError, "cannot be made", FileStore, tmp_path / "file" / "folder", PAGE, PAGE)

    def test_waiting_for_a_slow_disk_is_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read = os.preadv

        def slow(*args: object) -> int:
            import time

            time.sleep(0.05)
            return read(*args)  # type: ignore[arg-type]

        store = FileStore(tmp_path, PAGE, PAGE)
        fill(store, [Extent(0, PAGE)], 1)
        monkeypatch.setattr(files.os, "preadv", slow)
        store.flush()
        before = store.wait_s
        store.drop(lease) if (lease := store.read([Extent(0, PAGE)])).wait() else None
        assert store.wait_s - before >= 0.04


_KILLED = """
import os, signal, sys, torch
sys.path[:0] = {paths!r}
from test_offload import offloaded, small_model, train
from onebit.zero.offload import files
model = small_model()
offload = offloaded(model, "AdamW", "gradients", {folder!r})
train(model, offload, 2)
torch.save(dict(model=model.state_dict(), optimizer=offload.state_dict()), {saved!r})
write, left = os.pwritev, 3
def dying(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*args)
files.os.pwritev = dying
train(model, offload, 2, first=2)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_killed_within_a_step_and_resumed(tmp_path: Path) -> None:
    """Without an engine; `processes/test_offload_killed.py` kills those, with their parameters in files as well."""
    folder, saved = tmp_path / "offload", tmp_path / "saved.pt"
    expected = train(model := small_model(), MAKES["AdamW"](model.parameters()), 4)
    text = _KILLED.format(paths=sys.path, folder=str(folder), saved=str(saved))
    assert subprocess.run([sys.executable, "-c", text], timeout=120).returncode == -signal.SIGKILL
    assert not list(folder.iterdir())
    state = torch.load(saved, mmap=True)
    offload = offloaded(model := small_model(), "AdamW", "gradients", folder)
    offload.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])
    assert same(train(model, offload, 2, first=2), expected)
