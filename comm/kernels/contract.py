"""Kernels: the contract. The names that a backend has, and its functions for each frame that it computes.

A backend is a module that has the names of `Backend`; `__init__.py` lists them. `reference.py`, `int4_reference.py` and
`log4_reference.py` specify the functions; `tests/unit/test_kernel_contract.py` checks both for every backend of
the list.

Shape legend: K and W rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from .operands import EncodeOutput, GradientSum, LocalStep, MasterStep, MomentumInputs, OwnerStep, ParamUpdate


class Backend(Protocol):
    """One implementation of the frames: a module that imports no optional package.

    NAME: value of the codecs' option `kernel`. SERVES: device type of the tensors it takes; None: any.
    FRAMES: the frames that it computes ("sign", "int8", "int4", "log4"), with the module of the functions of each.
    """

    @property
    def NAME(self) -> str: ...

    @property
    def SERVES(self) -> str | None: ...

    @property
    def FRAMES(self) -> Mapping[str, str]: ...

    def why_not(self) -> str:
        """One sentence: what is missing on this machine and what to do. Empty where the backend runs."""

    def describe(self) -> str:
        """Name and version of what runs. Called only if `why_not` is empty."""


class SignKernel(Protocol):
    """The functions of the sign frame, and the steps of an optimizer that are fused with it."""

    def encode(
        self,
        x_KN: Tensor,
        error_KN: Tensor | None,
        frames_KB: Tensor,
        counts_KJ: Tensor | None,
        *,
        block: int,
        scale: str,
    ) -> None: ...

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None: ...

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor, *, block: int) -> None: ...

    def encode_mean(self, received_WB: Tensor, out: EncodeOutput, *, block: int, scale: str) -> None: ...

    def encode_momentum(self, momentum: MomentumInputs, out: EncodeOutput, *, block: int, scale: str) -> None: ...

    def apply(self, frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None: ...

    def local_step(self, step: LocalStep, *, block: int) -> None: ...

    def correct_residual(self, momentum: MomentumInputs, factor: float, residual_KN: Tensor, *, block: int) -> None: ...

    def momentum_sums(self, momentum: MomentumInputs, sums_KJ2: Tensor, *, block: int) -> None: ...

    def owner_step(self, step: OwnerStep, *, block: int) -> None: ...

    def step_masters(self, step: MasterStep, *, block: int, scale: str) -> None: ...

    def encode_gradients(self, step: GradientSum, *, block: int, scale: str) -> None: ...


class Int8Kernel(Protocol):
    """The functions of the int8 frame."""

    def int8_encode(
        self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
    ) -> None: ...

    def int8_decode(self, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None: ...

    def int8_decode_mean(self, frames_KB: Tensor, out_N: Tensor, *, block: int) -> None: ...


class Int4Kernel(Protocol):
    """The functions of the int4 frame."""

    def int4_encode(
        self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
    ) -> None: ...

    def int4_decode(self, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None: ...

    def int4_decode_mean(self, frames_KB: Tensor, out_N: Tensor, *, block: int) -> None: ...

    def int4_apply(self, frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None: ...

    def int4_step_masters(self, step: MasterStep, *, block: int) -> None: ...


class Log4Kernel(Protocol):
    """The functions of the log4 frame."""

    def log4_encode(
        self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
    ) -> None: ...

    def log4_decode(self, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None: ...

    def log4_decode_mean(self, frames_KB: Tensor, out_N: Tensor, *, block: int) -> None: ...


CONTRACTS: Mapping[str, type] = {"sign": SignKernel, "int8": Int8Kernel, "int4": Int4Kernel, "log4": Log4Kernel}
