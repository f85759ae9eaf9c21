"""Compresses what pipeline stages send each other (activations and their gradients) to 8 or 4 bits per element.

`CompressedStage` is torch.distributed.pipelining's PipelineStage with compressed messages; it works with every
schedule. `quantised_boundary` does to a tensor in one process what the wire between two stages does. The codecs are
those of the collectives (`onebit/comm/`); `run.py` builds the pipeline. The defaults follow the measurements in
`scripts/records/pipeline_2026-11.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage

from ...comm import CODECS, Codec, codec_named, torch_versions
from ...comm.codecs.tensors import decode_, encode, frame_bytes, padded

# "fp32" sends tensors unchanged, in whatever type a stage computes. Blocks have 64 elements: with 256, int4 activations
# leave twice the error in the gradients of weights, for 5 % fewer bytes. The record compares the choices.
_BLOCK = 64
WIRES: dict[str, Codec | None] = {
    name: codec_named(name, _BLOCK if kind.leaves_residual else 8) for name, kind in CODECS.items()
} | {"fp32": None}


class CompressedStage(PipelineStage):
    """A PipelineStage whose tensors travel to other stages as frames of a codec.

    torch's stage decides what is sent and received, and between which ranks; this class sends frames instead:
    1. get_fwd_send_ops, get_bwd_send_ops: floating tensors are encoded; others are sent unchanged.
    2. get_fwd_recv_ops, get_bwd_recv_ops: a frame is received next to the buffer that torch's stage has allocated.
    3. forward_one_chunk, backward_one_chunk: the schedule has waited for the frames; they are decoded into that buffer.
    Neighbours on one rank (V schedules) pass each other tensors, without sending or rounding.

    If a value is not finite, the receiver gets NaN for its block, so that a vote on overflow notices. Values that round
    up beyond float16's range arrive as infinite.

    Args:
        *args: PipelineStage's arguments.
        forward_codec: The codec of activations; None (default) sends them unchanged. The same on all stages.
        backward_codec: The codec of their gradients; None (default) sends them unchanged. The same on all stages.
        error_feedback: Whether the residual of a gradient's frame is added to the gradient of the same micro-batch in
            the next step, also if the optimizer skips a step. Needs one float32 per element that this rank sends back,
            and gains little: see the record. False by default. For activations it would do harm, and is not offered.
        **kwargs: PipelineStage's keyword arguments.

    Attributes:
        sent_bytes: Payload bytes sent to other ranks since the stage was made, activations and gradients.

    Raises:
        ValueError: error_feedback without a backward_codec that leaves a residual.
        ImportError: torch is older than 2.9: its schedules cannot evaluate.
    """

    def __init__(
        self,
        *args: Any,
        forward_codec: Codec | None = None,
        backward_codec: Codec | None = None,
        error_feedback: bool = False,
        **kwargs: Any,
    ) -> None:
        """See the class."""
        torch_versions.require_pipelines()
        super().__init__(*args, **kwargs)
        if error_feedback and not (backward_codec and backward_codec.leaves_residual):
            raise ValueError(
                f"error_feedback returns what few bits leave out of gradients, and backward_codec is {backward_codec}; "
                "give one of few bits, an Int8Codec for one, or leave error_feedback out"
            )
        self.forward_codec, self.backward_codec = forward_codec, backward_codec
        self.error_feedback = error_feedback
        self.sent_bytes = 0
        self._errors: dict[str, Tensor] = {}  # of gradients, by micro-batch and place in the tuple: "3.0"
        self._arriving: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}  # frames and where they belong

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """This stage's residuals on this rank: float32 [1, N] each; empty without error feedback."""
        return {"errors": dict(self._errors)}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from a copy of a `state_dict` of the same stage with equally many micro-batches."""
        self._errors = {key: error.to(self.device, copy=True) for key, error in state.get("errors", {}).items()}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return self._sending(super().get_fwd_send_ops(fwd_chunk_id), self.forward_codec)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        errors = [self._error(f"{bwd_chunk_id}.{k}", op.tensor) for k, op in enumerate(ops)] if ops else []
        return self._sending(ops, self.backward_codec, errors)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return self._receiving(super().get_fwd_recv_ops(fwd_chunk_id), self.forward_codec, ("forward", fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        return self._receiving(super().get_bwd_recv_ops(bwd_chunk_id), self.backward_codec, ("backward", bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._unpack(self.forward_codec, ("forward", fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._unpack(self.backward_codec, ("backward", bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._arriving.clear()

    # Before the first step torch runs the stage on uninitialised memory, to learn the shapes of what is sent.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._leaving_no_trace():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._leaving_no_trace():
            return super()._prepare_backward_infra(*args, **kwargs)

    def _to_tensor(self, arg: Any) -> Tensor:
        x: Tensor = super()._to_tensor(arg)
        if not isinstance(arg, Tensor):
            with torch.no_grad():
                x.zero_()  # uninitialised integers could be indices out of range
        return x

    @contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        """Restore buffers (running statistics) afterwards; torch itself restores random streams."""
        held = [(buffer, buffer.detach().clone()) for buffer in self.submod.buffers()]
        yield
        for buffer, before in held:
            buffer.data.copy_(before)  # hidden from autograd, whose backward pass of that run may still follow

    def _sending(self, ops: list[P2POp], codec: Codec | None, errors: Sequence[Tensor | None] = ()) -> list[P2POp]:
        for op, error in zip_longest(ops, errors):
            if codec is not None and op.tensor.is_floating_point():
                op.tensor = encode(codec, op.tensor, error)
            self.sent_bytes += op.tensor.nbytes
        return ops

    def _error(self, key: str, x: Tensor) -> Tensor | None:
        if not self.error_feedback or not x.is_floating_point():
            return None
        assert self.backward_codec is not None
        shape = (1, padded(self.backward_codec, x.numel()))
        if key not in self._errors:
            self._errors[key] = x.new_zeros(shape, dtype=torch.float32)
        if self._errors[key].shape != shape:
            raise ValueError(
                f"stage {self.stage_index}: the error of gradient {key} is of shape {list(self._errors[key].shape)}, "
                f"its gradient needs {list(shape)}; keep the size of a micro-batch, or load_state_dict({{}}) to forget"
            )
        return self._errors[key]

    def _receiving(self, ops: list[P2POp], codec: Codec | None, what: tuple[str, int]) -> list[P2POp]:
        for op in ops:
            if codec is not None and op.tensor.is_floating_point():
                frame = op.tensor.new_empty(frame_bytes(codec, op.tensor.numel()), dtype=torch.uint8)
                self._arriving.setdefault(what, []).append((frame, op.tensor))
                op.tensor = frame
        return ops

    def _unpack(self, codec: Codec | None, what: tuple[str, int]) -> None:
        for frame, buffer in self._arriving.pop(what, []):
            assert codec is not None
            decode_(codec, frame, buffer)


def quantised_boundary(x: Tensor, forward_codec: Codec | None, backward_codec: Codec | None) -> Tensor:
    """x as the next stage would receive it; its gradient is what this stage would receive back.

    For a model in one process that must compute what a pipeline computes: as a reference, or to evaluate weights that
    were trained with compressed messages. A codec of None changes nothing.
    """
    return _Boundary.apply(x, forward_codec, backward_codec)  # type: ignore[no-any-return,no-untyped-call]


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_codec: Codec | None, backward_codec: Codec | None) -> Tensor:
        ctx.backward_codec = backward_codec
        return _sent(forward_codec, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sent(ctx.backward_codec, grads[0]), None, None


def _sent(codec: Codec | None, x: Tensor) -> Tensor:
    if codec is None:
        return x.view_as(x)
    out = torch.empty_like(x)
    decode_(codec, encode(codec, x), out)
    return out
