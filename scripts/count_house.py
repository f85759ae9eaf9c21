"""Count what makes a tree easy or hard to live in: hops of one step, class ladders, rooms, long files and functions.

    python scripts/count_house.py              (--json FILE: also into a file)

Counts of structure are read from the source, those of a step from a traced run: one rank, one compressed step of a
small model in two buckets, every call from one file of the package to another.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from provenance import record_path, write_record

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("onebit", "comm", "zero", "scripts", "tests")
PACKAGES = ROOMS[:3]
LONG_FUNCTION = 60
EXAMPLES = {
    "codec int4": r"\bint4\b|Int4",
    "backend cupy": r"\bcupy\b|Cupy",
    "optimizer 1-bit LAMB": r"[Oo]ne_?[Bb]it_?[Ll]amb|onebit-lamb",
}
"""Of each kind of part one, by a pattern that its files name it with: how many files an addition touches."""


def python_files(tree: Path, *rooms: str) -> Iterator[Path]:
    for room in rooms:
        for path in sorted((tree / room).rglob("*.py")):
            inside = path.relative_to(tree / room)
            if not any((tree / room).joinpath(*inside.parts[: k + 1]).is_symlink() for k in range(len(inside.parts))):
                yield path


def count_files(tree: Path) -> dict[str, object]:
    """Files by room, the fullest folders, the longest files, the functions over LONG_FUNCTION lines."""
    paths = list(python_files(tree, *ROOMS))
    folders = Counter(str(path.parent.relative_to(tree)) for path in paths)
    lengths = {str(path.relative_to(tree)): len(path.read_text().splitlines()) for path in paths}
    rooms = {room: sum(name.split("/")[0] == room for name in lengths) for room in ROOMS}
    long = {f"{name}: {function}": lines for name, function, lines in _long_functions(tree, paths)}
    return {
        "files": rooms,
        "lines": {room: sum(n for name, n in lengths.items() if name.split("/")[0] == room) for room in ROOMS},
        "most files in one folder": dict(folders.most_common(5)),
        "longest files": dict(sorted(lengths.items(), key=lambda item: -item[1])[:5]),
        f"functions over {LONG_FUNCTION} lines": long,
    }


def _long_functions(tree: Path, paths: Sequence[Path]) -> Iterator[tuple[str, str, int]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef)
                and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONG_FUNCTION
            ):
                yield str(path.relative_to(tree)), node.name, lines


def count_touches(tree: Path) -> dict[str, int]:
    """How many source files outside the tests name each of EXAMPLES."""
    paths = list(python_files(tree, *PACKAGES, "scripts"))
    return {name: sum(bool(re.search(pattern, p.read_text())) for p in paths) for name, pattern in EXAMPLES.items()}


class Trace:
    """The calls of a step between files of the package."""

    def __init__(self, tree: Path):
        self._tree = str(tree.resolve())
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        of = frame if event == "call" else frame.f_back
        if of is None:
            return
        path = str(Path(of.f_code.co_filename).resolve())
        if path.startswith(self._tree) and path[len(self._tree) + 1 :].split("/")[0] in PACKAGES:
            name = path[len(self._tree) + 1 :]
            if not self.files or self.files[-1] != name:
                self.files.append(name)


def count_step(tree: Path, make: Callable[..., Any], **options: object) -> dict[str, int]:
    """Files and hops between them of one compressed step, and the switches within the files of its own classes.

    make: the optimizer, or a function that makes one, of parameters, `lr`, `bucket_cap_mb` and these options. The
    step that is counted is the twelfth.
    """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = make(model.parameters(), lr=1e-3, bucket_cap_mb=64 * 66 * 4 / 2**20, **options)
    batch, trace = torch.randn(8, 64), Trace(tree)
    for step in range(12):
        if step == 11:
            sys.setprofile(trace)
        model(batch).square().mean().backward()
        optimizer.step()
        if step == 11:
            sys.setprofile(None)
        optimizer.zero_grad()
    ladder = _ladder_files(tree, type(optimizer))
    own = [name for name in trace.files if name in ladder]
    return {
        "files": len(set(trace.files)),
        "hops": len(trace.files) - 1,
        "switches in its class ladder": sum(a != b for a, b in itertools.pairwise(own)),
        **count_class(tree, type(optimizer)),
        "attributes": len(vars(optimizer)),
    }


def count_class(tree: Path, kind: type) -> dict[str, int]:
    ladder = [c for c in kind.__mro__ if _file_of(tree, c) is not None]
    methods = [
        {name for name, value in vars(c).items() if callable(value) or isinstance(value, property)} for c in ladder
    ]
    methods = [{name for name in each if not (name.startswith("__") and name != "__init__")} for each in methods]
    overrides = sum(
        name in later for k, each in enumerate(methods) for name in each for later in methods[k + 1 : k + 2]
    )
    return {"levels": len(ladder), "methods": sum(map(len, methods)), "overrides": overrides}


def _ladder_files(tree: Path, kind: type) -> set[str]:
    return {name for c in kind.__mro__ if (name := _file_of(tree, c)) is not None}


def _file_of(tree: Path, kind: type) -> str | None:
    try:
        path = Path(inspect.getfile(kind)).resolve()
    except (TypeError, OSError):
        return None
    rooms = [tree.resolve() / package for package in PACKAGES]  # an environment may lie in the tree, too
    return str(path.relative_to(tree.resolve())) if any(path.is_relative_to(room) for room in rooms) else None


def count_steps(tree: Path) -> dict[str, dict[str, int]]:
    import torch

    import onebit

    def local_steps(params: Iterable[torch.nn.Parameter], *, lr: float, **options: Any) -> onebit.LocalSteps:
        return onebit.LocalSteps(torch.optim.AdamW(params, lr=lr), **options)

    return {
        "OnebitAdam": count_step(tree, onebit.OnebitAdam, compression="always", freeze_step=4),
        "OnebitLamb": count_step(tree, onebit.OnebitLamb, compression="always", freeze_step=4),
        "ZeroOneAdam": count_step(tree, onebit.ZeroOneAdam, compression="always"),
        "LocalSteps, between rounds": count_step(tree, local_steps, every=8),
        "LocalSteps, a round": count_step(tree, local_steps, every=4),
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=record_path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    found = {**count_files(ROOT), "files that name": count_touches(ROOT), "one step": count_steps(ROOT)}
    print(json.dumps(found, indent=2))
    if args.json is not None:
        write_record(args.json, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
