"""The text the scripts train on: the source of Python's own standard library, byte by byte.

Every machine that runs this repository has it, so nothing is downloaded. `read_corpus` gives the bytes, split into
training and validation text by a hash of each file's path; a manifest (`--manifest FILE` writes one) pins them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from provenance import record_path, write_record

VALIDATION_SHARE = 0.05
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "pydoc_data"}
_TESTS = {"test", "tests", "idle_test"}
_WRITTEN_BY_THE_BUILD = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class TextFile:
    """One file of the corpus; `path` is relative to the library's root and has forward slashes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """The text, and the list of files it was read from."""

    train: bytes
    validation: bytes
    files: tuple[TextFile, ...]
    python: str

    @property
    def sha256(self) -> str:
        """One hash for the whole: of all paths, sizes and hashes, in order."""
        lines = "".join(f"{file.path} {file.size} {file.sha256}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()


def read_corpus(root: Path | None = None) -> Corpus:
    """The corpus under `root` (default: this interpreter's standard library), files in the order of their paths.

    Raises FileNotFoundError where there is no source there, as with a zipped library.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files: list[TextFile] = []
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(_source_files(root)):
        text = (root / path).read_bytes()
        files.append(TextFile(path, len(text), hashlib.sha256(text).hexdigest()))
        parts[is_validation(path)].append(text)
    if not files:
        raise FileNotFoundError(f"no .py file under {root}; a Python that carries its library as source is needed")
    return Corpus(b"".join(parts[False]), b"".join(parts[True]), tuple(files), platform.python_version())


def is_validation(path: str) -> bool:
    """Whether a file is held out: a function of its path alone, so that an edit or a new file moves no other."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") < VALIDATION_SHARE * 2**32


def manifest_of(corpus: Corpus) -> str:
    """The corpus's manifest: JSON, one file per line."""
    header = {"python": corpus.python, "sha256": corpus.sha256, "train": len(corpus.train)}
    header["validation"] = len(corpus.validation)
    lines = ",\n".join(f"{json.dumps(file.path)}:[{file.size},{json.dumps(file.sha256)}]" for file in corpus.files)
    return f'{json.dumps(header)[:-1]}, "files":{{\n{lines}\n}}}}\n'


def first_difference(corpus: Corpus, manifest: Path) -> str | None:
    """How the corpus differs from a manifest, in one sentence that names the first such file; None if it does not."""
    pinned = json.loads(manifest.read_text())
    difference = _first_difference({file.path: file for file in corpus.files}, pinned["files"])
    if difference is None:
        return None
    return f"the text here (Python {corpus.python}) is not that of {manifest} (Python {pinned['python']}): {difference}"


def _first_difference(present: dict[str, TextFile], pinned: dict[str, list]) -> str | None:
    for path in sorted(pinned.keys() | present.keys()):
        if path not in present:
            return f"{path} is missing"
        if path not in pinned:
            return f"{path} is not in the manifest"
        size, sha256 = pinned[path]
        if (present[path].size, present[path].sha256) != (size, sha256):
            return f"{path} differs ({present[path].size} bytes here, {size} in the manifest)"
    return None


def _source_files(root: Path) -> Iterator[str]:
    """The paths, relative to root, of the library's own modules: no tests, nothing that a build writes."""
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        if (_NOT_SOURCE | _TESTS) & set(folders) or any(folder.startswith("config-") for folder in folders):
            continue
        if not path.name.startswith(_WRITTEN_BY_THE_BUILD):
            yield relative.as_posix()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="train.py corpus", description="Describe the training text, and write its manifest."
    )
    parser.add_argument("--manifest", type=record_path, metavar="FILE", help="write the manifest here")
    args = parser.parse_args(argv)
    corpus = read_corpus()
    if args.manifest is not None:
        write_record(args.manifest, manifest_of(corpus))
    print(
        f"Python {corpus.python}: {len(corpus.files)} files, {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} held out, sha256 {corpus.sha256}"
    )
