"""The needs of a model on one GPU, or on one host without a GPU, in each offload mode: bytes, seconds, largest model.

    onebit plan --params 13e9 --hosts 1 --device-gb 32 --host-gb 128 --disk-gb 1000 --pcie 25 --disk 5 --tflops 100

Per trained parameter, with b bytes of its dtype, a master of M = 4 (0 where a float32 parameter on the host is its
own), and 8 of moments:

    mode        with the parameters           in the store
    none        b + b + M + 8                 0
    state       b + b                         M + 8
    gradients   b, and the largest gradient   M + 8 + b
    full        the largest, and its gradient M + 8 + b + b

With a ratio in mode state, that share is in the store; the rest of state and masters stays with the parameters. In mode
full a float32 parameter is its own master on any device, and "the largest" is that of a module; `largest` stands for
it. A frozen parameter (LoRA's base) takes only b, with the others or, in mode full, in the store. A store in files
needs buffers of buffer_count chunks in host memory. Every mode with a store needs a chunk's float32 gradients (unless
they are float32 on the host), a chunk for the step itself, and in the first step a chunk's moments, which torch makes
next to the store. With a GPU, copies need further buffers on it and in host memory (`_copy_buffers`). Without a GPU
everything is in host memory. Activations and the process itself are not counted. Seconds follow a roofline, from
everything overlapped (the slowest of PCIe, memory and disk, after computing) to nothing overlapped. The formulas are in
docs/offload.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .layout import UNIT

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ROWS = (("none", "-"), *((mode, to) for to in ("cpu", "files") for mode in ("state", "gradients", "full")))
_MOMENTS, _STEP_BYTES = 8, 28
FLOPS = 6
"""Operations per trained parameter and token, forward and backward."""
_MODULE_BYTES = 28e3  # Python objects: 18 kB each with 2,000 small modules, 28 kB with 3,840 of a million parameters
_FROZEN_FLOPS = 4  # of a parameter without a gradient


@dataclass(frozen=True)
class OffloadRun:
    """A run to estimate.

    Args:
        params: Parameters of the model.
        device_bytes: Memory of the GPU; 0 (default) without one.
        host_bytes: Host memory that may be used.
        disk_bytes: Disk space that may be used; 0 (default) for none.
        dtype: Of the parameters: "fp32", "bf16" (default) or "fp16".
        tokens: Tokens per step.
        largest: Elements of the largest parameter, in mode "full" of the largest module.
        trained: How many parameters are trained; None (default) for all.
        ratio: The share of the trained ones whose state is in the store in mode "state".
        modules: Modules that hold parameters directly.
        pcie_per_s: Bytes per second over PCIe in one direction.
        disk_per_s: Bytes per second of the disk.
        memory_per_s: Bytes per second of host memory.
        flops_per_s: Operations per second of the device.
        chunk_mb: The size of a chunk's state in MB.
        buffer_count: Chunks in memory at once, with files.

    Raises:
        ValueError: A number is out of range.
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
        """How many parameters are trained."""
        return self.params if self.trained is None else self.trained

    @property
    def dtype_bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def near_state_bytes(self) -> int:
        """Bytes of state per trained parameter whose state stays with it."""
        return _MOMENTS + (0 if self.dtype == "fp32" else 4)

    def share(self, mode: str) -> float:
        """The share of the trained parameters whose state is in the store."""
        return {"none": 0.0, "state": self.ratio}.get(mode, 1.0)

    def state_bytes(self, mode: str) -> int:
        """Bytes of state per trained parameter in the store: moments, and the master if it is not the parameter."""
        is_master = self.dtype == "fp32" and (self.device_bytes == 0 or mode == "full")
        return _MOMENTS + (0 if is_master else 4)

    def stored_bytes(self, mode: str) -> int:
        """Further bytes per trained parameter in the store: the gradient, and the parameter."""
        return self.dtype_bytes * {"gradients": 1, "full": 2}.get(mode, 0)


@dataclass(frozen=True)
class OffloadPlan:
    """Peak bytes in each place, the seconds of a step (everything to nothing overlapped), and what bounds it.

    `largest_params` is the largest model that fits in this mode.
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
    """The plans of every mode and store."""
    for mode, to in ROWS:
        yield plan(run, mode, to)


def plan(run: OffloadRun, mode: str, to: str) -> OffloadPlan:
    """The plan of one mode and store, which must be in ROWS."""
    device, host, disk = _bytes(run, mode, to)
    times = _times(run, mode, to)
    step = [times[name] for name in ("pcie", "memory", "disk")]
    least, most = times["compute"] + max(step), sum(times.values())
    bound = max(times, key=lambda name: times[name])
    return OffloadPlan(
        mode, to, device, host, disk, (least, most), bound, _fits(run, mode, to), _largest(run, mode, to)
    )


def chosen(run: OffloadRun) -> OffloadPlan | None:
    """The fastest of the plans that fit; None if none fits."""
    return min((made for made in plans(run) if made.fits), key=lambda made: made.seconds, default=None)


def _bytes(run: OffloadRun, mode: str, to: str) -> tuple[float, float, float]:
    """Bytes of device, host and disk. Without a device its bytes count for the host."""
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
    """Bytes of the buffers for copies, on device and host. Slices of a module are read ahead; from memory only one."""
    chunk, ahead = run.dtype_bytes * _chunk(run, mode), run.buffer_count - 2
    module = run.dtype_bytes * run.largest
    come = min(chunk, module)
    if to == "cpu" and ahead > 0:
        come = max(come, module / ahead)
    leave = run.buffer_count * chunk if mode != "state" else 0.0
    away = 2 * chunk * {"state": 2, "gradients": 1}.get(mode, 0)
    return leave + (run.buffer_count * come if mode == "full" else 0.0), away


def _own(run: OffloadRun, mode: str, to: str) -> float:
    """What torch's step allocates: briefly for one piece of a parameter, and in the first step a chunk's moments.

    Host memory that is not page-locked is only allocated when it is written, page by page, so the last chunk's moments
    exist before their places in the store do.
    """
    chunk = _chunk(run, mode)
    is_there = to == "files" or run.device_bytes > 0
    return 8 * min(chunk, run.largest or chunk) + (_MOMENTS * chunk if is_there else 0)


def _chunk(run: OffloadRun, mode: str) -> float:
    """How many elements a chunk has."""
    most = max(1, int(run.chunk_mb * 2**20 / run.state_bytes(mode)) // UNIT) * UNIT
    return min(most, -(-run.stepped // UNIT) * UNIT)


def _times(run: OffloadRun, mode: str, to: str) -> dict[str, float]:
    """The seconds that each part of the machine works in a step."""
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
    """The largest model that fits, by bisection. `largest` and `trained` keep their share of the model."""
    low, high = 0.0, 1e15
    while high - low > 1e-3 * max(low, 1e6):
        params = (low + high) / 2
        trained = None if run.trained is None else run.trained / run.params * params
        sized = replace(run, params=params, trained=trained, largest=run.largest / run.params * params)
        is_there = _fits(sized, mode, to)
        low, high = (params, high) if is_there else (low, params)
    return low
