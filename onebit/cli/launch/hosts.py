"""Which slots of which hosts a run takes, and what their environment gets: DeepSpeed's files and options.

A slot is a place for one rank: a GPU, by its index on the host. The order of the hostfile is the order of the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from .. import UserError

_LINE = re.compile(r"(?P<host>[^\s#-]\S*)\s+slots=(?P<slots>[0-9]{1,4})(\s+max[_-]slots=[0-9]+)?(\s*#.*)?")
"""No host begins with a dash: ssh would take it for an option."""

EXPORTED = ("GLOO", "MLFLOW", "NCCL", "PYTHON", "UCX")
"""Variables of the launcher that every host gets, by the beginnings of their names."""


def parse_hostfile(text: str, name: str) -> dict[str, int]:
    """The number of slots of each host, in the order of the lines.

    Args:
        text: Lines `HOST slots=N`; empty lines and comments, which begin with `#`, do not count.
        name: The file's name, for errors.

    Raises:
        UserError: A line has another form or no slot, a host has two lines, or there is no host.
    """
    pool = dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or int(match["slots"]) == 0:
            raise UserError(f"{name}, line {number}: expected `HOST slots=N`, N from 1 to 9999, got {line.strip()!r}")
        if match["host"] in pool:
            raise UserError(f"{name}, line {number}: {match['host']} has a line already; give each host one line")
        pool[match["host"]] = int(match["slots"])
    if not pool:
        raise UserError(f"{name} names no host; write a line `HOST slots=N` for each")
    return pool


def choose_slots(
    pool: Mapping[str, int],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> dict[str, list[int]]:
    """The slots that a run takes, by host, in the order of `pool`; hosts without any are left out.

    Args:
        pool: The number of slots of each host.
        include: `HOST[:SLOT,...]@...`: only these; a host without slots means all of its slots.
        exclude: All but these, in the same form.
        num_nodes: Number of hosts to take, from the first; None: all.
        num_gpus: Number of slots to take on each host, from slot 0; None: all.

    Raises:
        UserError: Options exclude each other, or name hosts or slots that are not in `pool`; or nothing is left.
    """
    if include and exclude:
        raise UserError("--include and --exclude exclude each other; give one of them")
    if (include or exclude) and (num_nodes, num_gpus) != (None, None):
        raise UserError("--num_nodes and --num_gpus do not go with --include and --exclude, which name hosts and slots")
    named = _parse_slots(include or exclude, pool) if include or exclude else {}
    chosen = {
        host: [slot for slot in range(count) if (slot in named.get(host, ())) == bool(include)]
        for host, count in pool.items()
    }
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise UserError(f"--exclude {exclude} leaves no slot of {_describe(pool)}")
    if num_nodes is not None:
        if not 1 <= num_nodes <= len(chosen):
            raise UserError(f"--num_nodes {num_nodes}: expected 1 to {len(chosen)}, the hosts in {_describe(pool)}")
        chosen = dict(islice(chosen.items(), num_nodes))
    if num_gpus is not None:
        least = min(chosen, key=pool.__getitem__)
        if not 1 <= num_gpus <= pool[least]:
            raise UserError(f"--num_gpus {num_gpus}: expected 1 to {pool[least]}, the slots of {least}")
        chosen = {host: slots[:num_gpus] for host, slots in chosen.items()}
    return chosen


def _parse_slots(text: str, pool: Mapping[str, int]) -> dict[str, set[int]]:
    """Read `HOST[:SLOT,...]@...`. A host named with slots and again without them has these slots, as in DeepSpeed."""
    named = dict[str, set[int]]()
    for part in text.split("@"):
        host, _, slots = (part, "", "") if part in pool else part.rpartition(":")
        if host not in pool:
            raise UserError(f"{text!r}: no host {host or part!r} in {_describe(pool)}")
        if part not in pool and not re.fullmatch("[0-9]+(,[0-9]+)*", slots):
            raise UserError(f"{text!r}: expected HOST or HOST:SLOT,SLOT, as in worker-1:0,2, got {part!r}")
        numbers = {int(slot) for slot in slots.split(",") if slot}
        if unknown := sorted(slot for slot in numbers if slot >= pool[host]):
            raise UserError(f"{text!r}: no slot {unknown[0]} on {host}, which has 0 to {pool[host] - 1}")
        named[host] = named.get(host, set()) | numbers
    return {host: numbers or set(range(pool[host])) for host, numbers in named.items()}


def _describe(pool: Mapping[str, int]) -> str:
    return ", ".join(f"{host} slots={count}" for host, count in islice(pool.items(), 8)) + ", ..." * (len(pool) > 8)


def exported(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables that ranks get from the launcher's environment, with its working folder on Python's path."""
    found = {name: value for name, value in environment.items() if name.startswith(EXPORTED)}
    path = found.get("PYTHONPATH")
    return found | {"PYTHONPATH": f"{folder}:{path}" if path else str(folder)}


def parse_environment(text: str, name: str) -> dict[str, str]:
    """Of an environment file: lines KEY=VALUE, taken literally, without quotes; empty lines and comments do not count.

    Raises:
        UserError: A line has another form.
    """
    found = dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, value = (word.strip() for word in line.partition("="))
        if not line.strip() or line.strip().startswith("#"):
            continue
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise UserError(f"{name}, line {number}: expected KEY=VALUE, got {line.strip()!r}")
        found[key] = value
    return found
