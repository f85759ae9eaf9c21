"""An integration whose library is absent says which extra to install; nothing else of onebit imports one."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

EXTRAS = {"accelerate": "accelerate", "trainer": "transformers"}
"""By module of onebit.integrations: its library, which is also the extra's name."""


@pytest.mark.parametrize("module", EXTRAS)
def test_an_absent_library_is_named_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, library = f"onebit.integrations.{module}", EXTRAS[module]
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{name} needs {library}: pip install onebit\[{library}\]"):
        importlib.import_module(name)


@pytest.mark.processes
def test_onebit_itself_imports_no_framework() -> None:
    code = f"import sys, onebit.zero; print(*{set(EXTRAS.values())!r} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "\n"), ended.stderr
