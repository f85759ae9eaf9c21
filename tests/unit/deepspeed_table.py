"""The table of docs/deepspeed.md: each public name of DeepSpeed's engine, and what is here under it, from the code.

python tests/unit/deepspeed_table.py       # prints it
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import deepspeed_names

from onebit.zero.deepspeed.engine import DeepSpeedEngine
from onebit.zero.deepspeed.names import ENGINE, REFUSED, SWITCHED_OFF, why_not
from onebit.zero.engine import Engine

NAMES = sorted({*deepspeed_names.ENGINE, *deepspeed_names.PIPELINE_ENGINE})


def sections() -> dict[str, str]:
    """Where in the code each public name of the engine is: the heading above it."""
    found: dict[str, str] = {}
    for cls in (Engine, DeepSpeedEngine):
        heading = "parts and counts"
        for line in inspect.getsource(cls).splitlines():
            if match := re.match(r"    # -+ (.+)$", line):
                heading = match[1]
            elif match := re.match(r"    def (\w+)|    (\w+)(?:: \w+)? = ", line):
                found.setdefault(match[1] or match[2], heading)
            elif heading == "parts and counts" and line.startswith("        self."):
                for name in re.findall(r"self\.(\w+)(?=[,:]? ?[^=]*=)", line.partition("#")[0]):
                    found.setdefault(name, heading)
    return {name: heading for name, heading in found.items() if not name.startswith("_")}


def rows() -> Iterator[tuple[str, list[str]]]:
    """(what is here, DeepSpeed's names): each name once."""
    here = sections()
    same = [name for name in NAMES if name in here]
    for heading in dict.fromkeys(here.values()):
        if names := [name for name in same if here[name] == heading]:
            yield f"yes: {heading}", names
    rest = [name for name in NAMES if name not in here]
    yield "yes: says False, for the feature is not here", [name for name in rest if name in SWITCHED_OFF]
    yield "no: RuntimeError; " + REFUSED["compile"], [name for name in rest if name in REFUSED]
    whys: dict[str, list[str]] = {}
    for name in rest:
        if name not in SWITCHED_OFF and name not in REFUSED:
            whys.setdefault(why_not(name, ENGINE) or "?", []).append(name)
    for why in sorted(whys, key=lambda why: (why == "it is DeepSpeed's own", why)):
        is_elsewhere = re.match(r"(it is (?!DeepSpeed)|ask|call|use|see|map)", why)
        yield f"{'other name' if is_elsewhere else 'no'}: {why}", whys[why]


def table() -> str:
    """In Markdown."""
    lines = ["| here | names of DeepSpeed's engine |", "| --- | --- |"]
    for here, names in rows():
        lines.append(f"| {here} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


def used_patterns() -> set[str]:
    """Keys of ENGINE that name something of DeepSpeed's."""
    return {pattern for pattern in ENGINE if any(fnmatchcase(name, pattern) for name in NAMES)}


if __name__ == "__main__":
    print(table())
