"""An integration whose library is absent says which extra to install."""

from __future__ import annotations

import importlib
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
