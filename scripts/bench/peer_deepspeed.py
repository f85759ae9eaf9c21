"""DeepSpeed 0.19.6 as a contender on CPU: its own environment, and one rank's part of a measurement.

    python scripts/bench.py peer_deepspeed --prepare
    onebit emulate --hosts 4 --rate 100mbit -- \\
        env MALLOC_MMAP_THRESHOLD_=4294967295 MALLOC_TRIM_THRESHOLD_=17179869184 .venv-deepspeed/bin/python \\
        scripts/bench.py peer_deepspeed --worker --what step --method deepspeed-onebit-adam --out result.json

0.19.6 is the last release that has OneBitAdam, ZeroOneAdam and OneBitLamb; `peer_deepspeed.txt` pins it with the torch
of the other contenders, in an environment where onebit is not installed. Its optimizers run unchanged: what stands in
for the GPU's libraries is in the section "What is patched, and why". `worker_command` builds the command above.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from train.model import SIZES, VOCABULARY, WithLoss, build_model

from bench.command import COMMAND

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "onebit" / "cli"))  # onebit itself is not installed where the peer is
from cluster import sent_on_wire  # noqa: E402

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
    log.info("done. A rank's part of a measurement, for instance on emulated hosts (onebit emulate):")
    log.info("%s", shlex.join(worker_command(folder, ["--what", "collective", "--out", "result.json"])))


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
    """None if `folder` is ready to run the worker, else the reason and what to do."""
    if (folder / STAMP).exists():
        return None
    return f"no DeepSpeed environment in {folder}: python scripts/bench.py peer_deepspeed --prepare"


def worker_command(folder: Path, flags: Sequence[str]) -> list[str]:
    """One rank's command, for `onebit emulate`, torchrun --no-python or RANK, WORLD_SIZE, … set by hand."""
    return [*python(folder), COMMAND, "peer_deepspeed", "--worker", *flags]


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
    what both its usual algorithms send. Within `without_network` they move as many bytes inside this process only.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._is_local = False
        self._all_reduce, self._all_gather, self._all_to_all = dist.all_reduce, dist.all_gather, dist.all_to_all_single

    def install(self) -> None:
        """Put these in the place of torch.distributed's, where DeepSpeed looks them up at each call."""
        dist.all_reduce, dist.all_gather = self.all_reduce, self.all_gather
        dist.all_to_all_single = self.all_to_all_single

    @contextlib.contextmanager
    def without_network(self) -> Iterator[None]:
        self._is_local = True
        try:
            yield
        finally:
            self._is_local = False

    def all_reduce(
        self, tensor: Tensor, op: object = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> dist.Work | None:
        if self._is_local:
            return None
        world_size = dist.get_world_size(group)
        self.sent_bytes += 2 * tensor.nbytes * (world_size - 1) // world_size
        return self._all_reduce(tensor, op=op, group=group, async_op=async_op)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
    ) -> dist.Work | None:
        tensor = tensor.view(-1) if tensor.dim() == 0 else tensor
        if self._is_local:
            for received in tensor_list:
                received.copy_(tensor)
            return None
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
        if self._is_local:
            output.copy_(input)
            return None
        world_size = dist.get_world_size(group)
        self.sent_bytes += input.nbytes * (world_size - 1) // world_size
        return self._all_to_all(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)

    def meet(self) -> None:
        """Wait for all ranks. Not counted."""
        self._all_reduce(torch.zeros(1))

    def largest(self, mine: Tensor) -> Tensor:
        """Element by element the largest of all ranks. Not counted."""
        every = mine.clone()
        self._all_reduce(every, op=dist.ReduceOp.MAX)
        return every


# --- What is measured ------------------------------------------------------------------------------------------------

LOCAL_STEPS = 16  # DeepSpeed's default for local_step_clipper, the longest interval between two rounds


@dataclass(frozen=True)
class Plan:
    """DeepSpeed's optimizer configuration, and how many steps it takes until every further step is a measured one.

    sends: what the steps after those send.
    """

    optimizer: dict
    steps_before: int
    sends: str


METHODS = ("deepspeed-onebit-adam", "deepspeed-zero-one-adam", "deepspeed-onebit-lamb")
PHASES = ("every-step", "local-steps")


def plan(method: str, phase: str, steps: int) -> Plan:
    """How to bring `method` as fast as possible to `steps` steps in a row of its compressed stage.

    The first step of each is a trial of the collective and the second one a dense step. 1-bit Adam and 1-bit LAMB can
    freeze their variance then. 0/1 Adam has two stages. Before var_freeze_step it sends 1-bit gradients, except in step
    2, 4, 8, … (var_update_scaler 1), which are dense; "every-step" is the shortest such gap that holds `steps`. After
    it, it sends the sum of its moves in every 16th step, once the interval has grown to that: "local-steps".
    """
    if phase == "local-steps" and method != "deepspeed-zero-one-adam":
        raise ValueError(f"{method} has no local steps: --phase every-step")
    rate = {"lr": 1e-5}
    if method == "deepspeed-onebit-adam":
        return Plan({"type": "OneBitAdam", "params": rate | {"freeze_step": 2}}, 2, "1-bit momentum, every step")
    if method == "deepspeed-onebit-lamb":
        return Plan({"type": "OneBitLamb", "params": rate | {"freeze_step": 2}}, 2, "1-bit momentum, every step")
    if phase == "local-steps":
        policy = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": LOCAL_STEPS}
        sends = f"1-bit sum of moves, every {LOCAL_STEPS}th step"
        return Plan({"type": "ZeroOneAdam", "params": rate | policy}, LOCAL_STEPS, sends)
    before = max(2, 2 ** math.ceil(math.log2(steps + 1)))
    policy = {"var_freeze_step": 10**9, "var_update_scaler": 1}
    return Plan({"type": "ZeroOneAdam", "params": rate | policy}, before, "1-bit gradient, every step")


@dataclass(frozen=True)
class Measured:
    """What rank 0 writes. Lists have one entry per repetition, each of the slowest rank.

    compute_seconds: for a step its forward and backward pass; for the collective the same calls while torch.distributed
    only copies within each process, on all ranks at once. sent_bytes, wire_bytes: of rank 0, mean of the repetitions;
    the latter with all headers, None outside an emulated host.
    """

    seconds: list[float]
    compute_seconds: list[float]
    sent_bytes: float
    wire_bytes: float | None


def measure(act: Callable[[], float], collectives: Collectives, repeats: int, warmup: int) -> Measured:
    """Time `act`, which returns the seconds of it that were computing, after `warmup` calls that are not counted."""
    seconds, sent, wire = [], 0, 0
    for k in range(-warmup, repeats):
        collectives.meet()
        sent_before, wire_before = collectives.sent_bytes, sent_on_wire()
        began = time.perf_counter()
        compute_s = act()
        mine = [time.perf_counter() - began, compute_s]
        collectives.meet()
        if k >= 0:
            seconds.append(mine)
            sent += collectives.sent_bytes - sent_before
            wire += (sent_on_wire() or 0) - (wire_before or 0)
    total, compute = collectives.largest(torch.tensor(seconds)).T.tolist()
    return Measured(total, compute, sent / repeats, wire / repeats if wire else None)


def measure_collective(args: argparse.Namespace, collectives: Collectives) -> Measured:
    """DeepSpeed's compressed_allreduce of one tensor, whose result is the next repetition's input."""
    from deepspeed.runtime.comm.nccl import NcclBackend

    backend = NcclBackend()
    row = backend.size * math.lcm(backend.size, 8)
    padded = -(-args.elements // row) * row
    torch.manual_seed(backend.rank)
    x = torch.randn(args.elements)
    errors = torch.zeros(padded), torch.zeros(padded // backend.size)

    def act() -> float:
        x.set_(backend.compressed_allreduce(x, *errors, 0))
        return 0.0

    measured = measure(act, collectives, args.steps, args.warmup_steps)
    _check_equal(x, collectives)
    with collectives.without_network():
        alone = measure(act, collectives, args.steps, args.warmup_steps)
    return Measured(measured.seconds, alone.seconds, measured.sent_bytes, measured.wire_bytes)


def measure_step(args: argparse.Namespace, collectives: Collectives) -> Measured:
    """Forward, backward and step of DeepSpeed's engine on the GPT: --batch windows of random bytes on every rank."""
    import deepspeed

    way = plan(args.method, args.phase, args.warmup_steps + args.steps)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # unasked it is 1.0: a pass over all gradients, and by each rank's own norm
        "steps_per_print": 10**9,
        "optimizer": way.optimizer,
    }
    model = WithLoss(build_model(args.size, seed=0))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    context = SIZES[args.size].context
    generator = torch.Generator().manual_seed(dist.get_rank())
    windows = torch.randint(VOCABULARY, (args.batch, context + 1), generator=generator)

    def step(windows: Tensor) -> float:
        began = time.perf_counter()
        engine.backward(engine(windows))
        computed = time.perf_counter()
        engine.step()
        return computed - began

    for _ in range(way.steps_before):
        step(windows[:1])
    measured = measure(lambda: step(windows), collectives, args.steps, args.warmup_steps)
    if args.phase == "every-step":
        _check_equal(nn.utils.parameters_to_vector(model.parameters()), collectives)
    return measured


def _check_equal(x: Tensor, collectives: Collectives) -> None:
    """RuntimeError unless x is finite and has the same bits on every rank, as 1-bit averaging leaves it."""
    bits = x.detach().view(torch.int32).sum(dtype=torch.int64)
    highest, lowest = collectives.largest(torch.stack([bits, -bits])).tolist()
    if not x.isfinite().all() or highest != -lowest:
        raise RuntimeError(f"rank {dist.get_rank()}: after the last repetition x is not finite and equal on all ranks")


def worker(args: argparse.Namespace) -> None:
    """One rank; rank 0 writes what was measured as JSON."""
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints from its initialisation step
        collectives = start()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
        measured = (measure_collective if args.what == "collective" else measure_step)(args, collectives)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(asdict(measured) | _circumstances(args)) + "\n")
    collectives.meet()
    dist.destroy_process_group()


@cache
def start() -> Collectives:
    """Patch DeepSpeed and initialise it, over torch's process group where there is one; its collectives. All ranks.

    On a GPU, where that group is NCCL's, nothing is patched: its collectives are counted.
    """
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    if not on_gpu and not _is_allocator_tuned():
        log.warning("DeepSpeed is slower than it need be: start the worker with `env %s`", " ".join(_allocator_words()))
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    if not on_gpu:
        sys.modules["cupy"] = make_cupy()
    collectives = Collectives()
    collectives.install()
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}; a worker runs under the Python that --prepare made: {FOLDER}/bin/python") from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    if not on_gpu:
        without_compiling()
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
    return collectives


def _is_allocator_tuned() -> bool:
    return all(os.environ.get(name) == value for name, value in ALLOCATOR.items())


def _circumstances(args: argparse.Namespace) -> dict[str, object]:
    import deepspeed

    sends = "1-bit tensor" if args.what == "collective" else plan(args.method, args.phase, 1).sends
    return {
        **{k: v for k, v in vars(args).items() if k not in ("out", "prepare", "worker", "folder")},
        "sends": sends, "world_size": dist.get_world_size(), "threads": torch.get_num_threads(),
        "is_allocator_tuned": _is_allocator_tuned(),
        "deepspeed": deepspeed.__version__, "torch": torch.__version__, "numpy": numpy.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


# --- Command line ----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.py peer_deepspeed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--prepare", action="store_true", help="make DeepSpeed's environment; nothing if it is there")
    role.add_argument("--worker", action="store_true", help="be one rank, under that environment's Python")
    add = parser.add_argument
    add("--folder", type=Path, default=FOLDER, help="of the environment (default .venv-deepspeed)")
    add("--what", choices=["collective", "step"], default="collective")
    add("--method", choices=METHODS, default=METHODS[0], help="of a step; the collective is the same for all")
    add(
        "--phase", choices=PHASES, default=PHASES[0], help="local-steps: 0/1 Adam's second stage; use --steps 16, 32, …"
    )
    add("--elements", type=_positive, default=25_000_000, help="of the collective's float32 tensor")
    add("--size", choices=list(SIZES), default="25m", help="of a step's GPT")
    add("--batch", type=_positive, default=1, help="a step's windows per rank, on any number of ranks")
    add("--steps", type=_positive, default=9, metavar="K", help="repetitions that count")
    add("--warmup-steps", type=int, default=3, metavar="J", help="repetitions before those; the allocator needs a few")
    add("--out", type=Path, help="where rank 0 writes its JSON")
    args = parser.parse_args(arguments)
    if args.worker and args.out is None:
        parser.error("--worker needs --out FILE")
    if args.warmup_steps < 0:
        parser.error(f"--warmup-steps {args.warmup_steps}: at least 0")
    try:
        plan(args.method, args.phase, args.steps)
    except ValueError as error:
        parser.error(str(error))
    return args


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1")
    return value


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.prepare:
        prepare(args.folder.resolve())
    else:
        worker(args)
