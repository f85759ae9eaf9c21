"""Count the reader's way: what a step, a configuration passes through; how the code is cut; circles; volume.

    python scripts/count_house.py                                        (--record FILE: a row more in its tables)
    python scripts/count_house.py --list "initialize, stage 0"           (the files of a walk, with their functions)

A walk is traced: every call of a function of the package, made by whoever. *Files* and *functions* are those entered
(lambdas and comprehensions included); a *hop* is a call from one file of the package straight into another. The counts
are a thermometer. What they are for: a reader can say what a step does, in order, and where to change it.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from provenance import record_path, revision, write_record

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("onebit", "comm", "zero")
ROOMS = (*PACKAGES, "scripts", "tests")
DIALECT = r"(?i)\b(?:behind|owes?|owed|owing|alike|somebody|everybody|is to be had|of its own|lies|so many)\b"
"""Words of CONTRIBUTING's list that have a plainer one, in docstrings and Markdown. A hint: some uses are right."""
NO_COMMENT = r"# (?:type: ignore|noqa|fmt:|-{8})"

Counts = dict[str, int | float]


# ---------------------------------------------------------------- walks


class Walk:
    """The calls of what runs between `with` and its end, on this thread."""

    def __init__(self, tree: Path):
        self._tree, self._names = tree.resolve(), dict[str, str | None]()
        self.functions, self.hops = dict[str, Counter[CodeType]](), 0  # calls, by file in the order of first visits

    def __enter__(self) -> Walk:
        sys.setprofile(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _file_of(self, code: CodeType) -> str | None:
        """The file inside the package, None for others."""
        name = code.co_filename
        if name not in self._names:
            path = Path(name).resolve()
            inside = path.relative_to(self._tree) if path.is_relative_to(self._tree) else None
            self._names[name] = str(inside) if inside is not None and inside.parts[0] in PACKAGES else None
        return self._names[name]

    def _call(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (file := self._file_of(frame.f_code)) is None:
            return
        caller = None if frame.f_back is None else self._file_of(frame.f_back.f_code)
        self.functions.setdefault(file, Counter())[frame.f_code] += 1
        self.hops += caller is not None and caller != file

    def counts(self) -> Counts:
        functions = sum(len(calls) for calls in self.functions.values())
        return {"files": len(self.functions), "functions": functions, "hops": self.hops}

    def listing(self) -> str:
        """A line for each file, in the order of first visits: its functions, with the number of calls."""
        lines = []
        for file, calls in self.functions.items():
            names = Counter[str]()
            for code, count in calls.items():
                names[code.co_name] += count
            lines.append(f"{file}: " + ", ".join(f"{name} {count}" for name, count in names.items()))
        return "\n".join(lines)


def walk_step(tree: Path, make: Callable[..., Any], **options: object) -> Walk:
    """The twelfth step, backward included, of a model in two buckets, on the first of two simulated ranks.

    make: gives the optimizer, of parameters, `lr`, `bucket_cap_mb`, `transport` and these options.
    """
    import torch

    from onebit.comm import SimTransport, run_ranks
    from onebit.comm.transports.simulated import SimNetwork

    class PromptNetwork(SimNetwork):
        """Every operation is decided once it is launched.

        On a plain SimNetwork the threads' timing is part of the counts: `collect` looks for dead peers only if it has
        to wait, and the driver asks an operation that is not ready once more.
        """

        def post(self, operation: Any, rank: int, data: torch.Tensor) -> None:
            super().post(operation, rank, data)
            while not self.is_decided(operation):
                time.sleep(1e-4)

    network = PromptNetwork(2)

    def rank(plain: SimTransport) -> Walk:
        try:
            return walk(SimTransport(network, plain.rank))
        finally:
            network.leave(plain.rank)

    def walk(transport: SimTransport) -> Walk:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        cap = 64 * 66 * 4 / 2**20
        optimizer = make(model.parameters(), lr=1e-3, bucket_cap_mb=cap, transport=transport, **options)
        for _ in range(11):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        with Walk(tree) as walked:
            loss.backward()
            optimizer.step()
        return walked

    return run_ranks(2, rank)[0]


def walk_engine(tree: Path) -> dict[str, Walk]:
    """`initialize` of the plainest JSON on one rank, and a step of that engine at stages 0 and 2."""
    import torch

    from onebit import zero

    found = {}
    for stage in (0, 0, 2):  # the first one imports, which is no part of the walk
        config = {
            "train_batch_size": 8,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
        }
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        with Walk(tree) as walk:
            engine, *_ = zero.initialize(model=model, config=config)
        if stage == 0:
            found["initialize, stage 0"] = walk
        for _ in range(3):
            with Walk(tree) as walk:
                engine.backward(engine(torch.randn(8, 64)).square().mean())
                engine.step()
        found[f"a step of the engine, stage {stage}"] = walk
        engine.close()
    return found


def walks(tree: Path) -> dict[str, Walk]:
    import torch

    import onebit
    from onebit.zero import ShardedOnebitAdam

    def local_steps(params: Iterable[torch.nn.Parameter], *, lr: float, **options: Any) -> onebit.LocalSteps:
        return onebit.LocalSteps(torch.optim.AdamW(params, lr=lr), **options)

    return {
        "a step of OnebitAdam": walk_step(tree, onebit.OnebitAdam, compression="always", freeze_step=4),
        "of OnebitLamb": walk_step(tree, onebit.OnebitLamb, compression="always", freeze_step=4),
        "of ZeroOneAdam": walk_step(tree, onebit.ZeroOneAdam, compression="always"),
        "of ShardedOnebitAdam": walk_step(tree, ShardedOnebitAdam, warmup_steps=4),
        "of LocalSteps, at a round": walk_step(tree, local_steps, every=4),
        **walk_engine(tree),
    }


# ---------------------------------------------------------------- the text


def python_files(tree: Path, *rooms: str) -> Iterator[Path]:
    """Without what links lead to: `onebit/comm` is `comm`."""
    for room in rooms:
        for path in sorted((tree / room).rglob("*.py")):
            inside = path.relative_to(tree / room)
            if not any((tree / room).joinpath(*inside.parts[: k + 1]).is_symlink() for k in range(len(inside.parts))):
                yield path


def count_shape(tree: Path) -> Counts:
    """How the package is cut: lines, functions, their median length, those of one statement, comments, dialect."""
    lengths, single, lines, comments, dialect = [], 0, 0, 0, 0
    for path in python_files(tree, *PACKAGES):
        text = path.read_text()
        lines += len(text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(t.type == tokenize.COMMENT and not re.match(NO_COMMENT, t.string) for t in tokens)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                single += sum(not is_docstring(statement) for statement in node.body) == 1
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                dialect += len(re.findall(DIALECT, ast.get_docstring(node) or ""))
    pages = [tree / "README.md", *sorted((tree / "docs").glob("*.md"))]
    return {
        "lines": lines,
        "functions per 1,000 lines": round(1000 * len(lengths) / max(1, lines), 1),
        "median lines of a function": statistics.median(lengths or [0]),
        "% of one statement": round(100 * single / max(1, len(lengths)), 1),
        "comments, % of lines": round(100 * comments / max(1, lines), 2),
        "circles": len(circles(tree)),
        "dialect in docstrings": dialect,
        "in docs": sum(len(re.findall(DIALECT, page.read_text())) for page in pages if page.exists()),
        "lines of scripts": sum(len(p.read_text().splitlines()) for p in python_files(tree, "scripts")),
        "of tests": sum(len(p.read_text().splitlines()) for p in python_files(tree, "tests")),
    }


def is_docstring(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text and isinstance(statement.value.value, str)


def circles(tree: Path) -> list[list[str]]:
    """Groups of modules that import each other, those for type checkers and those inside functions included."""
    modules = {}
    for path in python_files(tree, *PACKAGES):
        parts = path.relative_to(tree).with_suffix("").parts
        name = ".".join(parts if parts[0] == "onebit" else ("onebit", *parts))
        modules[name.removesuffix(".__init__")] = path
    return components({name: imports(name, path, modules) for name, path in modules.items()})


def imports(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules that a file names in an import anywhere. An `__init__` that names its own modules counts as none."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                found.add(f"{source}.{alias.name}" if f"{source}.{alias.name}" in modules else source)
    return {other for other in found if other in modules and other != name and path.name != "__init__.py"}


def components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node: whoever reaches each other."""

    def reached(start: str) -> set[str]:
        seen, todo = set[str](), [start]
        while todo:
            for other in graph[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    of = {name: reached(name) for name in graph}
    groups = {tuple(sorted(other for other in of[name] if name in of[other])) for name in graph if name in of[name]}
    return [list(group) for group in sorted(groups)]


# ---------------------------------------------------------------- the command


def with_row(record: str, found: Mapping[str, Counts], when: str) -> str:
    """The record with a row more in the table under each of its headings; a new table where there is none."""
    for title, counts in found.items():
        head, row = f"## {title}\n", f"| {' | '.join([when, *map(str, counts.values())])} |\n"
        if head in record:
            before, after = record.split(head, 1)
            table, rest = re.match(r"(\n*(?:\|[^\n]*\n)+)(.*)", after, re.DOTALL).groups()  # type: ignore[union-attr]
            record = f"{before}{head}{table}{row}{rest}"
        else:
            columns = ["revision", *counts]
            rule = "| --- |" + " ---: |" * len(counts)
            record += f"\n{head}\n| {' | '.join(columns)} |\n{rule}\n{row}"
    return record


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", type=record_path, metavar="FILE", help="add a row to the tables of this file")
    parser.add_argument("--list", metavar="WALK", help="print the files of this walk and their functions instead")
    args = parser.parse_args(argv)
    taken = walks(ROOT)
    if args.list is not None:
        if args.list not in taken:
            parser.error(f"there is no walk {args.list!r}; there are: {'; '.join(taken)}")
        print(taken[args.list].listing())
        return 0
    found = {"The text": count_shape(ROOT), **{name: walk.counts() for name, walk in taken.items()}}
    print(json.dumps({**found, "circles": circles(ROOT)}, indent=2))
    if args.record is not None:
        before = args.record.read_text() if args.record.exists() else "# The house: its counts, revision by revision\n"
        write_record(args.record, with_row(before, found, f"{date.today():%Y-%m-%d} {revision()}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
