"""What a model on one GPU, or one host without, will need in each mode of offload: bytes, seconds, the largest model.

    onebit plan --params 13e9 --hosts 1 --device-gb 32 --host-gb 128 --disk-gb 1000 --pcie 25 --disk 5 --tflops 100

Per trained parameter, with b bytes of its dtype, a master of M = 4 (0 where a float32 parameter on the host is its
own), and 8 of moments:

    mode        with the parameters           in the store
    none        b + b + M + 8                 0
    state       b + b                         M + 8
    gradients   b, and the largest gradient   M + 8 + b
    full        the largest, and its gradient M + 8 + b + b

With a ratio, in mode state: that share of the store; of the rest, state and master lie with the parameters.
In mode full a float32 parameter is its own master on any device, and "the largest" is of a module; `largest` stands for
it. A frozen parameter (LoRA's base) takes b alone, with the others or, in mode full, in the store.
A store in files needs buffers of buffer_count chunks in host memory; every mode with one needs a chunk's float32
gradients (unless they are float32 on the host), a chunk of the step's own, and in its first step a chunk's moments,
which torch makes beside the store. With a GPU copies have buffers of their own, on it and in host memory
(`_copy_buffers`). Without one what lies with the parameters is host memory, too. Activations and the process itself
come on top. Seconds: a roofline, from all overlapped (the slowest of PCIe, memory and disk behind computing) to nothing
overlapped. The formulas are in docs/offload.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .layout import UNIT

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ROWS = (("none", "-"), *((mode, to) for to in ("cpu", "files") for mode in ("state", "gradients", "full")))
_MOMENTS, _STEP_BYTES = 8, 28
FLOPS = 6
"""Of a trained parameter and a token, forward and backward."""
_MODULE_BYTES = 28e3  # of Python objects: 18 kB with 2,000 small modules, 28 kB with 3,840 of a million parameters
_FROZEN_FLOPS = 4  # of one without a gradient


@dataclass(frozen=True)
class OffloadRun:
    """What is asked about. device_bytes: of the GPU; 0: there is none. host_bytes, disk_bytes: that may be used.

    trained: of params; None: all. ratio: of the trained ones, whose state is in the store in mode state. modules: with
    parameters of their own. largest: elements of the largest parameter.
    tokens: of a step. *_per_s: bytes and operations a second: of PCIe in one direction, of the disk, of host memory, of
    the device. Raises ValueError on numbers that no run can have.
    """

    params: float
    device_bytes: float = 0.0
    host_bytes: float = 128e9
    disk_bytes: float = 0.0
    dtype: str = "bf16"
    tokens: float = 4096.0
    largest: float = 0.0
    trained: float | None = None
    ratio: float = 1.0
    modules: int = 0
    pcie_per_s: float = 25e9
    disk_per_s: float = 5e9
    memory_per_s: float = 100e9
    flops_per_s: float = 100e12
    chunk_mb: float = 64.0
    buffer_count: int = 4

    def __post_init__(self) -> None:
        positive = self.params, self.host_bytes, self.tokens, self.pcie_per_s, self.disk_per_s, self.memory_per_s
        if min(*positive, self.flops_per_s, self.chunk_mb) <= 0 or self.dtype not in BYTES or self.buffer_count < 2:
            raise ValueError(f"expected numbers above 0, dtype of {', '.join(BYTES)}, buffer_count >= 2: {self}")
        if min(self.device_bytes, self.disk_bytes, self.modules) < 0 or not 0 <= self.largest <= self.params:
            raise ValueError(f"expected bytes, modules >= 0, and a largest parameter within the model: {self}")
        if not 0 < self.stepped <= self.params:
            raise ValueError(f"expected trained parameters, of the model's {self.params:g}, got {self.trained:g}")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"expected a ratio from 0 to 1, got {self.ratio:g}")

    @property
    def stepped(self) -> float:
        """Parameters that are trained."""
        return self.params if self.trained is None else self.trained

    @property
    def dtype_bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def near_state_bytes(self) -> int:
        """Of a trained parameter, with which its state lies."""
        return _MOMENTS + (0 if self.dtype == "fp32" else 4)

    def share(self, mode: str) -> float:
        """Of the trained parameters, whose state is in the store."""
        return {"none": 0.0, "state": self.ratio}.get(mode, 1.0)

    def state_bytes(self, mode: str) -> int:
        """Of a trained parameter in the store: the master, where it is not the parameter itself, and moments."""
        is_master = self.dtype == "fp32" and (self.device_bytes == 0 or mode == "full")
        return _MOMENTS + (0 if is_master else 4)

    def stored_bytes(self, mode: str) -> int:
        """Of a trained parameter in the store, besides: the gradient, and the parameter."""
        return self.dtype_bytes * {"gradients": 1, "full": 2}.get(mode, 0)


@dataclass(frozen=True)
class OffloadPlan:
    """Peak bytes in each place, seconds of a step from all to nothing overlapped, and what bounds it.

    largest_params: that fit into these places in this mode.
    """

    mode: str
    to: str
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    seconds: tuple[float, float]
    bound: str
    fits: bool
    largest_params: float


def plans(run: OffloadRun) -> Iterator[OffloadPlan]:
    """Every mode and store."""
    for mode, to in ROWS:
        yield plan(run, mode, to)


def plan(run: OffloadRun, mode: str, to: str) -> OffloadPlan:
    """One of ROWS."""
    device, host, disk = _bytes(run, mode, to)
    times = _times(run, mode, to)
    step = [times[name] for name in ("pcie", "memory", "disk")]
    least, most = times["compute"] + max(step), sum(times.values())
    bound = max(times, key=lambda name: times[name])
    return OffloadPlan(
        mode, to, device, host, disk, (least, most), bound, _fits(run, mode, to), _largest(run, mode, to)
    )


def chosen(run: OffloadRun) -> OffloadPlan | None:
    """Of the modes that fit the one whose step takes the fewest seconds; None: none fits."""
    return min((made for made in plans(run) if made.fits), key=lambda made: made.seconds, default=None)


def _bytes(run: OffloadRun, mode: str, to: str) -> tuple[float, float, float]:
    """(device, host, disk); without a device, its bytes are the host's."""
    b, chunk, share = run.dtype_bytes, _chunk(run, mode), run.share(mode)
    state, stored = run.state_bytes(mode), run.stored_bytes(mode)
    near = b * (run.largest if mode == "full" else run.params)
    near += b * (min(run.largest, run.stepped) if stored else run.stepped)
    host = away = 0.0
    if share < 1.0:
        near += (1.0 - share) * run.stepped * run.near_state_bytes + _own(run, mode, to) + (0 if b == 4 else 4 * chunk)
    if share > 0.0:
        away = share * run.stepped * (state + stored) + (b * (run.params - run.stepped) if mode == "full" else 0)
        scratch = 0 if b == 4 and (run.device_bytes == 0 or stored) else 4
        held = run.buffer_count * (state + stored) if to == "files" else 0
        host = (0.0 if to == "files" else away) + _own(run, mode, to) + chunk * (scratch + held)
    if run.device_bytes == 0:
        near, host = 0.0, host + near
    elif share > 0.0:
        buffers, locked = _copy_buffers(run, mode, to)
        near, host = near + buffers, host + locked
    return near, host + _MODULE_BYTES * run.modules, away if to == "files" else 0.0


def _copy_buffers(run: OffloadRun, mode: str, to: str) -> tuple[float, float]:
    """(device, host): where copies between the two begin and end. Slices of a module come ahead, from memory one."""
    chunk, ahead = run.dtype_bytes * _chunk(run, mode), run.buffer_count - 2
    module = run.dtype_bytes * run.largest
    come = min(chunk, module)
    if to == "cpu" and ahead > 0:
        come = max(come, module / ahead)
    leave = run.buffer_count * chunk if mode != "state" else 0.0
    away = 2 * chunk * {"state": 2, "gradients": 1}.get(mode, 0)
    return leave + (run.buffer_count * come if mode == "full" else 0.0), away


def _own(run: OffloadRun, mode: str, to: str) -> float:
    """What torch's step allocates: of one piece of a parameter for a moment, and in the first step a chunk's moments.

    Host memory that is not page-locked comes page by page as it is written, so the last chunk's moments are beside it
    before their places in the store are.
    """
    chunk = _chunk(run, mode)
    is_there = to == "files" or run.device_bytes > 0
    return 8 * min(chunk, run.largest or chunk) + (_MOMENTS * chunk if is_there else 0)


def _chunk(run: OffloadRun, mode: str) -> float:
    """Elements of a chunk."""
    most = max(1, int(run.chunk_mb * 2**20 / run.state_bytes(mode)) // UNIT) * UNIT
    return min(most, -(-run.stepped // UNIT) * UNIT)


def _times(run: OffloadRun, mode: str, to: str) -> dict[str, float]:
    """Seconds that each part of the machine works in a step."""
    b, state, p = run.dtype_bytes, run.state_bytes(mode), run.stepped
    away = run.share(mode) * p
    crossing = 2 * b * away  # gradients, and new values
    moved = (2 * state + (3 * b if run.stored_bytes(mode) else 0)) * away
    if mode == "full":  # read for forward, for backward, and by a step that has no masters; written
        crossing = 2 * b * run.params + b * p
        moved += 2 * b * run.params + (1 if state > _MOMENTS else 2) * b * p
    is_resident = run.device_bytes == 0
    stepped = _STEP_BYTES * (p if is_resident else away)
    return {
        "compute": (_FROZEN_FLOPS * (run.params - p) + FLOPS * p) * run.tokens / run.flops_per_s,
        "pcie": 0.0 if is_resident else crossing / run.pcie_per_s,
        "memory": stepped / run.memory_per_s,
        "disk": moved / run.disk_per_s if to == "files" else 0.0,
    }


def _fits(run: OffloadRun, mode: str, to: str) -> bool:
    device, host, disk = _bytes(run, mode, to)
    return device <= run.device_bytes and host <= run.host_bytes and disk <= run.disk_bytes


def _largest(run: OffloadRun, mode: str, to: str) -> float:
    """By bisection: bytes grow with parameters. The largest one and the trained ones keep their share of the model."""
    low, high = 0.0, 1e15
    while high - low > 1e-3 * max(low, 1e6):
        params = (low + high) / 2
        trained = None if run.trained is None else run.trained / run.params * params
        sized = replace(run, params=params, trained=trained, largest=run.largest / run.params * params)
        is_there = _fits(sized, mode, to)
        low, high = (params, high) if is_there else (low, params)
    return low
