"""DeepSpeed 0.19.6 as a contender: its own environment, and what lets it run on CPU.

    python scripts/bench.py peer_deepspeed                                    (makes the environment)

0.19.6 is the last release that has OneBitAdam, ZeroOneAdam and OneBitLamb; `peer_deepspeed.txt` pins it with the torch
of the other contenders, in an environment where onebit is not installed. Its optimizers run unchanged: what stands in
for the GPU's libraries is in the section "What is patched, and why". Benchmarks start ranks by the words of `python`,
and call `start` there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-deepspeed"
PINS = Path(__file__).resolve().with_name("peer_deepspeed.txt")
STAMP = "prepared.json"

# glibc reads these when a process starts. Without them every temporary as large as the model comes fresh from the
# kernel, page by page: the collective of 25 M elements between 2 hosts then took 3.2 and 4.2 s, with them 0.7 and 0.8
# (medians of 7, runs alternating; glibc 2.36, 2 busy cores, 2026-11-21).
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967295", "MALLOC_TRIM_THRESHOLD_": "17179869184"}

log = logging.getLogger(__name__)


# --- The environment -------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Make DeepSpeed's virtual environment in `folder`, or say that it is there; SystemExit with what went wrong."""
    wanted = {"pins": hashlib.sha256(PINS.read_bytes()).hexdigest(), "python": platform.python_version()}
    stamp = folder / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        log.info("%s is as %s wants it; nothing to do", folder, PINS.name)
        return
    if folder.exists():
        if not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
            raise SystemExit(f"{folder} is not a virtual environment and would be replaced; give another --folder")
        log.info("%s is unfinished or of other pins: making it anew", folder)
        shutil.rmtree(folder)
    pins = read_pins(PINS.read_text())
    if torch.__version__.split("+")[0] != pins["torch"]:
        log.warning("this environment has torch %s, DeepSpeed's gets %s", torch.__version__, pins["torch"])
    log.info("making a virtual environment of Python %s in %s", wanted["python"], folder)
    _call([sys.executable, "-m", "venv", str(folder)], "Python could not make a virtual environment")
    interpreter = str(folder / "bin" / "python")
    # torch by itself first: as a mere dependency of deepspeed it would be whatever build is newest.
    for package in ("torch", "deepspeed"):
        log.info("installing %s %s", package, pins[package])
        install = [interpreter, "-m", "pip", "install", "--disable-pip-version-check", "-c", str(PINS), package]
        _call(install, f"pip could not install {package} {pins[package]}", DS_BUILD_OPS="0")  # no compiler needed
    log.info("trying it")
    _call(
        [interpreter, "-c", "from deepspeed.runtime.fp16.onebit import adam, lamb, zoadam"], "DeepSpeed does not start"
    )
    stamp.write_text(json.dumps(wanted) + "\n")
    log.info("done")


def _call(command: Sequence[str], complaint: str, **env: str) -> None:
    """SystemExit with the last of what the command wrote, and the complaint, if it fails."""
    ended = subprocess.run(
        command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if ended.returncode != 0:
        raise SystemExit(f"{ended.stdout[-4000:]}\n{complaint}: `{shlex.join(command)}` ended with {ended.returncode}")


def read_pins(text: str) -> dict[str, str]:
    """Version by package of a constraints file."""
    lines = [line.strip() for line in text.splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def why_not_prepared(folder: Path = FOLDER) -> str | None:
    """None if `folder` is ready to start ranks, else the reason and what to do."""
    if (folder / STAMP).exists():
        return None
    return f"no DeepSpeed environment in {folder}: python scripts/bench.py peer_deepspeed"


def python(folder: Path = FOLDER) -> list[str]:
    """The Python of DeepSpeed's environment, with its allocator tuned."""
    return [*with_allocator(), str(folder / "bin" / "python")]


def with_allocator() -> list[str]:
    """What to put before a command whose allocator is to be tuned."""
    return ["env", *_allocator_words()]


def _allocator_words() -> list[str]:
    return [f"{name}={value}" for name, value in ALLOCATOR.items()]


# --- What is patched, and why ----------------------------------------------------------------------------------------
#
# DeepSpeed runs these optimizers on GPUs only; the following makes them run on CPU without touching any of their code:
# 1. Its NcclBackend packs signs with cupy, a GPU library. `make_cupy` is a module of that name with the functions it
#    calls, of numpy: packbits and unpackbits have the same names, order of bits and results there. No copies.
# 2. It hands a scale with no dimensions to all_gather and wants tensors of one element back. NCCL allows this, Gloo
#    does not: `Collectives.all_gather` views the scale as one element.
# 3. On CPU it first compiles a shared-memory all-reduce for inference, for minutes on a busy machine and into the home
#    folder. Nothing here calls it: `without_compiling` says that this machine cannot have it.
# 4. Nobody counts what is sent: `Collectives` does, around torch.distributed.


def make_cupy() -> types.ModuleType:
    """A module that stands in for cupy where DeepSpeed's CupyBackend and NcclBackend use it, on CPU memory."""
    stream = types.SimpleNamespace(synchronize=lambda: None)
    device = types.SimpleNamespace(use=lambda: None)
    cupy = types.ModuleType("cupy")
    vars(cupy).update(
        from_dlpack=lambda capsule: torch.utils.dlpack.from_dlpack(capsule).numpy(),
        packbits=numpy.packbits,
        unpackbits=numpy.unpackbits,
        split=numpy.split,
        zeros=numpy.zeros,
        cuda=types.SimpleNamespace(Device=lambda index: device, get_current_stream=lambda: stream),
    )
    return cupy


def without_compiling() -> None:
    """Have deepspeed.init_distributed compile nothing."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


Group = dist.ProcessGroup | None


class Collectives:
    """The collectives of torch.distributed that the optimizers use: counted, and accepted by Gloo.

    sent_bytes: payload this rank has handed over for other ranks. An all-reduce counts as 2·(W-1)/W of its tensor,
    what both its usual algorithms send.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._all_reduce, self._all_gather, self._all_to_all = dist.all_reduce, dist.all_gather, dist.all_to_all_single

    def install(self) -> None:
        """Put these in the place of torch.distributed's, where DeepSpeed looks them up at each call."""
        dist.all_reduce, dist.all_gather = self.all_reduce, self.all_gather
        dist.all_to_all_single = self.all_to_all_single

    def all_reduce(
        self, tensor: Tensor, op: object = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> dist.Work | None:
        world_size = dist.get_world_size(group)
        self.sent_bytes += 2 * tensor.nbytes * (world_size - 1) // world_size
        return self._all_reduce(tensor, op=op, group=group, async_op=async_op)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
    ) -> dist.Work | None:
        tensor = tensor.view(-1) if tensor.dim() == 0 else tensor
        self.sent_bytes += tensor.nbytes * (len(tensor_list) - 1)
        return self._all_gather(tensor_list, tensor, group=group, async_op=async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Group = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        world_size = dist.get_world_size(group)
        self.sent_bytes += input.nbytes * (world_size - 1) // world_size
        return self._all_to_all(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)


# --- A rank ----------------------------------------------------------------------------------------------------------


@cache
def start() -> Collectives:
    """Patch DeepSpeed and initialise it, over torch's process group where there is one; its collectives. All ranks.

    On a GPU, where that group is NCCL's, nothing is patched: its collectives are counted.
    """
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    if not on_gpu and any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        log.warning("DeepSpeed is slower than it need be: start the worker with `env %s`", " ".join(_allocator_words()))
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    if not on_gpu:
        sys.modules["cupy"] = make_cupy()
    collectives = Collectives()
    collectives.install()
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{error}; a rank runs under the Python that `bench.py peer_deepspeed` made: {FOLDER}/bin/python"
        ) from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    if not on_gpu:
        without_compiling()
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
    return collectives


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py peer_deepspeed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the environment (default .venv-deepspeed)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    prepare(args.folder.resolve())
