"""What each released version wrote (tests/golden/released_VERSION.zip) is read by this one: see docs/versions.md."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
import torch
import write_golden
import write_released
from write_released import ENGINES, OPTIMIZERS, STEPS

import onebit
from onebit.comm import SimTransport, run_ranks

ROOT = Path(__file__).parents[2]
CHANGES = (ROOT / "CHANGELOG.md").read_text()
RELEASES = re.findall(r"^## (\d+\.\d+\.\d+), \d{4}-\d\d-\d\d$", CHANGES, re.MULTILINE)
each_release = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def written(version: str, tmp_path: Path) -> Path:
    """What a release wrote, unpacked."""
    with zipfile.ZipFile(ROOT / f"tests/golden/released_{version}.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def differences(now: object, then: object, place: str = "") -> list[str]:
    """Where a state has other values than it was loaded from. It may have more."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [found for key in then for found in differences(now.get(key), then[key], f"{place}/{key}")]
    if isinstance(then, list | tuple) and isinstance(now, list | tuple) and len(now) == len(then):
        return [
            found for k, pair in enumerate(zip(now, then, strict=True)) for found in differences(*pair, f"{place}/{k}")
        ]
    if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor):
        return [] if torch.equal(now, then) else [place]
    return [] if now == then else [f"{place}: {then!r} is {now!r}"]


@each_release
def test_frames_have_the_bytes_of_the_release(version: str, written: Path) -> None:
    now = write_golden.frames()
    assert json.loads((written / "frames.json").read_text()).items() <= now.items()


@each_release
def test_public_names_go_only_with_an_entry_in_the_changelog(version: str, written: Path) -> None:
    now = write_released.names()
    for module, then in json.loads((written / "names.json").read_text()).items():
        assert all(f"`{name}`" in CHANGES for name in set(then) - set(now[module]))


@pytest.mark.parametrize(
    ("number", "path"), re.findall(r"\| (\d+), `([\w/]+\.py)` \|", (ROOT / "docs/versions.md").read_text())
)
def test_the_table_of_formats_has_the_numbers_of_the_code(number: str, path: str) -> None:
    code = (ROOT / path if (ROOT / path).exists() else ROOT / "onebit" / path).read_text()
    assert re.findall(r"(?:^_VERSION|\babi_version) ?= ?(\d+)\b", code, re.MULTILINE) == [number]


@each_release
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_a_release_is_loaded_and_trains(version: str, name: str, written: Path) -> None:
    saved = [torch.load(written / name / f"rank{rank}.pt", weights_only=True) for rank in range(2)]

    def load(link: SimTransport) -> tuple[list[str], list[torch.Tensor]]:
        params = list(write_released.net().parameters())
        with torch.no_grad():
            for p, x in zip(params, saved[link.rank]["weights"], strict=True):
                p.copy_(x)
        optimizer = OPTIMIZERS[name](params, link)
        optimizer.load_state_dict(saved[link.rank]["state"])
        found = differences(optimizer.state_dict(), saved[link.rank]["state"])
        write_released.take_steps(params, optimizer, link.rank, 2)
        return found, params

    (found, params), (others, copies) = run_ranks(2, load)
    assert not found and not others
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(params, copies, strict=True))


@each_release
@pytest.mark.parametrize("stage", ENGINES)
def test_the_checkpoint_of_a_release_is_loaded_and_trains(version: str, stage: int, written: Path) -> None:
    """Its configuration is the release's, too. Two ranks wrote it, and one reads it."""
    folder = written / f"stage{stage}"
    expected = torch.load(folder / "expected.pt", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    engine, *_ = onebit.zero.initialize(model=write_released.net(), config=config)
    engine.load_checkpoint(folder)
    assert engine.global_steps == STEPS
    assert not differences(engine.module_state_dict(), expected)
    engine.backward(engine(torch.ones(4, 24)).float().square().mean())
    engine.step()
    assert differences(engine.module_state_dict(), expected)
    engine.close()
