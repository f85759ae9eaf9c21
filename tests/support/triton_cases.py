"""The cases of test_triton.py that need Triton's interpreter, which a process chooses once, when it imports Triton.

    export TRITON_INTERPRET=1 PYTHONPATH=tests/support:tests/golden
    python tests/support/triton_cases.py    # JSON: case -> what is wrong

The cases are those of kernel_cases.py.
"""

from __future__ import annotations

import json
import traceback
from typing import Any

import torch
from kernel_cases import CASES
from triton.runtime import interpreter

from onebit.comm import kernels
from onebit.comm.kernels.triton import backend as triton


def patch_once_a_launch() -> None:
    """Triton's interpreter patches its language in a launch, and again in each function that a kernel calls.

    In that of one file it need not: two fifths of the time. Launches are one at a time.
    """
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def patch_new(function: Any) -> object:
        file = id(function.__globals__)
        if file in patched:
            return None
        patched.add(file)
        return patch(function)

    def launch_anew(grid: object, *args: object, **options: object) -> None:
        patched.clear()
        launch(grid, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew


def main() -> None:
    patch_once_a_launch()
    assert kernels.select("triton", torch.device("cpu")) is triton
    assert "interpreted" in kernels.triton.describe()
    results = {}
    for name, check in CASES.items():
        try:
            check(triton)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
