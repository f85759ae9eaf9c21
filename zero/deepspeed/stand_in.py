"""`import deepspeed` gives `onebit.zero`: for libraries that import DeepSpeed by its name, as transformers does.

    from onebit import zero

    zero.stand_in()  # first of all
    from transformers import Trainer, TrainingArguments

or, with a script as it is, `torchrun --nproc-per-node 2 -m onebit.zero.deepspeed train.py`.

A library looks for the package, then for its version, and then imports its modules. One finder of Python's import
system answers all three: `deepspeed.x` is the module `onebit.zero.x`, and the version is `VERSION`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME, HOME = "deepspeed", "onebit.zero"
VERSION = "0.19.6"
"""The release of DeepSpeed whose names `onebit.zero` has."""

_ELSEWHERE = {"checkpoint.utils": "deepspeed.checkpoint_utils"}
"""Modules of DeepSpeed's whose place in `onebit.zero` is a room of another subject."""
_READ_AT_IMPORT = ("accelerate", "transformers")  # these decide then whether there is DeepSpeed


class _Metadata(Distribution):
    """What pip would have written about a package DeepSpeed."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package, its modules and its metadata."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        ours = _ours(fullname)
        if ours is None:
            return None
        try:
            found = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        return ModuleSpec(fullname, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = _ours(spec.name)
        assert name is not None
        module = import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        given = module.__spec__  # the import system has set the one of DeepSpeed's name
        assert given is not None
        module.__spec__ = given.loader_state

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name is None or context.name.lower() == NAME:
            yield _Metadata()


def _ours(name: str) -> str | None:
    """The module here that stands for a module of DeepSpeed's; None: it is none of DeepSpeed's."""
    package, _, rest = name.partition(".")
    if package != NAME:
        return None
    return f"{HOME}.{_ELSEWHERE.get(rest, rest)}" if rest else HOME


def is_installed() -> bool:
    """Whether `stand_in` was called."""
    return any(isinstance(finder, StandIn) for finder in sys.meta_path)


def stand_in() -> None:
    """From now on `import deepspeed` imports `onebit.zero`, even if DeepSpeed is installed.

    Call it before transformers, accelerate, or a library that imports them. The engine's checkpoints without a tag are
    then named global_step123, as in DeepSpeed, where transformers looks for them. Doing it twice changes nothing.

    Raises:
        RuntimeError: A library has been imported that looks for DeepSpeed as it is imported, or DeepSpeed itself.
    """
    if is_installed():
        return
    early: Sequence[str] = [name for name in (NAME, *_READ_AT_IMPORT) if name in sys.modules]
    if early:
        raise RuntimeError(
            f"{', '.join(early)} has been imported, and has decided already which DeepSpeed there is; call "
            "onebit.zero.stand_in() before its import, or start the script by python -m onebit.zero.deepspeed"
        )
    sys.meta_path.insert(0, StandIn())
    vars(import_module(HOME))["__version__"] = VERSION  # libraries compare it
    if not torch.cuda.is_available() and importlib.util.find_spec("accelerate") is not None:
        _connect_cpus()


def _connect_cpus() -> None:
    """Let accelerate connect ranks without GPUs over Gloo.

    It knows DeepSpeed on accelerators alone: without one it would take each rank for the only one.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    prepare = PartialState._prepare_backend

    @wraps(prepare)
    def prepare_backend(self: Any, *args: Any, **named: Any) -> tuple[str | None, Any]:
        backend, kind = prepare(self, *args, **named)
        is_asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" and "LOCAL_RANK" in os.environ
        return ("gloo", DistributedType.MULTI_CPU) if backend is None and is_asked else (backend, kind)

    PartialState._prepare_backend = prepare_backend
