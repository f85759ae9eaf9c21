"""Output of commands: tables by rich if it is installed, else plain text, and JSON for machines."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.files import replacing
from . import UserError

if TYPE_CHECKING:
    from rich.console import Console

_UNBOUNDED = 100_000
PLAIN = "rich is not installed, so this is plain text: pip install onebit[train]"


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings.

    words: number of columns on the left with words; the others have numbers. Of several, the last may be wrapped.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def widths(self) -> list[int]:
        """Characters of each column."""
        return [max(len(line[k]) for line in (self.headings, *self.rows)) for k in range(len(self.headings))]

    def text(self) -> str:
        """The table as plain text."""
        lines, widths = [self.headings, *self.rows], self.widths()
        shown = [
            "  ".join(f"{cell:<{width}}" if k < self.words else f"{cell:>{width}}"
                      for k, (cell, width) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]  # fmt: skip
        shown.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *(line.rstrip() for line in shown)])


class Screen:
    """Where a command writes. is_quiet: write nothing, on ranks other than 0."""

    def __init__(self, *, is_quiet: bool = False):
        self.is_quiet = is_quiet
        self._console: Console | None = None
        if not is_quiet and has_rich():
            from rich.console import Console

            class RaisingConsole(Console):
                def on_broken_pipe(self) -> None:
                    raise BrokenPipeError  # to `main`, in place of an exit status of 1

            # Tables are as wide as their cells. rich would cut these to fit a terminal, numbers and names included.
            self._console = RaisingConsole(highlight=False, soft_wrap=True, width=_UNBOUNDED)
        self._has_said = False

    def line(self, text: str = "") -> None:
        if self.is_quiet:
            return
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, markup=False)

    def table(self, table: Table) -> None:
        if self.is_quiet:
            return
        if self._console is None:
            if not self._has_said:
                self._has_said = True
                print(PLAIN)
            print(f"\n{table.text()}\n", flush=True)
            return
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(title=table.title, title_justify="left", title_style="bold")
        prose = table.words - 1 if table.words > 1 else None
        others = sum(width + 3 for k, width in enumerate(table.widths()) if k != prose)
        for k, heading in enumerate(table.headings):
            wraps_at = max(20, shutil.get_terminal_size((160, 24)).columns - others - 4) if k == prose else None
            shown.add_column(heading, justify="left" if k < table.words else "right", max_width=wraps_at)
        for row in table.rows:
            shown.add_row(*map(Text, row))  # not markup: a cell may be a stranger's text
        self._console.print(shown)

    def status(self, text: str) -> None:
        """Show the current activity in one line, which the next call overwrites. Only on a terminal."""
        if not self.is_quiet and sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()


def write_json(path: Path | None, record: object) -> None:
    """Write the record for --json FILE; "-" is standard output. Raises UserError if the file cannot be written."""
    if path is None:
        return
    text = json.dumps(record, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    write_whole("--json", path, lambda part: part.write_text(text, encoding="utf-8"))


def write_whole(option: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write an option's file, which others may read at any time. Raises UserError, and leaves an old file, if it fails.

    A link, and what is no file, as a pipe, is written to in place.
    """
    is_in_place = path.is_symlink() or (path.exists() and not path.is_file())
    try:
        with nullcontext(path) if is_in_place else replacing(path) as file:
            write(file)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}") from error
