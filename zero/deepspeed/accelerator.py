"""DeepSpeed's `deepspeed.accelerator`: the device of this process, CUDA if there is one, else the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .comm import default_backend

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """CUDA or the CPU under one set of names. Functions that the CPU lacks do nothing or return 0 there.

    Args:
        is_cuda: Whether this process computes on CUDA.
    """

    def __init__(self, is_cuda: bool):
        self.is_cuda = is_cuda

    # ---------------------------------------------------------------- devices

    def is_available(self) -> bool:
        """Always True: there is a CPU."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """The device's name for torch: "cuda", "cuda:1", "cpu"."""
        if not self.is_cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The device as a torch.device."""
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        """Number of devices of this host."""
        return torch.cuda.device_count() if self.is_cuda else 1

    def set_device(self, device_index: int) -> None:
        """Set this process's device."""
        if self.is_cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """The number of this process's device."""
        return torch.cuda.current_device() if self.is_cuda else 0

    def current_device_name(self) -> str:
        """The name of this process's device for torch."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """The backend for `init_distributed`: "nccl" or "gloo"."""
        return default_backend()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the device that computes."""
        return tensor.device.type == self.device().type

    # ---------------------------------------------------------------- time and memory

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until all queued work is done."""
        if self.is_cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Free unused cached memory."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device."""
        return torch.cuda.memory_allocated(device_index) if self.is_cuda else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak bytes of tensors on the device so far."""
        return torch.cuda.max_memory_allocated(device_index) if self.is_cuda else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peak."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory; 0 for a CPU, whose memory other programs use, too."""
        if not self.is_cuda:
            return 0
        return torch.cuda.get_device_properties(
            self.current_device() if device_index is None else device_index
        ).total_memory

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A copy in page-locked memory; without CUDA the tensor itself."""
        return tensor.pin_memory() if self.is_cuda else tensor

    # ---------------------------------------------------------------- types and random numbers

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return not self.is_cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating-point types that the device computes in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def manual_seed(self, seed: int) -> None:
        """Seed this device's generator."""
        torch.cuda.manual_seed(seed) if self.is_cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device's generator."""
        torch.cuda.manual_seed_all(seed) if self.is_cuda else torch.manual_seed(seed)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """State of this device's generator."""
        if not self.is_cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state(self.current_device() if device_index is None else device_index)

    def set_rng_state(self, state: Tensor, device_index: int | None = None) -> None:
        """Restore a state from `get_rng_state`."""
        if not self.is_cuda:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self.current_device() if device_index is None else device_index)


def get_accelerator() -> Accelerator:
    """The device of this process."""
    return Accelerator(torch.cuda.is_available())
