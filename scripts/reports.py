"""What benchmarks and studies share to report: runs as JSON lines, each run once; tables, gaps and panels; --record.

All rooms may import it. Of the package it needs nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from provenance import refuse_dirty_tree, write_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Job = TypeVar("Job", bound=Hashable)

# ---------------------------------------------------------------- runs


def read_lines(path: Path | None) -> list[dict]:
    """The records of a file of JSON lines; none without a file. A line that a crash cut short is passed over."""
    lines = []
    for text in path.read_text().splitlines() if path is not None and path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append(path: Path, *records: dict) -> None:
    """Add lines to a file. Raises DirtyTreeError if it is a record and the tree is no commit."""
    refuse_dirty_tree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut_short = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * is_cut_short)
        file.write("".join(json.dumps(record) + "\n" for record in records))


def add_missing(
    jobs: Iterable[Job],
    done: Collection[Job],
    line_of: Callable[[Job], dict],
    path: Path | None,
    pool: Executor | None = None,
    title: str = "runs",
) -> list[dict]:
    """Run the jobs that are not done, and add the line of each to the file as soon as it is there.

    line_of: runs a job. path: None: to no file. pool: its processes run jobs side by side; None: one after the other.
    """
    from rich.console import Console
    from rich.progress import Progress

    missing = [job for job in dict.fromkeys(jobs) if job not in done]
    if missing and path is not None:
        refuse_dirty_tree(path)
    futures = [] if pool is None else [pool.submit(line_of, job) for job in missing]
    found = map(line_of, missing) if pool is None else (future.result() for future in as_completed(futures))
    lines = []
    try:
        with Progress(console=Console(stderr=True), disable=not missing) as progress:
            for line in progress.track(found, total=len(missing), description=title):
                lines.append(line)
                if path is not None:
                    append(path, line)
    finally:
        for future in futures:
            future.cancel()
    return lines


# ---------------------------------------------------------------- text


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], names: int = 1) -> str:
    """In Markdown. names: how many columns on the left are text; the others are aligned on the right."""
    rule = ["---"] * names + ["---:"] * (len(heads) - names)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, rule, *rows))


def publish(
    args: argparse.Namespace,
    text: str,
    *raw: Path,
    shows: str = "",
    draw: Callable[[Path], None] | None = None,
) -> None:
    """Print a report, and write it to --record. raw: as for `write_record`.

    draw: writes what the report's figure `shows` to a path, which is that of the record, as .png.
    """
    if args.record is not None and draw is not None:
        figure = args.record.with_suffix(".png")
        draw(figure)
        text += f"\n![{shows}]({figure.name})\n"
    print(text)
    if args.record is not None:
        write_record(args.record, text, *raw)


@contextmanager
def panels_of(
    file: Path, titles: Sequence[str], size: tuple[float, float] = (4.5, 4.0), **axes: Any
) -> Iterator[list[Axes]]:
    """A row of panels to draw on; the PNG is written when the block ends, with a legend in the first panel.

    size: inches of a panel. axes: for `Axes.set` of all panels. Needs matplotlib: pip install onebit[train].
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * len(titles), size[1]), layout="constrained")
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    yield panels
    for panel, title in zip(panels, titles, strict=True):
        panel.set(title=title, **axes)
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(file, dpi=110)
