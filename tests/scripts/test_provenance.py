"""A record names a commit: no script writes one while a tracked file differs from it."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import provenance
import pytest
from provenance import ROOT, DirtyTreeError, changed_files, refuse_dirty_tree, write_record

RECORD = ROOT / "scripts/records/never_2026-11.md"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit with a source and a record."""
    tree = tmp_path / "tree"
    records = tree / "scripts/records"
    records.mkdir(parents=True)
    (tree / "source.py").write_text("x = 1\n")
    (records / "old.md").write_text("1.0 s\n")
    names = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "."], [*names, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tree), *words], check=True)
    return tree


def test_a_record_of_a_commit_may_be_written(checkout: Path) -> None:
    refuse_dirty_tree(checkout / "scripts/records/new.md", checkout)


def test_a_changed_source_stands_in_the_way_of_records_alone(checkout: Path) -> None:
    (checkout / "source.py").write_text("x = 2\n")
    assert changed_files(checkout) == ["source.py"]
    for name in ("new.md", "old.md", "../records/new.jsonl"):
        with pytest.raises(DirtyTreeError, match=r"source\.py differ.*commit or stash"):
            refuse_dirty_tree(checkout / "scripts/records" / name, checkout)
    refuse_dirty_tree(checkout / "runs/new.md", checkout)


@pytest.mark.parametrize("staged", [False, True])
def test_staged_changes_count_and_new_files_do_not(checkout: Path, staged: bool) -> None:
    (checkout / "new.py").write_text("y = 1\n")
    if staged:
        subprocess.run(["git", "-C", str(checkout), "add", "new.py"], check=True)
    assert changed_files(checkout) == (["new.py"] if staged else [])


def test_a_record_that_grows_line_by_line_is_no_change(checkout: Path) -> None:
    (checkout / "scripts/records/old.md").write_text("1.0 s\n2.0 s\n")
    refuse_dirty_tree(checkout / "scripts/records/old.md", checkout)


def test_many_changes_are_counted(checkout: Path) -> None:
    for k in range(5):
        (checkout / f"s{k}.py").write_text("")
    subprocess.run(["git", "-C", str(checkout), "add", "."], check=True)
    with pytest.raises(DirtyTreeError, match=r"s0\.py, s1\.py, s2\.py and 2 more differ"):
        refuse_dirty_tree(checkout / "scripts/records/new.md", checkout)


def test_outside_a_checkout_there_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "scripts/records").mkdir(parents=True)
    with pytest.raises(DirtyTreeError, match="no git checkout"):
        refuse_dirty_tree(tmp_path / "scripts/records/new.md", tmp_path)


def test_a_record_names_the_digest_of_its_raw_lines(tmp_path: Path) -> None:
    raw = tmp_path / "runs.jsonl"
    raw.write_bytes(b'{"loss": 1.0}\n')
    write_record(tmp_path / "new.md", "text\n", raw)
    digest = hashlib.sha256(raw.read_bytes()).hexdigest()
    assert (tmp_path / "new.md").read_text() == f"text\n\nRaw lines: runs.jsonl, 14 bytes, sha256 {digest}.\n"


COMMANDS: dict[str, tuple[str, Sequence[str]]] = {
    "bench.py collective": ("bench.collective", ["--record", str(RECORD)]),
    "bench.py host_adam": ("bench.host_adam", ["--record", str(RECORD)]),
    "bench.py kernels": ("bench.kernels", ["--record", str(RECORD)]),
    "bench.py memory": ("bench.memory", ["--record", str(RECORD)]),
    "bench.py offload": ("bench.offload", ["--record", str(RECORD)]),
    "bench.py offload_gpu": ("bench.offload_gpu", ["--record", str(RECORD)]),
    "bench.py local_rounds": ("bench.local_rounds", ["--record", str(RECORD)]),
    "bench.py pipeline": ("bench.pipeline", ["--record", str(RECORD)]),
    "bench.py traffic": ("bench.traffic", ["--record", str(RECORD)]),
    "bench.py zero_memory": ("bench.zero_memory", ["--record", str(RECORD)]),
    "count_house.py": ("count_house", ["--record", str(RECORD)]),
    "demo.py": ("demo", ["--quick", "--write"]),
    "examples.py": ("examples", ["--write"]),
    "faults.py": ("faults.main", ["--report-only", "--record", str(RECORD)]),
    "faults.py, its lines": ("faults.main", ["--results", str(RECORD)]),
    "gpu_check.py": ("gpu_check.main", ["--rehearse", "--record", str(RECORD)]),
    "same_bits.py": ("same_bits", ["HEAD", "--record", str(RECORD)]),
    "study.py": ("study.main", ["--record", str(RECORD)]),
    "study.py, its lines": ("study.main", ["--results", str(RECORD)]),
    "bench.py sparse_attention": ("bench.sparse_attention", ["--record", str(RECORD)]),
    "train.py corpus": ("train.corpus", ["--manifest", str(RECORD)]),
    "train.py plot": ("train.plot", ["a.csv", "--out", str(RECORD)]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_script_refuses_before_it_measures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provenance, "changed_files", lambda root=ROOT: ["zero/plan.py"])
    module, words = COMMANDS[name]
    main: Callable[[Sequence[str]], object] = import_module(module).main
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    assert "a record names a commit, but zero/plan.py differ from it" in capsys.readouterr().err
    assert not RECORD.exists()


def test_what_is_edited_meanwhile_is_seen_when_the_record_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from reports import append

    monkeypatch.setattr(provenance, "changed_files", lambda root=ROOT: ["zero/plan.py"])
    for write in (lambda: write_record(RECORD, "text"), lambda: append(RECORD, {"what": "step"})):
        with pytest.raises(DirtyTreeError):
            write()
    assert not RECORD.exists()


def test_no_script_takes_a_record_without_the_rule() -> None:
    taking = re.compile(r'"--(?:record|results)",\s+type=(\w+)')
    found = {path: set(taking.findall(path.read_text())) for path in (ROOT / "scripts").rglob("*.py")}
    reading_alone = {"Path"}  # --results, which --report-only reads: checked where it does not
    for path, types in found.items():
        assert types <= {"record_path"} or (
            types <= {"record_path"} | reading_alone and "check_record" in path.read_text()
        )
    assert sum("add_record(" in path.read_text() or bool(types) for path, types in found.items()) >= 12


def test_a_revision_says_whether_files_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    provenance.revision.cache_clear()
    for changed, mark in (([], ""), (["zero/plan.py"], "+")):
        monkeypatch.setattr(provenance, "changed_files", lambda root=ROOT, c=changed: c)
        commit = provenance.revision().removesuffix("+")
        assert provenance.revision() == commit + mark and len(commit) >= 7
        provenance.revision.cache_clear()
