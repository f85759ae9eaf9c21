"""Which tree a number comes from, and the rule of `records/`: a record names a commit that anyone can check out.

A script that can write there takes such files by `record_path`, which refuses before anything is measured, and writes
them by `write_record` or after `refuse_dirty_tree`, which refuse where files were edited meanwhile. Standard library
alone.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path("scripts", "records")
COMPILED = ("comm/kernels/_kernels.so", "onebit/host/_host.so")
_NAMED = 3


class DirtyTreeError(RuntimeError):
    """A record was to be written of a tree that is no commit."""


def refuse_dirty_tree(path: Path, root: Path = ROOT) -> None:
    """Raise DirtyTreeError if path is a record and a tracked file differs from the commit; other paths are free.

    Records themselves may differ: a run adds to them line by line, and no number comes from them.
    """
    if not path.resolve().is_relative_to((root / RECORDS).resolve()):
        return
    try:
        changed = changed_files(root)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DirtyTreeError(f"{path} is a record, and {root} is no git checkout; write it elsewhere") from error
    if changed:
        names = ", ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else "")
        raise DirtyTreeError(
            f"{path} is a record, and a record names a commit, but {names} differ from it; commit or stash them, or "
            f"write outside {RECORDS}"
        )


def record_path(text: str) -> Path:
    """For argparse's `type`: the path of a file that may be a record. Refuses as `refuse_dirty_tree`."""
    path = Path(text)
    try:
        refuse_dirty_tree(path)
    except DirtyTreeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def add_record(parser: argparse.ArgumentParser, about: str = "write the report there, in Markdown") -> None:
    """Add --record, a file that may be a record."""
    parser.add_argument("--record", type=record_path, metavar="FILE", help=about)


def check_record(parser: argparse.ArgumentParser, path: Path) -> None:
    """End the command, as a wrong argument does, where `refuse_dirty_tree` refuses this path."""
    try:
        refuse_dirty_tree(path)
    except DirtyTreeError as error:
        parser.error(str(error))


def write_record(path: Path, text: str, *raw: Path) -> None:
    """Write a text that may be a record. Raises DirtyTreeError as `refuse_dirty_tree`.

    raw: files of JSON lines that the text was made from. They stay out of git's history; the text names their digests.
    """
    refuse_dirty_tree(path)
    for file in raw:
        lines = file.read_bytes()
        text += f"\nRaw lines: {file.name}, {len(lines):,} bytes, sha256 {hashlib.sha256(lines).hexdigest()}.\n"
    path.write_text(text)


def changed_files(root: Path = ROOT) -> list[str]:
    """Tracked files outside the records that differ from the commit. Raises CalledProcessError outside a checkout."""
    kept_apart = f":(exclude){RECORDS.as_posix()}"
    return [line[3:] for line in _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", kept_apart)]


@cache
def revision() -> str:
    """The commit, with a + where tracked files outside the records differ from it; "unknown" outside a checkout."""
    try:
        (commit,) = _git(ROOT, "rev-parse", "--short", "HEAD")
        return commit + ("+" if changed_files() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A work tree of a revision, in a temporary folder. Its libraries are this tree's if these have the same source."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _git(ROOT, "worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            source = ["git", "-C", str(ROOT), "diff", "--quiet", revision, "--", "csrc", "setup.py"]
            if subprocess.run(source).returncode == 0:
                for name in COMPILED:
                    if (ROOT / name).exists():
                        shutil.copy(ROOT / name, tree / name)
            else:
                build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
                subprocess.run(build, cwd=tree, check=True, capture_output=True)
            yield tree
        finally:
            _git(ROOT, "worktree", "remove", "--force", str(tree))


def _git(root: Path, *words: str) -> list[str]:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
