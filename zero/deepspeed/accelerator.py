"""DeepSpeed's `deepspeed.accelerator`: the device that this process computes on, CUDA if there is one, else the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .comm import default_backend

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """CUDA or the CPU under one set of names. What the CPU has not (streams, its own memory) is a no-op or 0 there."""

    def __init__(self, is_cuda: bool):
        self.is_cuda = is_cuda

    # ---------------------------------------------------------------- devices

    def is_available(self) -> bool:
        """Always: there is a CPU."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """What torch.device takes: "cuda", "cuda:1", "cpu"."""
        if not self.is_cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The same as a torch.device."""
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        """Devices of this host."""
        return torch.cuda.device_count() if self.is_cuda else 1

    def set_device(self, device_index: int) -> None:
        """Of this process, from here on."""
        if self.is_cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """The number of this process's device."""
        return torch.cuda.current_device() if self.is_cuda else 0

    def current_device_name(self) -> str:
        """What torch.device takes for it."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """What `init_distributed` takes for it."""
        return default_backend()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the device that computes."""
        return tensor.device.type == self.device().type

    # ---------------------------------------------------------------- time and memory

    def synchronize(self, device_index: int | None = None) -> None:
        """Until everything queued has been computed."""
        if self.is_cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Give unused cached memory back."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors."""
        return torch.cuda.memory_allocated(device_index) if self.is_cuda else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes of tensors so far."""
        return torch.cuda.max_memory_allocated(device_index) if self.is_cuda else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Count the most from here on."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that the device has; of a CPU 0: other programs use them, too."""
        if not self.is_cuda:
            return 0
        return torch.cuda.get_device_properties(
            self.current_device() if device_index is None else device_index
        ).total_memory

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """The tensor in page-locked memory, or itself where no device would read it."""
        return tensor.pin_memory() if self.is_cuda else tensor

    # ---------------------------------------------------------------- types and random numbers

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 can be computed in."""
        return not self.is_cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether float16 can be computed in."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Of this device's generator."""
        torch.cuda.manual_seed(seed) if self.is_cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Of every device's generator."""
        torch.cuda.manual_seed_all(seed) if self.is_cuda else torch.manual_seed(seed)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Of this device's generator."""
        if not self.is_cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state(self.current_device() if device_index is None else device_index)

    def set_rng_state(self, state: Tensor, device_index: int | None = None) -> None:
        """Take back what `get_rng_state` gave."""
        if not self.is_cuda:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self.current_device() if device_index is None else device_index)


def get_accelerator() -> Accelerator:
    """The device of this process."""
    return Accelerator(torch.cuda.is_available())
