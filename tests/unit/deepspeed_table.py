"""The tables of docs/deepspeed.md, from the code: the engine's names, modules, and what a JSON file may ask for.

python tests/unit/deepspeed_table.py       # writes them into the page
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path

import deepspeed_names

from onebit.zero.config.ignored_keys import TOP_LEVEL
from onebit.zero.config.optimizers import ELSEWHERE, OPTIMIZERS
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
    yield "yes: returns False, as the feature is not here", [name for name in rest if name in SWITCHED_OFF]
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


MODULES: dict[str, str] = {
    "accelerator": "CUDA or the CPU",
    "checkpointing": "[where checkpointed activations wait](memory.md#checkpointed-activations)",
    "comm": "and torch.distributed's collectives",
    "compression.compress": "[compression](compression.md)",
    "compression.helper": "for GPT-2's layers, before `init_compression`",
    "elasticity": "for the script that starts the ranks",
    "launcher.runner": "for `accelerate launch`",
    "moe.utils": "for models without experts",
    "ops.adam": "torch's; `DeepSpeedCPUAdam`: [`HostAdam`](memory.md#adam-in-host-memory) if all parameters are in "
    "host memory; with `fp32_optimizer_states=False` its m is in bfloat16 and v in 8 bits, where DeepSpeed's have the "
    "parameters' type",
    "ops.lamb": "`onebit.Lamb`",
    "ops.lion": "`onebit.Lion`",
    "pipe": "`net.parameters()` stand for those of all stages",
    "runtime.activation_checkpointing.checkpointing": "those of `deepspeed.checkpointing`",
    "runtime.config": "names that `engine.optimizer_name()` returns",
    "runtime.dataloader": "",
    "runtime.engine": "",
    "runtime.lr_schedules": "options by name",
    "runtime.pipe.module": "those of `deepspeed.pipe`",
    "runtime.pipe.topology": "a `PipelineModule` takes the number of stages of a topology",
    "runtime.utils": "",
    "runtime.zero.partition_parameters": "those of `deepspeed.zero`",
    "runtime.zero.utils": "whether a parameter is divided over ranks",
    "utils": "",
    "utils.logging": "",
    "utils.zero_to_fp32": "engine's checkpoints; also `python -m onebit.zero.utils.zero_to_fp32 checkpoints weights`",
    "zero": "see below",
}
"""Modules by DeepSpeed's paths, each with a remark."""


def modules() -> str:
    """The table of modules: names and remark of each."""
    lines = ["| DeepSpeed's | names here | remarks |", "| --- | --- | --- |"]
    for path, remark in MODULES.items():
        module = import_module(f"onebit.zero.{path}")
        names = getattr(module, "__all__", None) or sorted(name for name in vars(module) if not name.startswith("_"))
        own = [name for name in names if not getattr(getattr(module, name), "__module__", "").startswith("torch")]
        lines.append(f"| `deepspeed.{path}` | {', '.join(f'`{name}`' for name in own)} | {remark} |")
    return "\n".join(lines)


def config() -> str:
    """The table of what a file asks for and does not get, or gets under another name; optimizers first."""
    lines = ["| in the JSON | here |", "| --- | --- |"]
    lines.append(f"| `type` of `optimizer`: {', '.join(f'`{name}`' for name in OPTIMIZERS)} | yes |")
    lines += [f"| `type` of `optimizer`: `{name}` | rejected: {advice} |" for name, advice in ELSEWHERE.items()]
    whys: dict[str, list[str]] = {}
    for name, inert in TOP_LEVEL.items():
        answer = "rejected" if inert.refused else "accepted" if {True, False} <= {*inert.fine} else "a warning"
        whys.setdefault(f"{answer}: {inert.why}", []).append(name)
    for why in sorted(whys):
        lines.append(f"| {', '.join(f'`{name}`' for name in whys[why])} | {why} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"names": table, "modules": modules, "config": config}
"""By their marks in the page, <!-- names --> to <!-- /names -->."""


def shown(page: str, name: str) -> str:
    """A table as the page has it."""
    return page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0].strip()


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "deepspeed.md"
    text = page.read_text()
    for mark, make in TABLES.items():
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        after = rest.partition(f"<!-- /{mark} -->")[2]
        text = f"{before}<!-- {mark} -->\n{make()}\n<!-- /{mark} -->{after}"
    page.write_text(text)
