"""Run a benchmark: python scripts/bench.py NAME [options]; without a name, list them.

python scripts/bench.py collective --hosts 4
python scripts/bench.py kernels --help
"""

import ast
import sys
from importlib import import_module
from pathlib import Path

from bench.command import be_called

NAMES = (
    "collective",
    "pipeline",
    "kernels",
    "host_adam",
    "host_time",
    "memory",
    "traffic",
    "sparse_attention",
    "sequence",
    "sequence_memory",
    "zero_memory",
    "zero_deepspeed",
    "offload",
    "offload_gpu",
    "inference",
    "serving",
    "local_rounds",
    "unlike",
    "churn",
    "members",
    "newcomers",
    "time_to_loss",
    "forecasts",
    "peer_deepspeed",
)


ELSEWHERE = {"time_to_loss": "time_to_loss.main", "forecasts": "time_to_loss.forecasts"}
"""Those whose modules are in a room of their own."""


def module_of(name: str) -> str:
    return ELSEWHERE.get(name, f"bench.{name}")


def list_names() -> None:
    """Every name with what its module says first. Imports none of them."""
    for name in NAMES:
        text = Path(__file__).parent.joinpath(*module_of(name).split(".")).with_suffix(".py").read_text()
        about = ast.get_docstring(ast.parse(text)) or ""
        print(f"{name:<17}{about.splitlines()[0]}")


def main(argv: list[str]) -> None:
    if argv[:1] == ["call"]:  # another process of a benchmark
        be_called(argv[1:])
        return
    if argv and argv[0] in NAMES:
        import_module(module_of(argv[0])).main(argv[1:])
        return
    print(__doc__.splitlines()[0] + "\n")
    list_names()
    if not argv or argv[0] not in ("-h", "--help"):
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
