"""Top-k frames: of each block the largest elements, their places and four bits of each. The rest stays in the residual.

A codec of the study alone, as signs end lower at equal bits (`docs/local-steps.md`). Sources: Aji & Heafield
(arXiv 1704.05021), top-k with error feedback; SparseLoCo (arXiv 2508.15706), in few bits and in rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.comm import Codec
from onebit.comm.kernels import reference

NAN_BF16 = 0x7FC0


@dataclass(frozen=True)
class TopKCodec(Codec):
    """16·kept/block + 16/block bits per element: .254 by default.

    Frame of a row of J blocks: a word of 16 bits for each kept element, 16·place + (q mod 16), little-endian, in the
    order of places; then the scales and the bytes up to a multiple of 16 of an int4 frame. A block's kept elements are
    those of the largest |c|, of equals the first; their q and scale are those of an int4 block of these elements.
    block: elements of which some are kept, at most 4096.
    """

    name = "topk"
    block: int = 4096
    kept: int = 64

    def frame_bytes(self, n: int) -> int:
        return -(-2 * (n // self.block) * (self.kept + 1) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        K, N = x_KN.shape
        J, words = N // self.block, N // self.block * self.kept
        if error_KN is not None:
            x_KN.add_(error_KN)
        c_KJn, places = x_KN.view(K, J, self.block), torch.arange(self.block, device=x_KN.device)
        if counts_KJ is not None:
            c_KJn.masked_fill_(places >= counts_KJ.unsqueeze(-1), 0.0)
        # The bits of |c| grow with it, and NaN is above all. With the place below them no two are the same, so every
        # device finds the same elements.
        order_KJn = (c_KJn.abs().view(torch.int32).long() << 12) | (4095 - places)
        place_KJk = order_KJn.topk(self.kept, sorted=False).indices.sort().values
        kept_KW = c_KJn.gather(-1, place_KJk).view(K, words)
        q_KW, bits_KJ = reference.quantise_(kept_KW, None, None, block=self.kept, top=7)
        c_KJn.scatter_(-1, place_KJk, kept_KW.view(place_KJk.shape))
        c_KJn.masked_fill_((bits_KJ == NAN_BF16).unsqueeze(-1), 0.0)
        word_KW = (place_KJk.view(K, words) << 4) | (q_KW & 0xF)
        frames_KB[:, : 2 * words] = torch.stack((word_KW & 0xFF, word_KW >> 8), -1).view(K, 2 * words)
        reference.write_scales(frames_KB, 2 * words, bits_KJ)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        reference.weigh_into_(out_KN, self._values(frames_KB, out_KN.shape[1]), weight, keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        reference.mean_into_(out_N, frames_KB, lambda frame_1B: self._values(frame_1B, len(out_N))[0])

    def _values(self, frames_KB: Tensor, n: int) -> Tensor:
        K, J, words = len(frames_KB), n // self.block, n // self.block * self.kept
        s_KJ1 = reference.scales_at(frames_KB, 2 * words, J).float().unsqueeze(-1)
        low_high = frames_KB[:, : 2 * words].reshape(K, J, self.kept, 2).long()
        word_KJk = low_high[..., 0] | (low_high[..., 1] << 8)
        q_KJk = ((word_KJk & 0xF) ^ 8) - 8
        values_KJn = torch.zeros(K, J, self.block, device=frames_KB.device, dtype=torch.float32)
        values_KJn.scatter_(-1, word_KJk >> 4, q_KJk * s_KJ1)
        return values_KJn.view(K, n)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        J = n // self.block
        return reference.scales_at(frames_KB, 2 * J * self.kept, J).isfinite().all()
