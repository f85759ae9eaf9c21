"""How the package was installed, and whether that is sound.

`examine` takes what it looks at as arguments, so that tests can show it other installations than their own.
"""

from __future__ import annotations

import json
import os
import re
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ...comm import kernels, torch_versions
from ...host import native as host_kernels
from ...version import VERSION

PACKAGE = Path(__file__).parents[2]
NEWEST_PYTHON = (3, 14)
OPTIONAL = (
    "mpi4py", "triton", "cupy", "safetensors", "rich", "matplotlib", "transformers", "accelerate", "lightning",
    "fastapi", "uvicorn", "deepspeed",
)  # fmt: skip
CACHES = {"triton": ("TRITON_CACHE_DIR", "~/.triton/cache"), "cupy": ("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")}
"""By kernel backend that compiles at run time: the variable that names its cache, and the default."""


@dataclass(frozen=True)
class Installation:
    """facts: rows of the doctor's table, by title. problems: a sentence each, with what to do; none if all is sound."""

    facts: dict[str, str]
    problems: list[str]


def examine(
    environment: Mapping[str, str], *, package: Path = PACKAGE, found: Sequence[metadata.Distribution] | None = None
) -> Installation:
    """Look at the installation of this package; imports no slow one.

    Args:
        environment: The variables of the process, as `os.environ`.
        package: The folder that `onebit` was imported from.
        found: The distributions called onebit, in the order of sys.path. None: those of this Python.
    """
    found = _distributions() if found is None else found
    how, problems = _origin(package, found)
    libraries, absent, outdated = _optional(found[0] if found else None)
    caches, closed = _caches(environment)
    problems += [why for why in (kernels.BACKENDS["cpu"].why_not(), host_kernels.why_not()) if why]
    problems += [*outdated, *closed, *_untested()]
    facts = {
        "installed": how,
        "Adam on the host": host_kernels.why_not() or host_kernels.describe(),
        "optional": libraries,
        "absent": absent,
        "caches": caches,
        "installation": "sound" if not problems else f"{len(problems)} to look at, below",
    }
    return Installation({title: fact for title, fact in facts.items() if fact}, list(dict.fromkeys(problems)))


def _distributions() -> list[metadata.Distribution]:
    """Those that an installer wrote. A checkout on sys.path also has an egg-info, of its last build."""
    every = {str(d.locate_file("")): d for d in metadata.distributions(name="onebit") if d.read_text("RECORD")}
    return list(every.values())


def _origin(package: Path, found: Sequence[metadata.Distribution]) -> tuple[str, list[str]]:
    """Who installed the package and from where; and what is wrong with that."""
    if not found:
        return f"not by an installer: imported from {package.parent}, which is on sys.path", []
    first, *others = found
    url = json.loads(first.read_text("direct_url.json") or "{}")
    source = unquote(urlsplit(url.get("url", "")).path)
    is_editable = bool(url.get("dir_info", {}).get("editable"))
    home = Path(source) if is_editable else Path(str(first.locate_file("")))
    is_users = home == Path(site.getusersitepackages())
    words = [
        f"{first.version} by {(first.read_text('INSTALLER') or 'an unknown installer').strip()}",
        "editable" if is_editable else "for this user" if is_users else "",
        f"in {home}",
        f"from {source}" if source and not is_editable else "",
    ]
    problems = []
    if home.resolve() != package.parent.resolve():
        problems.append(
            f"onebit is imported from {package.parent}, but installed in {home}: PYTHONPATH or the working directory "
            "hides the installation; start elsewhere, or uninstall the one that is not wanted"
        )
    elif first.version != VERSION:
        problems.append(
            f"the files are those of onebit {VERSION}, the installer wrote {first.version}: install it again, so that "
            "kernels and requirements fit"
        )
    if others:
        places = ", ".join(str(each.locate_file("")) for each in others)
        problems.append(f"onebit is installed again in {places}: python -m pip uninstall onebit, then install it once")
    return ", ".join(word for word in words if word), problems


def _optional(distribution: metadata.Distribution | None) -> tuple[str, str, list[str]]:
    """Libraries that are here, those that are not with their extras, and those that are too old for an extra."""
    asked = _extras(distribution)
    here, absent, outdated = [], [], []
    for name in OPTIONAL:
        extra, least = asked.get(name, ("", ""))
        if util.find_spec(name) is None:
            absent += [f"{name} (onebit[{extra}])"] if extra else []
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            here.append(name)
            continue
        here.append(f"{name} {version}")
        if _numbers(version) < _numbers(least):
            outdated.append(f"{name} {version} is older than {least}: pip install --upgrade 'onebit[{extra}]'")
    return ", ".join(here) or "none", ", ".join(absent), outdated


def _extras(distribution: metadata.Distribution | None) -> dict[str, tuple[str, str]]:
    """By library, the first extra that asks for it, and the oldest version that serves."""
    asked: dict[str, tuple[str, str]] = {}
    for line in (distribution.requires if distribution else None) or ():
        read = re.match(r"""([\w-]+)(?:>=([\d.]+))?[^;]*;.*extra == ["']([\w-]+)["']""", line)
        if read:
            name = next((known for known in OPTIONAL if read[1] == known or read[1].startswith(f"{known}-")), read[1])
            asked.setdefault(name, (read[3], read[2] or ""))
    return asked


def _numbers(version: str) -> list[int]:
    """[5, 23] of "5.23.0rc1": the numbers before anything else, without zeros at the end."""
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _caches(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Where kernels that are compiled at run time are kept; and what cannot be written."""
    folders, closed = [], []
    for name, (variable, default) in CACHES.items():
        if kernels.BACKENDS[name].why_not():
            continue
        folder = Path(environment.get(variable) or default).expanduser()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        is_open = os.access(existing, os.W_OK)
        folders.append(f"{name} {folder} ({'writable' if is_open else 'not writable'})")
        if not is_open:
            closed.append(
                f"{existing} is not writable, so {name} compiles its kernels in every process: set {variable}"
            )
    return ", ".join(folders), closed


def _untested() -> list[str]:
    """Versions of torch and Python that are newer than those of the tests."""
    python = sys.version_info[:2]
    newer = [f"Python {python[0]}.{python[1]}"] if python > NEWEST_PYTHON else []
    return [
        f"{name} is newer than what onebit {VERSION} was tested with (docs/versions.md): look for a newer onebit"
        for name in [*newer, *torch_versions.untested()]
    ]
