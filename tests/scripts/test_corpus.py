"""The corpus is the same bytes wherever the same files are, and its manifest tells where they are not."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from train.corpus import first_difference, is_validation, manifest_of, read_corpus

COMMITTED = Path(__file__).parents[2] / "scripts" / "records" / "corpus_cpython-3.11.7.json"


def write_library(root: Path, paths: list[str]) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"# {path}\n")
    return root


MODULES = [f"{folder}module_{k}.py" for folder in ("", "package/", "package/inner/") for k in range(40)]


def test_same_files_give_same_bytes_in_any_order_of_creation(tmp_path: Path) -> None:
    one = read_corpus(write_library(tmp_path / "one", MODULES))
    other = read_corpus(write_library(tmp_path / "other", MODULES[::-1]))
    assert (one.train, one.validation, one.sha256) == (other.train, other.validation, other.sha256)


def test_split_is_a_partition_decided_by_path(tmp_path: Path) -> None:
    corpus = read_corpus(write_library(tmp_path, MODULES))
    held_out = [path for path in sorted(MODULES) if is_validation(path)]
    assert corpus.validation == b"".join(f"# {path}\n".encode() for path in held_out)
    assert corpus.train == b"".join(f"# {path}\n".encode() for path in sorted(MODULES) if path not in held_out)
    assert 0 < len(held_out) < len(MODULES) // 5


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    left_out = ["test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "_sysconfigdata_x.py"]
    corpus = read_corpus(write_library(tmp_path, ["json/decoder.py", *left_out]))
    assert [file.path for file in corpus.files] == ["json/decoder.py"]


def test_library_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.py file under"):
        read_corpus(tmp_path)


def test_manifest_names_the_first_file_that_differs(tmp_path: Path) -> None:
    library = write_library(tmp_path / "library", MODULES)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest_of(read_corpus(library)))
    assert first_difference(read_corpus(library), manifest) is None

    (library / "package/module_7.py").write_text("# edited\n")
    assert "package/module_7.py differs (9 bytes here" in str(first_difference(read_corpus(library), manifest))
    (library / "package/module_5.py").unlink()
    assert "package/module_5.py is missing" in str(first_difference(read_corpus(library), manifest))
    (library / "added.py").write_text("")
    assert "added.py is not in the manifest" in str(first_difference(read_corpus(library), manifest))


def test_manifest_holds_the_hash_of_the_whole(tmp_path: Path) -> None:
    corpus = read_corpus(write_library(tmp_path, MODULES))
    manifest = json.loads(manifest_of(corpus))
    assert manifest["sha256"] == corpus.sha256
    assert manifest["train"] + manifest["validation"] == sum(size for size, _ in manifest["files"].values())


def test_committed_manifest_is_that_of_this_library() -> None:
    if platform.python_implementation() != "CPython" or platform.python_version() != "3.11.7":
        pytest.skip("the committed manifest is CPython 3.11.7's; run under that version")
    assert first_difference(read_corpus(), COMMITTED) is None


def test_validation_is_about_a_twentieth_of_this_library() -> None:
    corpus = read_corpus()
    assert 0.02 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.10
