"""Whether OneBitAdam on several ranks should encode and update on devices or on hosts: bytes and seconds.

    onebit plan --params 13e9 --hosts 4 --device-gb 32 --host-gb 256 --link 10gbit

FSDP2 shards over the ranks of a host ("sharding": "intra_node"), and the optimizer works on each shard in place;
`offload_optimizer` decides on the place. Encoding reads gradients and state, and writes state and frames: 26.7 bytes
per element with errors in float32, 21.7 in bfloat16 (scripts/records/traffic_2026-11.md), of device or host memory.
Frames pass through host memory in both cases. If the state is in host memory, float32 shards also cross PCIe to be
gathered (once, at stage 3 twice), and float32 gradients on the way back. With "files" the host encodes, and the state
is in mapped files, none of whose pages stay in memory: all that a step reads and writes of it crosses the disk.
docs/offload.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..plan import DTYPE_BYTES, Run
from ..plan import plan as plan_optimizer

_GATHERS = {2: 1, 3: 2}  # gathers of a parameter per step, by stage
STAGES, PLACES = tuple(_GATHERS), ("device", "host", "files")
_OPTIMIZER = "OneBitAdam"
_FLOAT32 = 4.0
_WARM_STATE = 12.0  # m, v and the denominator, before what warm-up alone needs is given up
_TRAFFIC = {4: 26.7, 2: 21.7}  # by bytes of an error


@dataclass(frozen=True)
class EncodeRun:
    """A run to estimate: numbers of a rank's device, and of a host, which its ranks share.

    `run.compute_s` is that of a rank's step; `largest` counts the elements of the largest module. Rates are in bytes
    per second: PCIe in one direction, device and host memory, and disk. disk_bytes = 0 means that there is no disk.

    Raises:
        ValueError: A number is out of range.
    """

    run: Run
    device_bytes: float
    host_bytes: float
    largest: float = 0.0
    pcie_per_s: float = 25e9
    device_memory_per_s: float = 1e12
    host_memory_per_s: float = 100e9
    disk_bytes: float = 0.0
    disk_per_s: float = 5e9

    def __post_init__(self) -> None:
        if self.run.world_size < 2 or not 0 <= self.largest <= self.run.params:
            raise ValueError(f"expected two ranks or more, and a largest module within the model: {self}")
        rates = self.pcie_per_s, self.device_memory_per_s, self.host_memory_per_s, self.disk_per_s
        if min(self.device_bytes, self.host_bytes, *rates) <= 0 or self.disk_bytes < 0:
            raise ValueError(f"expected a device, host memory and rates above 0: {self}")


@dataclass(frozen=True)
class EncodePlan:
    """Bytes of a device, a host and its disk, and the seconds of a step by what takes them.

    `place` is where the state is, one of PLACES; the optimizer works on the device or on the host. `fits` tells whether
    all three have room.
    """

    stage: int
    place: str
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    times: dict[str, float]
    fits: bool

    @property
    def seconds(self) -> tuple[float, float]:
        """The least seconds (the slowest part after computing) and the most (the sum of all parts)."""
        others = [s for name, s in self.times.items() if name != "compute"]
        return self.times["compute"] + max(others), sum(self.times.values())

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.times, key=lambda name: self.times[name])


def encode_plans(run: EncodeRun) -> Iterator[EncodePlan]:
    """The plans of every stage and place; with files if there is a disk."""
    for stage in STAGES:
        for place in PLACES if run.disk_bytes else PLACES[:2]:
            yield encode_plan(run, stage, place)


def encode_plan(asked: EncodeRun, stage: int, place: str) -> EncodePlan:
    """The plan of one of STAGES in one of PLACES."""
    run = asked.run
    P, S, b = run.params, run.ranks_per_host, DTYPE_BYTES[run.dtype]
    made = plan_optimizer(run, _OPTIMIZER, stage if S > 1 else 0)  # one rank per host has the state of stage 0
    assert made is not None, "there is a one-bit form of every number of ranks"
    shard = _FLOAT32 / S  # masters; gradients are as large
    near = b * ((P if stage == 2 else asked.largest) + asked.largest)  # gathered, and a module's gradients
    frames = made.bits / 8 * P  # that a rank sends, and as many come
    state, disk, paged = made.state, 0.0, 0.0
    if place == "files":
        errors = run.error_bytes * (1 + 1 / run.hosts)
        state, disk, paged = 0.0, P * (_WARM_STATE + errors), P * (_FLOAT32 + 2 * errors)
    if place == "device":
        device, host = near + P * (2 * shard + made.state), 2 * frames * S
        crossing, memory_per_s = 2 * frames, asked.device_memory_per_s
    else:
        device, host = near, S * (P * (2 * shard + state) + 2 * frames)
        crossing, memory_per_s = (_GATHERS[stage] + 1) * shard * P, asked.host_memory_per_s / S
    times = {
        "compute": run.compute_s,
        "pcie": crossing / asked.pcie_per_s,
        "memory": P / S * _TRAFFIC[run.error_bytes] / memory_per_s,
        "network": 8 * frames * S / run.link_bits_per_s,
        "disk": paged / asked.disk_per_s,
    }
    fits = device <= asked.device_bytes and host <= asked.host_bytes and disk <= asked.disk_bytes
    return EncodePlan(stage, place, device, host, disk, times, fits)


def chosen_place(run: EncodeRun) -> EncodePlan | None:
    """The fastest of the plans that fit; None if none fits."""
    return min((made for made in encode_plans(run) if made.fits), key=lambda made: made.seconds, default=None)
