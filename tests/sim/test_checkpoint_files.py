"""What both kinds of checkpoint promise: damage is found, kills and full disks lose nothing, no file is believed.

Every test runs the checkpoints of `scripts/train.py`, of two ranks, and those of the engine, of one. The ranks are
threads; a kill is an exception after which nothing changes the file system any more (`scripts/faults/filesystem.py`).
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import random
import re
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from faults.filesystem import Died, Faults
from faults.hostile import Hostile, seal
from torch.distributed import checkpoint as dcp

from onebit.checkpoint import files
from onebit.checkpoint.files import CheckpointError
from onebit.comm import SimTransport, run_ranks
from onebit.comm.transports.base import PeerError
from onebit.zero import Checkpoints
from onebit.zero.checkpoint.tree import unpack

Content = tuple[int, float]
CPU = torch.device("cpu")


class Plain:
    """Of train.py, on two ranks."""

    ranks, advice = 2, "to resume from it, write its name into "

    def __init__(self, folder: Path, link: SimTransport, keep: int | None = None):
        from train.checkpoint import CheckpointFolder  # not for the engine's: an older package lacks what it imports

        self.files, self.rank = CheckpointFolder(folder, link, CPU, keep), link.rank

    def save(self, step: int, fill: float, elements: int = 20) -> None:
        self.files.save(step, {"x": torch.full((elements,), fill)}, {"y": torch.full((5,), fill + self.rank)})

    def load(self) -> Content | None:
        loaded = self.files.load()
        if loaded is None:
            return None
        shared, (own,) = loaded
        (fill,) = {float(x) for x in shared["x"]} | {float(y) - self.rank for y in own["y"]}
        return shared["step"], fill


class Zero:
    """Of the engine."""

    ranks, advice = 1, "load it with tag="

    def __init__(self, folder: Path, link: SimTransport, keep: int | None = None):
        self.files = Checkpoints(folder, link, keep)

    def save(self, step: int, fill: float, elements: int = 20) -> None:
        self.files.save(step, {"x": torch.full((elements,), fill)}, {"y": torch.full((5,), fill)})

    def load(self) -> Content | None:
        model = {"x": torch.full((20,), -1.0)}
        try:
            loaded = self.files.load(model)
        except CheckpointError:
            assert (model["x"] == -1.0).all()
            raise
        if loaded is None:
            return None
        (fill,) = {float(x) for x in model["x"]} | {float(y) for y in loaded.own[0]["y"]}
        return loaded.step, fill


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves is not tried here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


Kind = type[Plain] | type[Zero]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected pickle protocol")
both_kinds = pytest.mark.parametrize("kind", [Zero, Plain])


def on_ranks(kind: Kind, folder: Path, work: Callable[[Plain | Zero], object], keep: int | None = None) -> object:
    """What `work` returns, or the text of its CheckpointError: the same on all ranks."""

    def rank(link: SimTransport) -> object:
        try:
            return work(kind(folder, link, keep))
        except CheckpointError as error:
            return str(error)

    results = run_ranks(kind.ranks, rank)
    assert all(result == results[0] for result in results)
    return results[0]


def save(kind: Kind, folder: Path, *steps: int, fill: float | None = None, keep: int | None = None) -> str | None:
    """One new run saves after each of these steps. fill: what it saves; by default the step."""

    def work(checkpoints: Plain | Zero) -> None:
        for step in steps:
            checkpoints.save(step, float(step) if fill is None else fill)

    said = on_ranks(kind, folder, work, keep)
    assert said is None or isinstance(said, str)
    return said


def load(kind: Kind, folder: Path) -> Content | str | None:
    return on_ranks(kind, folder, lambda checkpoints: checkpoints.load())  # type: ignore[return-value]


def go_on(kind: Kind, folder: Path, step: int, keep: int | None = None) -> str | None:
    """A new process loads, and saves after that step."""

    def work(checkpoints: Plain | Zero) -> None:
        checkpoints.load()
        checkpoints.save(step, float(step))

    return on_ranks(kind, folder, work, keep)  # type: ignore[return-value]


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---------------------------------------------------------------- damage


@pytest.mark.slow
@both_kinds
def test_a_flipped_bit_anywhere_is_found_and_the_file_named(kind: Kind, tmp_path: Path) -> None:
    save(kind, tmp_path, 1, 2)
    chance = random.Random(0)
    for path in (tmp_path / "step_00000002").iterdir():
        content = path.read_bytes()
        for place in {0, len(content) - 1, *(chance.randrange(len(content)) for _ in range(20))}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            said = str(load(kind, tmp_path))
            assert said.startswith("rank ") and f"{path} is damaged" in said, (place, said)
            assert "; step_00000001 is whole: " in said
        path.write_bytes(content)
    assert load(kind, tmp_path) == (2, 2.0)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"step": 2, "world_size": 1})),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@both_kinds
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_an_error_on_all_ranks_that_offers_what_is_whole(kind: Kind, damage: str, tmp_path: Path) -> None:
    save(kind, tmp_path, 1, 2)
    for name in [path.name for path in (tmp_path / "step_00000002").iterdir()]:
        folder = tmp_path / f"after {name}"
        shutil.copytree(tmp_path, folder, ignore=lambda *_: [p.name for p in tmp_path.glob("after*")])
        path = folder / "step_00000002" / name
        DAMAGES[damage](path)
        said = str(load(kind, folder))
        assert said.startswith("rank ") and str(path) in said, said
        assert f"; step_00000001 is whole: {kind.advice}" in said, said


@both_kinds
def test_damage_that_checksums_do_not_show_is_an_error_too(kind: Kind, tmp_path: Path) -> None:
    """Files that were wrong when their checksums were taken."""
    save(kind, tmp_path, 1)
    contents = [b"", b"no pickle", pickle.dumps([1, 2]), b"\x80\x04\x8e" + b"\xff" * 8, b"PK\3\4" + bytes(400)]
    for name in [path.name for path in (tmp_path / "step_00000001").iterdir() if path.name != files.STAMP]:
        path = tmp_path / "step_00000001" / name
        whole = path.read_bytes()
        for content in contents:
            path.write_bytes(content)
            seal(path.parent)
            assert str(load(kind, tmp_path)).startswith("rank "), (name, content)
        path.write_bytes(whole)
    seal(path.parent)
    assert load(kind, tmp_path) == (1, 1.0)


@both_kinds
@pytest.mark.parametrize(
    "forged", [{"run": "../../elsewhere"}, {"world_size": 10**15}, {"world_size": -1}, {"step": "two"}, {"run": 3}]
)
def test_a_forged_stamp_leads_nowhere(kind: Kind, forged: dict, tmp_path: Path) -> None:
    save(kind, tmp_path, 1)
    seal(tmp_path / "step_00000001", **forged)
    assert str(load(kind, tmp_path)).startswith("rank 0: ")


@both_kinds
def test_nothing_in_a_checkpoint_is_run(kind: Kind, tmp_path: Path) -> None:
    save(kind, tmp_path, 1)
    mark, target = tmp_path / "it ran", tmp_path / "step_00000001"
    for name in [path.name for path in target.iterdir() if path.name != files.STAMP]:
        whole = (target / name).read_bytes()
        for forge in (
            lambda path: path.write_bytes(pickle.dumps(Hostile(mark))),
            lambda path: torch.save({"x": Hostile(mark)}, path.open("wb")),
            lambda path: torch.save(Hostile(mark), path.open("wb"), _use_new_zipfile_serialization=False),
        ):
            forge(target / name)
            seal(target)
            assert str(load(kind, tmp_path)).startswith("rank ") and not mark.exists(), name
        (target / name).write_bytes(whole)
    (target / files.STAMP).write_bytes(pickle.dumps(Hostile(mark)))
    (tmp_path / "latest").write_bytes(pickle.dumps(Hostile(mark)))
    assert "no checkpoint in" in str(load(kind, tmp_path)) and not mark.exists()


def test_an_object_in_torchs_own_form_is_refused(tmp_path: Path) -> None:
    """torch.distributed.checkpoint unpickles an entry that its table of contents calls bytes."""
    save(Zero, tmp_path, 1)
    mark, target = tmp_path / "it ran", tmp_path / "step_00000001"
    for path in target.iterdir():
        if path.name != files.STAMP:
            path.unlink()
    dcp.save({"model/x": Hostile(mark)}, storage_writer=dcp.FileSystemWriter(target))
    mark.rmdir() if mark.exists() else None
    seal(target)
    assert str(load(Zero, tmp_path)).startswith("rank 0: ") and not mark.exists()


@pytest.mark.parametrize(
    "text",
    ['{"dtype": "load"}', '{"dtype": "nn"}', '{"object": 1}', '{"tensor": 9}', "[[1", '{"dict": [[{"dict": []}, 1]]}'],
)
def test_packed_values_are_values_alone(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack(text, [torch.zeros(1)])


# ---------------------------------------------------------------- which one is loaded


@both_kinds
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"step_x", b"../../etc"])
def test_without_latest_the_newest_whole_one_is_loaded(
    kind: Kind, content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(kind, tmp_path, 1, 2, 3)
    (tmp_path / "latest").unlink() if content is None else (tmp_path / "latest").write_bytes(content)
    (tmp_path / "step_00000003" / files.STAMP).unlink()
    assert load(kind, tmp_path) == (2, 2.0)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        len(said) == 1
        and "latest" in said[0]
        and "taking step_00000002, the newest checkpoint that is whole" in said[0]
    )
    for name in ("step_00000001", "step_00000002"):
        (tmp_path / name / files.STAMP).unlink()
    assert f"no checkpoint in {tmp_path} is whole" in str(load(kind, tmp_path))


@both_kinds
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_gone", [False, True], ids=["never was", "was removed"])
def test_a_latest_that_names_nothing_is_the_newest_whole_one(
    kind: Kind, is_gone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(kind, tmp_path, 1, 2, 3)
    if is_gone:
        shutil.rmtree(tmp_path / "step_00000003")
    else:
        (tmp_path / "latest").write_text("step_00000009\n")
        (tmp_path / "step_00000003" / files.STAMP).unlink()
    assert load(kind, tmp_path) == (2, 2.0)
    named = "step_00000003" if is_gone else "step_00000009"
    assert f"{tmp_path / 'latest'} names {named}, which is not there; taking step_00000002" in caplog.text


@both_kinds
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_same_step", [False, True], ids=["of another step", "of another save"])
def test_a_stale_stamp_is_what_is_blamed(kind: Kind, is_same_step: bool, tmp_path: Path) -> None:
    save(kind, tmp_path, 1, 2)
    stamp = tmp_path / "step_00000002" / files.STAMP
    if is_same_step:
        save(kind, tmp_path / "other", 2, fill=7.0)
    shutil.copyfile(tmp_path / ("other/step_00000002" if is_same_step else "step_00000001") / files.STAMP, stamp)
    said = str(load(kind, tmp_path))
    told = "or stamp.json beside it is of another save" if is_same_step else f"{stamp} is damaged: .* it is of step 1"
    assert re.search(told, said) and "; step_00000001 is whole: " in said, said


@pytest.mark.slow
@both_kinds
def test_no_bit_of_latest_changes_without_a_word(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(kind, tmp_path, 2, 3)
    content = (tmp_path / "latest").read_bytes()
    for bit in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "latest").write_bytes(flipped)
        caplog.clear()
        found = load(kind, tmp_path)
        is_blank = flipped.strip() == content.strip()
        assert is_blank or isinstance(found, str) or "latest" in caplog.text, (flipped, found)


# ---------------------------------------------------------------- what is deleted


@both_kinds
def test_what_another_run_wrote_in_its_place_is_moved_aside(kind: Kind, tmp_path: Path) -> None:
    assert go_on(kind, tmp_path, 1) is None and go_on(kind, tmp_path, 2) is None
    (tmp_path / "step_00000002" / "stamp.json").write_text("of another program")
    (tmp_path / "latest").write_text("step_00000001\n")
    assert go_on(kind, tmp_path, 2) is None and load(kind, tmp_path) == (2, 2.0)
    (aside,) = tmp_path.glob("*aside*")
    assert aside.name[:19] == "step_00000002.aside"
    assert (aside / "stamp.json").read_text() == "of another program"


@both_kinds
def test_all_are_kept_or_the_last_few(kind: Kind, tmp_path: Path) -> None:
    save(kind, tmp_path / "all", 1, 2, 3, 4)
    save(kind, tmp_path / "two", 1, 2, 3, 4, keep=2)
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == ["latest", *(f"step_{k:08d}" for k in (1, 2, 3, 4))]
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["latest", "step_00000003", "step_00000004"]
    with pytest.raises(ValueError, match="keep must be at least 1, or None for all, got 0"):
        kind(tmp_path, SimTransport(), keep=0)


@both_kinds
def test_nothing_of_another_run_is_ever_deleted(kind: Kind, tmp_path: Path) -> None:
    save(kind, tmp_path, 5, 6)
    before = listing(tmp_path)
    (tmp_path / "latest").unlink()
    for step in (1, 6):
        said = save(kind, tmp_path, step, keep=1)
        assert (
            said is not None
            and f"holds step_00000006, which this run did not write and which is not older than its step {step}" in said
        )
    assert listing(tmp_path) == before - {"latest"}
    assert save(kind, tmp_path, 7, 8, keep=1) is None
    assert listing(tmp_path) >= before and not (tmp_path / "step_00000007").exists()


def test_a_load_that_failed_makes_no_checkpoint_this_runs_own(tmp_path: Path) -> None:
    save(Zero, tmp_path, 5, 6)
    before = listing(tmp_path)
    checkpoints = Checkpoints(tmp_path, SimTransport(), keep=1)
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoints.load({"x": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="which this run did not write"):
        checkpoints.save(6, {"x": torch.zeros(3)}, {})
    checkpoints.save(7, {"x": torch.zeros(3)}, {})
    assert listing(tmp_path) > before


@both_kinds
def test_a_resumed_run_keeps_the_last_few_of_both_its_lives(kind: Kind, tmp_path: Path) -> None:
    save(kind, tmp_path, 1, 2, keep=2)
    assert go_on(kind, tmp_path, 3, keep=2) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000003"]


@both_kinds
def test_a_run_that_went_back_leaves_the_newer_ones_and_says_so(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(kind, tmp_path, 1, 2, 4)
    (tmp_path / "latest").write_text("step_00000001\n")
    assert go_on(kind, tmp_path, 2, keep=1) is None
    assert sum("names step_00000001, but there is a newer step_00000004" in r.message for r in caplog.records) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000004"]
    assert load(kind, tmp_path) == (2, 2.0)


# ---------------------------------------------------------------- kills and full disks


@contextmanager
def interrupted(folder: Path, at: int, fault: str | int) -> Iterator[Faults]:
    with Faults(folder, at, fault) as faults:
        try:
            yield faults
        except (Died, PeerError):
            assert fault == "die"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "again"), [(Zero, False), (Plain, False), (Zero, True)])
def test_a_kill_at_any_call_loses_nothing(kind: Kind, again: bool, tmp_path: Path) -> None:
    """A run with keep=1 saves after its next step, or once more after its last one."""
    step = 1 if again else 2
    at, is_over, before = 0, False, tmp_path / "before"
    save(kind, before, 1, keep=1)
    while not is_over:
        folder = shutil.copytree(before, tmp_path / str(at))

        def work(checkpoints: Plain | Zero) -> None:
            checkpoints.load()
            checkpoints.save(step, 9.0)

        with interrupted(folder, at, "die") as faults:
            on_ranks(kind, folder, work, keep=1)
        is_over = not faults.has_struck
        where = faults.calls[min(at, len(faults.calls) - 1)]
        found = load(kind, folder)
        assert found in ((1, 1.0), (step, 9.0)), (where, found)
        assert found == (step, 9.0) or not is_over
        assert go_on(kind, folder, 3, keep=1) is None, where
        assert load(kind, folder) == (3, 3.0)
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000003"], where
        shutil.rmtree(folder)
        at += 1
    assert at > 20


@pytest.mark.slow
@both_kinds
def test_a_full_disk_at_any_call_is_an_error_and_leaves_nothing_behind(kind: Kind, tmp_path: Path) -> None:
    at, is_over, saved = 0, False, tmp_path / "saved"
    save(kind, saved, 1)
    before = listing(saved)
    while not is_over:
        folder = shutil.copytree(saved, tmp_path / str(at))

        def work(checkpoints: Plain | Zero) -> str:
            checkpoints.load()
            with pytest.raises(CheckpointError) as failure:
                checkpoints.save(2, 2.0)
            return str(failure.value)

        with interrupted(folder, at, errno.ENOSPC) as faults:
            try:
                said = str(on_ranks(kind, folder, work))
            except pytest.fail.Exception:
                assert not faults.has_struck
                break
        assert said.startswith("rank ") and "No space left on device: " in said, faults.calls[at]
        is_latest = any(call == "replace" for call, _, _ in (c.partition(" ") for c in faults.calls[:at]))
        assert load(kind, folder) == ((2, 2.0) if is_latest else (1, 1.0))
        left = {path for path in listing(folder) - before if not path.startswith("step_00000002")}
        assert not left, (faults.calls[at], left)
        assert (folder / "step_00000002").exists() <= ("rename" in "".join(faults.calls[: at + 1]))
        assert go_on(kind, folder, 2) is None and load(kind, folder) == (2, 2.0)
        shutil.rmtree(folder)
        at += 1
    assert at > 10


@both_kinds
def test_a_file_that_the_system_cuts_is_named(kind: Kind, tmp_path: Path) -> None:
    """In truth, with a limit on the size of files; torch says "unexpected pos" of that."""

    def work(checkpoints: Plain | Zero) -> None:
        checkpoints.save(1, 1.0)
        checkpoints.save(2, 2.0, elements=300_000)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        said = str(on_ranks(kind, tmp_path, work))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said.startswith("rank 0: File too large: ") and ".step_00000002." in said
    assert load(kind, tmp_path) == (1, 1.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


@both_kinds
def test_a_slow_rank_spoils_no_save_behind_its_own(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lingers where it names the latest and where it removes the oldest."""
    for module, name in ((os, "replace"), (shutil, "rmtree")):
        real = getattr(module, name)
        slow = lambda *args, real=real, **named: (time.sleep(0.03), real(*args, **named))  # noqa: E731
        monkeypatch.setattr(module, name, slow)
    assert save(kind, tmp_path, 1, 2, 3, 3, 4, keep=1) is None
    assert load(kind, tmp_path) == (4, 4.0)


# ---------------------------------------------------------------- who may read, and what is followed


@both_kinds
def test_nobody_else_can_read_what_is_saved(kind: Kind, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save(kind, tmp_path / "made" / "by us", 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "made").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


@both_kinds
def test_links_are_not_followed(kind: Kind, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    save(kind, folder, 1)
    for name in ("latest.tmp", ".latest.tmp", "step_00000002.tmp"):
        (folder / name).symlink_to(elsewhere / "file")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to(elsewhere / "file")
    for name in (".step_00000002.partial", "step_00000002"):
        (folder / name).symlink_to(elsewhere)
    (elsewhere / "file").write_text("step_00000001")
    assert go_on(kind, folder, 2) is None
    assert load(kind, folder) == (2, 2.0)
    assert listing(elsewhere) == {"file"} and (elsewhere / "file").read_text() == "step_00000001"


def test_a_folder_that_not_all_ranks_see_is_named(tmp_path: Path) -> None:
    def work(link: SimTransport) -> str:
        from train.checkpoint import CheckpointFolder

        checkpoints = CheckpointFolder(tmp_path / str(link.rank), link, CPU)
        with pytest.raises(CheckpointError) as failure:
            checkpoints._begin(1, is_shared=True)
        return str(failure.value)

    said = run_ranks(2, work)
    assert all(f"rank 1 does not see files that rank 0 makes in {tmp_path / str(k)}" in said[k] for k in (0, 1))
    assert listing(tmp_path) == {"0"}
