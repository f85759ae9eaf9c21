"""Running the cases of `faults.py`: side by side in forks, with a raw record that grows and can be gone on with."""

from __future__ import annotations

import gc
import importlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch
from bench.record import describe_machine
from reports import append, read_lines
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from faults.case import AS_PROMISED, Case, Outcome, Tools

_cases: list[tuple[str, Case]] = []
"""What the workers, forked later, are told by number."""


@dataclass(frozen=True)
class Done:
    """What a worker found of one case."""

    outcomes: list[Outcome]
    seconds: float
    why_not: str = ""


def load_cases(sections: Sequence[str]) -> dict[str, list[Case]]:
    """By section, in the order of their tables."""
    return {name: list(importlib.import_module(f"faults.{name}").cases()) for name in sections}


def run_missing(
    cases: Mapping[str, Sequence[Case]],
    results: Path,
    *,
    processes: int,
    seed: int,
    quick: bool,
    again: bool,
    quiet: bool,
) -> None:
    """Run the cases that the raw record does not hold, the longest first; add what each finds as soon as it is done."""
    held = {(line["section"], line["case"]) for line in latest_lines(read_lines(results)) if line["what"] == "case"}
    _cases[:] = [
        (name, case)
        for name, of_section in cases.items()
        for case in of_section
        if (case.is_quick or not quick) and (again or (name, case.name) not in held)
    ]
    if not _cases:
        return
    append(results, describe_machine(seed=seed))
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # see ranks.py
    order = sorted(range(len(_cases)), key=lambda number: -_cases[number][1].cost_s)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    counts = Counter[str]()
    with (
        ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=_be_a_worker) as pool,
        Progress(*columns, TextColumn("{task.fields[found]}"), disable=quiet) as progress,
    ):
        bar = progress.add_task("cases", total=len(order), found="")
        waiting = {pool.submit(_run_case, number, seed, quick): number for number in order}
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                section, case = _cases[waiting.pop(future)]
                done = future.result()
                append(results, *_lines(section, case, done, seed))
                counts.update(_count(done.outcomes))
                progress.update(bar, advance=1, found=told(counts))


def _be_a_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool


def _run_case(number: int, seed: int, quick: bool) -> Done:
    """In a worker: one case to its end."""
    section, case = _cases[number]
    began = time.monotonic()
    if why := case.why_not():
        return Done([], 0.0, why)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tools = Tools(Random(f"{seed}/{section}/{case.name}"), Path(folder), quick)
        return Done(list(case.run(tools)), time.monotonic() - began)


def _count(outcomes: Sequence[Outcome]) -> Counter[str]:
    counts = Counter[str]()
    for outcome in outcomes:
        counts[outcome.verdict] += outcome.count
    return counts


def _lines(section: str, case: Case, done: Done, seed: int) -> Iterator[dict]:
    where = {"section": section, "case": case.name}
    if done.why_not:
        yield {"what": "skipped", **where, "why": done.why_not}
        return
    for outcome in done.outcomes:
        seconds = None if outcome.seconds is None else round(outcome.seconds, 2)
        yield {"what": "fault", **where, **asdict(outcome), "seconds": seconds}
    yield {"what": "case", **where, "seconds": round(done.seconds, 1), "seed": seed}


def told(counts: Mapping[str, int]) -> str:
    """One line."""
    total = sum(counts.values())
    return f"{total:,} faults, {total - counts.get(AS_PROMISED, 0):,} not as promised"


def latest_lines(lines: Sequence[dict]) -> list[dict]:
    """The raw record with the last run of each case alone; a case ends with its "case" or "skipped" line."""
    last: dict[tuple[str, str], list[dict]] = {}
    open_faults: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        if line["what"] == "machine":
            continue
        key = line["section"], line["case"]
        open_faults.setdefault(key, []).append(line)
        if line["what"] in ("case", "skipped"):
            last[key] = open_faults.pop(key)
    kept = [line for line in lines if line["what"] == "machine"]
    return kept + [line for found in last.values() for line in found]
