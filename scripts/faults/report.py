"""What the outcomes of `faults.py` say, as Markdown: counts, a table per section, and all that is not as promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.record import machines

from faults.case import AS_PROMISED, VERDICTS, Case

_MOST_EXAMPLES = 4


def report(lines: Sequence[dict], sections: Mapping[str, Sequence[Case]], titles: Mapping[str, str]) -> str:
    """lines: of the raw record, the last ones of each case. sections: all cases, whose promises the tables tell."""
    faults = [line for line in lines if line["what"] == "fault"]
    skipped = [line for line in lines if line["what"] == "skipped"]
    total, kept = _count(faults), _count(line for line in faults if line["verdict"] == AS_PROMISED)
    seconds = sum(line["seconds"] for line in lines if line["what"] == "case")
    text = [
        "# Faults: what was injected, promised and observed",
        "",
        f"{total:,} faults, {kept:,} as promised, {total - kept:,} not; {seconds / 60:.0f} minutes of cases in all. "
        "A fault is one process killed or stopped, one call failed, one file, frame, link, gradient or option spoilt. "
        'A verdict is made by a function, `judge` in `scripts/faults/case.py`, from how each rank ended. "Longest": '
        "seconds from the fault to the last error that it brought, the longest of the row.",
        "",
        *machines(lines),
        *_summary(faults, sections, titles),
        *(line for name, cases in sections.items() for line in _section(name, titles[name], cases, faults, skipped)),
    ]
    return "\n".join(text).rstrip() + "\n"


def _count(faults: Iterable[dict]) -> int:
    return sum(line["count"] for line in faults)


def _summary(
    faults: Sequence[dict], sections: Mapping[str, Sequence[Case]], titles: Mapping[str, str]
) -> Iterator[str]:
    seen = [verdict for verdict in VERDICTS if any(line["verdict"] == verdict for line in faults)]
    yield "| section | faults | " + " | ".join(seen) + " |"
    yield "| --- |" + " --: |" * (1 + len(seen))
    for name in (name for name in sections if any(line["section"] == name for line in faults)):
        of_section = [line for line in faults if line["section"] == name]
        yield "| " + " | ".join([titles[name], str(_count(of_section)), *_verdict_cells(of_section, seen)]) + " |"
    yield "| all | " + " | ".join([f"**{_count(faults)}**", *_verdict_cells(faults, seen)]) + " |"
    yield ""


def _verdict_cells(faults: Sequence[dict], verdicts: Sequence[str]) -> list[str]:
    counts = Counter[str]()
    for line in faults:
        counts[line["verdict"]] += line["count"]
    return [str(counts[verdict] or "") for verdict in verdicts]


def _section(
    name: str, title: str, cases: Sequence[Case], faults: Sequence[dict], skipped: Sequence[dict]
) -> Iterator[str]:
    by_case = {case.name: [f for f in faults if (f["section"], f["case"]) == (name, case.name)] for case in cases}
    not_run = {line["case"]: line["why"] for line in skipped if line["section"] == name}
    if not any(by_case.values()) and not not_run:
        return
    yield f"## {title[0].upper()}{title[1:]}"
    yield ""
    yield "| case | promised | injected, observed | faults | as promised | longest |"
    yield "| --- | --- | --- | --: | --: | --: |"
    for case in cases:
        if of_case := by_case[case.name]:
            kept = _count(line for line in of_case if line["verdict"] == AS_PROMISED)
            times = [line["seconds"] for line in of_case if line["seconds"] is not None]
            longest = f"{max(times):.1f}" if times else ""
            how = f"{case.injected}; {case.observed}"
            yield f"| {case.name} | {case.promised} | {how} | {_count(of_case)} | {kept} | {longest} |"
    yield ""
    for case_name, why in not_run.items():
        yield f"Not run: {case_name}: {why}."
        yield ""
    yield from _exceptions(by_case)


def _exceptions(by_case: Mapping[str, Sequence[dict]]) -> Iterator[str]:
    """What was not as promised: a line per case and verdict, with examples."""
    found = [(name, line) for name, of_case in by_case.items() for line in of_case if line["verdict"] != AS_PROMISED]
    if not found:
        return
    yield "Not as promised:"
    yield ""
    for key in dict.fromkeys((name, line["verdict"]) for name, line in found):
        alike = [line for name, line in found if (name, line["verdict"]) == key]
        yield f"- {key[0]}: {key[1]}, {_count(alike)}"
        for line in alike[:_MOST_EXAMPLES]:
            yield f"  - {line['fault']}: {line['detail'] or key[1]}".replace("\n", " ")[:400]
    yield ""
