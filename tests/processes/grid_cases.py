"""Cases that ranks run one after the other over grids of several shapes, in one start of processes for each world size.

`*_ranks.py` registers its cases and calls `run` in every rank; the test module asks `Starts` for what they found.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from ranks import Ended, run_torchrun
from torch import Tensor, nn

from onebit.zero import grid
from onebit.zero.grid import Grid

Case = Callable[[Grid], object]


class Cases(dict[str, Case]):
    """By name. As a decorator: adds a function by its own."""

    def __call__(self, function: Case) -> Case:
        self[function.__name__] = function
        return function

    def run(
        self, folder: str, names_by_shards: list[tuple[int, list[str]]], tensor: int = 1, timeout_s: float = 30.0
    ) -> None:
        """Some over grids of so many shards and tensor ranks; results go to the folder, for each case and rank."""
        logging.disable(logging.WARNING)
        grids = []
        for shards, names in names_by_shards:
            here = grid.start(shard=shards, tensor=tensor, timeout_s=timeout_s)
            grids.append(here)
            for name in names:
                torch.save(self[name](here), Path(folder) / f"{shards}.{name}.{here.world.rank}")
        for here in reversed(grids):
            here.close()


def whole(net: nn.Module) -> Tensor:
    """All parameters, gathered from their shards and parts."""
    params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in params])


@dataclass(frozen=True, eq=False)
class Starts:
    """worlds: (ranks, shards): which cases run there. target: what a rank calls with a folder and (shards, cases).

    thorough: those of the cases that only thorough tests read. They run in starts of their own.
    """

    target: Callable[[str, list[tuple[int, list[str]]]], None]
    worlds: Mapping[tuple[int, int], list[str]]
    thorough: Collection[str] = ()

    def of(self, ranks: int, is_thorough: bool = False) -> tuple[Ended, Path]:
        """Started by whichever test asks first; all later ones read it."""
        return self._start(ranks, is_thorough)

    @cache  # noqa: B019  (a module holds one, to the end)
    def _start(self, ranks: int, is_thorough: bool) -> tuple[Ended, Path]:
        folder = tempfile.mkdtemp(prefix="grid-cases-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        cases = [
            (shards, [name for name in names if (name in self.thorough) == is_thorough])
            for (size, shards), names in self.worlds.items()
            if size == ranks
        ]
        return run_torchrun(ranks, self.target, folder, cases, timeout_s=110), Path(folder)

    def results(self, ranks: int, shards: int, name: str) -> list:
        """What each rank found."""
        ended, folder = self.of(ranks, name in self.thorough)
        files = [folder / f"{shards}.{name}.{rank}" for rank in range(ranks)]
        assert all(file.exists() for file in files), ended.output
        return [torch.load(file) for file in files]
