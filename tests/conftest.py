"""Nothing is shared but the path: tests import their oracles by name."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests that start processes or lay hosts, one runs at a time, whatever the workers (pytest-xdist)."""
    for item in items:
        if item.get_closest_marker("dist") or item.get_closest_marker("net"):
            item.add_marker(pytest.mark.xdist_group("processes"))
