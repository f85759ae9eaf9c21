"""scripts/installs.py: quick ways of installing work without a compiler, and a way that fails is a row of its table."""

from __future__ import annotations

from pathlib import Path

import installs
import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes most of the time, and test_build.py does it."""
    for name, value in installs.WITHOUT_COMPILER.items():
        monkeypatch.setenv(name, value)


@pytest.mark.thorough
def test_ways_that_need_no_index(capsys: pytest.CaptureFixture[str]) -> None:
    """`target` is how test_build.py installs."""
    assert installs.main(["no-compiler", "user"]) == 0, capsys.readouterr().out
    assert "onebit-" in capsys.readouterr().out


def test_a_way_that_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shop: installs.Shop) -> installs.Installed:
        installs.run("sh", "-c", "echo too | bad; echo 'no such thing' >&2; exit 3")
        raise AssertionError

    monkeypatch.setitem(installs.WAYS, "fails", ("a way", fails))
    shop = installs.Shop(tmp_path, tmp_path, tmp_path / "a-any.whl", tmp_path, tmp_path, "torch")
    row = installs.attempt(shop, "fails")
    assert row.problem is not None and row.problem.endswith("exit status 3: no such thing")
    assert not any("|" in cell for cell in row.cells())


def test_what_torch_needs_has_no_extra() -> None:
    found = installs.needed("torch")
    assert {"torch", "numpy", "filelock", "sympy", "mpmath"} <= found
    assert found.isdisjoint({"triton", "safetensors", "transformers", "onebit"})
