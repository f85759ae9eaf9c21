"""Copies beside computing: whenever they happen, offloaded training has the bits of resident training."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family import same
from late_streams import Copy, LateStreams, Mark, in_use, random_bytes, storage
from test_offload import MAKES, MODES, offloaded, small_model, train, train_with_masters
from test_offload_full import MODELS, adamw, away, full, made
from test_offload_full import train as train_any
from torch import nn

from onebit.zero.offload import FileStore, MemoryStore, StoreError, files
from onebit.zero.offload.staged import HostBuffers, StagedStore
from onebit.zero.offload.store import PAGE, Extent
from onebit.zero.offload.streams import DeviceStreams, streams_of

HOST = torch.device("cpu")
AWAY = [mode for mode in MODES if mode != "none"]


@pytest.fixture(params=["late", "early"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    return in_use(monkeypatch, LateStreams(is_early=request.param == "early"))


def staged_store(store: FileStore | MemoryStore, streams: LateStreams, pages: int, count: int) -> StagedStore:
    return StagedStore(store, streams, HOST, pages * PAGE, count)


class TestTraining:
    @pytest.mark.pairwise
    @pytest.mark.parametrize("in_files", [False, True])
    @pytest.mark.parametrize("mode", AWAY)
    @pytest.mark.parametrize("name", ["AdamW", "HostAdam, 8 bits", "Lamb"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_resident_training(
        self, name: str, mode: str, in_files: bool, dtype: torch.dtype, streams: LateStreams, tmp_path: Path
    ) -> None:
        if dtype == torch.float32:
            expected = train(model := small_model(), MAKES[name](model.parameters()))
        else:
            expected = train_with_masters(small_model(dtype), MAKES[name])
        offload = offloaded(model := small_model(dtype), name, mode, tmp_path if in_files else "cpu")
        assert same(train(model, offload), expected)
        offload.close()
        assert same([p.detach() for p in model.parameters()], expected)
        assert streams.copies

    @pytest.mark.parametrize("ratio", [0.0, 0.3])
    def test_a_share_of_it(self, ratio: float, streams: LateStreams) -> None:
        expected = train_with_masters(small_model(torch.bfloat16), MAKES["AdamW"])
        offload = offloaded(model := small_model(torch.bfloat16), "AdamW", "state", "cpu", ratio=ratio)
        assert same(train(model, offload), expected)
        assert bool(streams.copies) == (ratio > 0)

    @pytest.mark.slow
    @pytest.mark.pairwise
    @pytest.mark.parametrize("in_files", [False, True])
    @pytest.mark.parametrize("name", MODELS)
    def test_of_any_model(self, name: str, in_files: bool, streams: LateStreams, tmp_path: Path) -> None:
        resident = made(name)
        expected = train_any(resident, adamw([p for p in resident.parameters() if p.requires_grad]))
        offload = full(model := made(name), tmp_path if in_files else "cpu")
        assert same(train_any(model, offload), expected)
        assert away(offload)
        offload.close()
        assert same([p.detach() for p in model.parameters()], expected[-len(list(model.parameters())) :])

    @pytest.mark.slow
    @pytest.mark.parametrize("buffer_count", [2, 3, 8])
    def test_does_not_depend_on_buffers(self, buffer_count: int, streams: LateStreams, tmp_path: Path) -> None:
        expected = train_any(resident := made("checkpoint"), adamw(resident.parameters()))
        for to in ("cpu", tmp_path):
            offload = full(model := made("checkpoint"), to, buffer_count=buffer_count, chunk_mb=0.001)
            assert same(train_any(model, offload), expected)

    @pytest.mark.parametrize("mode", AWAY)
    def test_clipping_and_checkpoints(self, mode: str, streams: LateStreams, monkeypatch: pytest.MonkeyPatch) -> None:
        dtype = torch.bfloat16
        expected = train(
            model := small_model(dtype), offloaded(model, "AdamW", "none", "cpu", max_grad_norm=0.01), steps=4
        )
        first = offloaded(model := small_model(dtype), "AdamW", mode, "cpu", max_grad_norm=0.01)
        train(model, first, steps=2)
        saved = {k: x.clone() for k, x in model.state_dict().items()}
        second = offloaded(other := small_model(dtype), "AdamW", mode, "cpu", max_grad_norm=0.01)
        second.load_state_dict(first.state_dict())
        other.load_state_dict(saved)
        assert same(train(other, second, steps=2, first=2), expected)

    @pytest.mark.parametrize("mode", AWAY)
    def test_values_written_by_others_are_taken_over(self, mode: str, streams: LateStreams) -> None:
        found = []
        for way in (mode, "none"):
            offload = offloaded(model := small_model(torch.bfloat16), "AdamW", way, "cpu")
            train(model, offload, steps=1)
            with torch.no_grad():
                model[2].bias.fill_(1.0)
            assert (model.state_dict()["2.bias"] == 1.0).all()
            model(torch.ones(4, 64).bfloat16()).float().square().mean().backward()
            with torch.no_grad():
                model[0].weight.mul_(0.5)
            offload.step()
            offload.zero_grad()
            found.append(train(model, offload, steps=2, first=1))
        assert same(*found)


class TestOverlap:
    def test_forward_and_backward_do_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the second pass reads was read ahead, and nothing of it stops the host."""
        streams = in_use(monkeypatch, LateStreams())
        offload = offloaded(model := small_model(torch.bfloat16), "AdamW", "full", "cpu")
        train(model, offload, steps=2)
        model(torch.randn(4, 64).bfloat16())  # train() has looked at the values
        before = streams.waits
        loss = model(torch.randn(4, 64).bfloat16()).float().square().mean()
        loss.backward()
        assert streams.waits == before
        offload.step()
        assert streams.waits > before  # the step on the host needs the gradients

    @pytest.mark.parametrize("mode", ["state", "gradients"])
    def test_a_chunk_travels_while_another_is_stepped(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        streams = in_use(monkeypatch, LateStreams())
        offload = offloaded(model := small_model(torch.bfloat16), "SGD", mode, "cpu", chunk_mb=0.016)
        model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
        under_way = []
        step = offload.inner.step

        def counted() -> None:
            under_way.append(sum(not copy.is_done for copy in streams.copies))
            step()

        monkeypatch.setattr(offload.inner, "step", counted)
        offload.step()
        assert len(under_way) > 2 and min(under_way[1:]) > 0

    def test_a_module_is_ahead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While a module computes, the next one has begun to come, in full; in the order of the last pass."""
        streams = in_use(monkeypatch, LateStreams())
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        full(model, chunk_mb=0.001)
        module_bytes = 64 * 64 * 4 + PAGE  # in whole pages
        sent: list[int] = []
        for layer in model:
            layer.register_forward_pre_hook(
                lambda *_: sent.append(sum(c.source.numel() for c in streams.copies if storage(c.into) in streams.near))
            )
        for _ in range(2):
            sent.clear()
            begun = sum(c.source.numel() for c in streams.copies if storage(c.into) in streams.near)
            with torch.no_grad():
                model(torch.randn(2, 64))
        ahead = [so_far - begun - k * module_bytes for k, so_far in enumerate(sent)]
        assert ahead == [module_bytes, *[2 * module_bytes] * 5]  # the first one came behind the last of the pass before


class TestStagedStore:
    @pytest.mark.parametrize("in_files", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    def test_any_order_gives_what_was_written(
        self, in_files: bool, seed: int, streams: LateStreams, tmp_path: Path
    ) -> None:
        pages, count, rng = 8, 3, random.Random(seed)
        store = (
            FileStore(tmp_path, pages * PAGE, 2 * PAGE, buffer_count=count) if in_files else MemoryStore(pages * PAGE)
        )
        staged = staged_store(store, streams, 2, count)
        there = [None] * pages  # what each page should hold
        held: deque = deque()
        for turn in range(300):
            if len(held) < count - 1 and rng.random() < 0.6:
                taken = {p for _, wanted, *_ in held for p in wanted}
                free = [p for p in range(pages) if p not in taken]
                wanted = rng.sample(free, 2)
                fresh = any(there[p] is None for p in wanted) or rng.random() < 0.3
                held.append((staged.read([Extent(p * PAGE, PAGE) for p in wanted], fresh=fresh), wanted, fresh))
            elif held:
                lease, wanted, fresh = held.popleft()
                if fresh or rng.random() < 0.8:
                    parts = lease.wait()
                    for p, part in zip(wanted, parts, strict=True):
                        assert fresh or torch.equal(part, random_bytes(PAGE, there[p]))
                if fresh or (rng.random() < 0.5):
                    for p, part in zip(wanted, lease.wait(), strict=True):
                        part.copy_(random_bytes(PAGE, turn * pages + p))
                        there[p] = turn * pages + p
                    staged.write(lease)
                else:
                    staged.drop(lease)
        while held:
            staged.drop(held.popleft()[0])
        staged.settle()
        for p, seed_of in enumerate(there):
            if seed_of is not None:
                assert torch.equal(store.view(p * PAGE, PAGE), random_bytes(PAGE, seed_of))
        store.close()

    def test_a_buffer_is_filled_behind_what_is_computed_with_it(self, streams: LateStreams) -> None:
        staged = staged_store(MemoryStore(4 * PAGE), streams, 1, 2)
        ended: dict[int, int] = {}
        for turn in range(12):
            first = len(streams.copies)
            lease = staged.read([Extent(turn % 4 * PAGE, PAGE)], fresh=turn % 3 == 2)
            (part,) = lease.wait()
            for copy in streams.copies[first:]:
                assert any(is_behind(moment, ended.get(storage(copy.into), 0)) for moment in copy.after)
            streams.mark()
            ended[storage(part)] = streams.marks
            staged.write(lease) if turn % 2 else staged.drop(lease)

    def test_no_lease_of_the_store_is_held_for_long(self, streams: LateStreams, tmp_path: Path) -> None:
        """Two buffers of a file are enough for two leases at a time, whatever is under way."""
        store = FileStore(tmp_path, 8 * PAGE, PAGE, buffer_count=2)
        staged = staged_store(store, streams, 1, 2)
        for turn in range(20):
            leases = [staged.read([Extent((turn + k) % 8 * PAGE, PAGE)], fresh=turn < 8) for k in range(2)]
            for lease in leases:
                lease.wait()
                staged.write(lease)
        staged.settle()
        store.close()

    def test_a_store_that_fails_says_so(self, streams: LateStreams, tmp_path: Path, monkeypatch) -> None:
        def broken(*args: object) -> int:
            raise OSError(5, "Input/output error")

        store = FileStore(tmp_path, 4 * PAGE, PAGE, buffer_count=2)
        staged = staged_store(store, streams, 1, 2)
        monkeypatch.setattr(files.os, "preadv", broken)
        lease = staged.read([Extent(0, PAGE)])
        with pytest.raises(StoreError, match="could not be read"):
            lease.wait()
        staged.drop(lease)
        monkeypatch.undo()
        lease = staged.read([Extent(0, PAGE)])
        lease.wait()
        staged.drop(lease)
        staged.settle()
        store.close()


def is_behind(moment: Mark | Copy, number: int) -> bool:
    """Whether a moment is later than the mark of this number."""
    if isinstance(moment, Mark):
        return moment.number >= number
    return any(is_behind(earlier, number) for earlier in moment.after)


def test_host_buffers_wait_for_their_copies() -> None:
    streams = LateStreams()
    buffers = HostBuffers(3 * 64, is_pinned=False)
    streams.host |= {storage(buffer): buffer.nbytes for buffer in buffers._buffers}
    found = torch.zeros(10, 8)
    for turn in range(10):
        buffers.begin()
        room = buffers.take(8, torch.float32).fill_(turn)
        buffers.used_until(streams.copy(room, found[turn], [streams.mark()]))
    buffers.close()
    assert torch.equal(found, torch.arange(10.0)[:, None].expand(10, 8))


def test_the_host_needs_none() -> None:
    assert streams_of(HOST) is None and streams_of(torch.device("meta")) is None


class Recorded:
    """A device module that says in which order its streams were asked for what."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = self.Stream("cpu", "computing")

    def Stream(self, device: object, name: str = "") -> SimpleNamespace:
        name = name or f"copies {sum('made' in line for line in self.said)}"
        self.said += ["made"] if "copies" in name else []
        return SimpleNamespace(name=name, wait_event=lambda event: self.said.append(f"{name} waits for {event.name}"))

    def Event(self) -> SimpleNamespace:
        event = SimpleNamespace(name="", query=lambda: False, synchronize=lambda: self.said.append("host waits"))

        def record(stream: SimpleNamespace) -> None:
            event.name = f"{stream.name} {len(self.said)}"
            self.said.append(f"{stream.name} records")

        event.record = record
        return event

    def current_stream(self, device: object) -> SimpleNamespace:
        return self.current

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_a_devices_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Recorded()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    streams = streams_of(torch.device("cuda", 0))
    assert isinstance(streams, DeviceStreams)
    source, into = torch.arange(3.0), torch.zeros(3)
    came = streams.copy(source, into, [streams.mark()])
    came.hold()
    came.wait()
    assert torch.equal(source, into) and not came.is_over()
    assert module.said == [
        "made",
        "made",
        "computing records",
        "copies 1 waits for computing 2",  # into host memory: the way back
        "copies 1 records",
        "computing waits for copies 1 4",
        "host waits",
    ]
