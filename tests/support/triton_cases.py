"""The cases of test_triton.py that need Triton's interpreter, which a process chooses once, when it imports Triton.

    export TRITON_INTERPRET=1 PYTHONPATH=tests/support:tests/golden
    python tests/support/triton_cases.py NAMES    # JSON: case -> what is wrong

The cases are those of kernel_cases.py.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch
from kernel_cases import CASES

from onebit.comm import kernels
from onebit.comm.kernels.triton import backend as triton


def main() -> None:
    assert kernels.select("triton", torch.device("cpu")) is triton
    assert "interpreted" in kernels.triton.describe()
    results = {}
    for name in sys.argv[1:]:
        try:
            CASES[name](triton)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
