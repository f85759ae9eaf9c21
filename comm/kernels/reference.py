"""The frames in pure torch: the specification. Every other kernel gives the same bytes and the same floats.

Sign frame (`encode`, `decode`, `decode_mean`) of a row of N = J·block elements:

    offset 0            J·block/8 bytes   sign bits: element i is bit i%8 (LSB first) of byte i//8; 1 = minus
    offset J·block/8    J·2 bytes         scale of each block, bfloat16, little-endian
    then                zero bytes up to a multiple of 16

Rules that leave no freedom to an implementation:
1. c = x + error, one float32 addition. The sign of c is its sign bit: -0.0 is minus.
2. The scale of a block with n > 0 real elements is sqrt((Σ c²)/n) ("rms") or (Σ |c|)/n ("mean_abs") in float32, rounded
   to bfloat16 to nearest even. The sum runs in 16 lanes: lane l adds elements l, l+16, l+32, … in this order, padding
   as +0.0; then lanes are added in halves: l + (l+8), l + (l+4), l + (l+2), l + (l+1). Each operation rounds once; no
   fused multiply-add. A block without real elements has scale 0.
3. If the bfloat16 scale is not finite, the block travels as scale 0x7FC0 (NaN) and zero bits, and leaves residual 0.
   Squares overflow above 1.8e19 and vanish below 1e-23: the former counts as non-finite, the latter as zero.
4. The residual is c - (±scale), one float32 subtraction with the *rounded* scale. Padding has zero bits and residual 0.
5. A decoded value is the scale with the element's sign bit. A mean adds row after row and multiplies by float32(1/K).
   `keep·out + weight·value` rounds each product and the sum. Values that cancel add up to +0.0, so a tie is a plus when
   the mean is encoded; float32 addition in row order decides whether three or more cancel. The sign and the payload of
   a NaN result are left open: machines differ.

Fused steps over sign frames. They define c, and the destination of decoded values; the frame is as above:
6. `encode_mean`: c = mean + error, the mean by rule 5. `encode_momentum`: c = (y·add + m·keep) + error, where
   y = (g·unscale) / sqrt(D·D + own·(g·unscale)²), the square being one product, and m is a decoded value or a float32.
   D is as given; or, from a variance v, D = sqrt(max(v·correction, floor of the block)) + eps.
   Everything in float32, each operation rounded once. A bfloat16 residual is the float32 one, rounded to nearest even.
7. `apply`: p ← keep·p + weight·value in float32, by rule 5, then rounded to p's own type.

A step without frames, of a rank that exchanges nothing in it:
8. `local_step`: m ← y·add + m·keep, y as in rule 6, for every element of the rows (without a gradient y is +0.0). With
   s = m·weight, u ← u + s. For parameters: anchor ← p in float32, then p ← p·kept - s, rounded to p's own type.
   Everything in float32, each operation rounded once. Anchors change where there are parameters, and nowhere else.

A step of the rank that owns a chunk and has received its frames from W ranks, with means and values by rule 5:
9. `owner_step`: m̂ = mean·correction1, q̂ = q·correction1, q the owner's own values; s̄ = ((Σ scales·1/W)·correction1)·
   inverse_limit, the sum in row order. v ← v + ((m̂·common + g·own)·g - v)·weight; v̂ = larger(0, v)·correction2;
   least = larger(s̄·s̄, (Σ v̂·floor)/n); D = sqrt(larger(v̂, least)) + eps; direction = m̂/D. Sums of a block, also those
   of g², q², g·q̂ and g·m̂, as in rule 2; n is its count, at least 1. larger(a, b) is a if a > b and else b, so that
   a NaN in a variance is one in D. After the count v stays, D is 1, the direction +0.0, and all sums take +0.0.
   Everything in float32, each operation rounded once.

The owner's master weights x, whose replicas receive a frame of what they lack:
13. `step_masters`: x ← x·keep + u·weight for the real elements; c = x - replica; the frame by rules 1 to 4, or by those
   of the int4 frame. Everything in float32, each operation rounded once.

Frames of a residual that accumulates gradients. `owed` is that residual:
10. `encode_gradients`: c = (g·unscale)·add + owed; without a gradient the product is +0.0; frames by rules 1 to 4.
   owed stays, or becomes (c - value) + value·returned by rules 4 and 5, rounded to its own type: the result of `encode`
   and then `decode`, in one pass. Padding becomes +0.0, a block that travels as NaN becomes NaN, and one without real
   elements stays as it is.

The residual of frames whose gradients turn out to have another factor, after they were sent:
11. `correct_residual`: residual ← residual + (y' - y)·add, y as in rule 6, and y' the same with unscale·factor instead
   of unscale, a product that is rounded once from float64. Where there is no gradient it stays. Everything in float32,
   each operation rounded once; a bfloat16 residual is rounded as in rule 6.

The norm by which gradients are clipped that are not averaged yet:
12. `momentum_sums`: sums of g² and g·(m·D) of each block, in lanes as in rule 2, D and m as in rule 6; +0.0 without a
   gradient. Everything in float32, each operation rounded once. `encode_momentum` computes them too if it is asked to,
   on the host in the same pass.

Int8 frame (`int8_encode`, `int8_decode`, `int8_decode_mean`) of a row of N = J·block elements:

    offset 0    N bytes      q of each element, two's complement
    offset N    J·2 bytes    scale s of each block, bfloat16, little-endian
    then        zero bytes up to a multiple of 16

Its rules, each operation in float32, rounded once:
1. c = x + error; padding is +0.0. s = max|c| / 127, a division, rounded *up* to the next bfloat16.
2. q = clamp(round(c / s), -127, 127), a division, ties to even; by 1 instead of s if s = 0.
3. A block with a NaN or an infinity, or so large that 128·s is one, travels as scale 0x7FC0 and zero bytes, and leaves
   residual 0. So a frame is finite if 128·s is finite for all its scales: no byte decodes to more than that.
4. The residual is c - q·s, where q keeps the sign of a zero: c = -0.0 leaves +0.0.
5. A decoded value is q·s; mean and `keep·out + weight·value` as above.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .arguments import check_shape
from .operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
    MomentumInputs,
    OwnerStep,
    ParamUpdate,
    Variance,
)

NAME = "reference"
SERVES = None
FRAMES = {"sign": ".reference", "int8": ".reference", "int4": ".int4_reference", "log4": ".log4_reference"}

LANES = 16
_NAN_BF16 = 0x7FC0


def why_not() -> str:
    """It runs everywhere."""
    return ""


def describe() -> str:
    return "reference (pure torch)"


def encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int, scale: str
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32, in place; error float32/bfloat16, read."""
    K, N = x_KN.shape
    J = N // block
    check_shape(frames_KB, K, N // 8 + 2 * J)
    c = x_KN if error_KN is None else x_KN + error_KN
    c_KJn = c.reshape(K, J, block)
    real: Tensor | None = None
    # A tensor of its device: a Python divisor becomes a multiplication by its reciprocal on CUDA.
    n = x_KN.new_full((), float(block))
    if counts_KJ is not None:
        real = torch.arange(block, device=c.device) < counts_KJ.unsqueeze(-1)
        c_KJn = torch.where(real, c_KJn, 0.0)
        n = counts_KJ.clamp(min=1).to(torch.float32)
    terms = c_KJn.abs() if scale == "mean_abs" else c_KJn * c_KJn
    mean_KJ = _lane_sum(terms) / n
    scale_KJ = (mean_KJ if scale == "mean_abs" else _sqrt(mean_KJ)).to(torch.bfloat16)
    bad_KJ = ~scale_KJ.isfinite()

    minus = c_KJn.view(torch.int32) < 0
    minus &= ~bad_KJ.unsqueeze(-1)
    if real is not None:
        minus &= real
    frames_KB[:, : N // 8] = _pack_bits(minus.view(K, N))
    write_scales(frames_KB, N // 8, torch.where(bad_KJ, _NAN_BF16, scale_KJ.view(torch.int16)).to(torch.int16))

    s_KJ1 = scale_KJ.to(torch.float32).unsqueeze(-1)
    residual = c_KJn - torch.where(minus, -s_KJ1, s_KJ1)
    residual.masked_fill_(bad_KJ.unsqueeze(-1), 0.0)
    if real is not None:
        residual.masked_fill_(~real, 0.0)
    x_KN.copy_(residual.view(K, N))


def decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """out ← keep·out + weight·values; out float32 [K, N]."""
    weigh_into_(out_KN, _values(frames_KB, out_KN.shape[1], block), weight, keep)


def decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """out ← mean over the K frames; out float32 [N]."""
    mean_into_(out_N, frames_KB, lambda frame_1B: _values(frame_1B, out_N.shape[0], block)[0])


def encode_mean(received_WB: Tensor, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frame ← frame of c = mean of the W frames + error; residual ← c - decode(frame). One row goes out."""
    c = torch.empty(out.residual_KN.shape, device=out.residual_KN.device, dtype=torch.float32)
    decode_mean(received_WB, c[0], block=block)
    _send(c, out, block=block, scale=scale)


def encode_momentum(momentum: MomentumInputs, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frames ← frames of c, the momentum with this rank's gradient and what it owes (rule 6); residual ← the rest."""
    old_KN = _values(momentum.old, out.residual_KN.shape[1], block) if momentum.is_packed else momentum.old
    _send(momentum_of(momentum, old_KN), out, block=block, scale=scale)
    if out.sums_KJ2 is not None:
        sums_of(momentum, old_KN, out.sums_KJ2)


def momentum_of(momentum: MomentumInputs, old_KN: Tensor) -> Tensor:
    """c without the residual: add·y + keep·m with y = g/√(D² + own·g²), float32 [K, N]. old: m, float32 [K, N]."""
    weights, D = momentum.weights, momentum.D_KN
    g = gathered(momentum, old_KN).mul_(weights.unscale)
    D = D.denominator(_sqrt) if isinstance(D, Variance) else D
    return _normalised(g, D, weights.own) * weights.add + old_KN * weights.keep


def _send(c_KN: Tensor, out: EncodeOutput, *, block: int, scale: str) -> None:
    encode(c_KN, out.error_KN, out.frames_KB, out.counts_KJ, block=block, scale=scale)
    out.residual_KN.copy_(c_KN)


def apply(frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None:
    """p ← keep·p + weight·value, parameters in place, with the values of frames of rows of n elements (rule 7)."""
    update_with(_values(frames_KB, n, block), update)


def update_with(values_KN: Tensor, update: ParamUpdate) -> None:
    """p ← keep·p + weight·value, parameters in place."""
    values = update.segments.views(values_KN.view(-1))
    for p, value, weight, keep in zip(update.params, values, update.weight_S, update.keep_S, strict=True):
        if p is not None:
            p.copy_((p.to(torch.float32) * keep).add_(value.view(p.shape) * weight))


def local_step(step: LocalStep, *, block: int) -> None:
    """Update m, u, anchors and parameters in place by this rank's gradients alone (rule 8)."""
    momentum, segments = step.momentum, step.momentum.segments
    m = momentum.old.copy_(momentum_of(momentum, momentum.old))
    moved = m * step.weight
    step.sum_KN.add_(moved)
    anchors = [None] * len(segments.numels) if step.anchor_KN is None else segments.views(step.anchor_KN.view(-1))
    for p, move, anchor in zip(step.params, segments.views(moved.view(-1)), anchors, strict=True):
        if p is not None:
            if anchor is not None:
                anchor.copy_(p.reshape(-1))
            p.copy_((p.to(torch.float32) * step.kept).sub_(move.view(p.shape)))


def correct_residual(momentum: MomentumInputs, factor: float, residual_KN: Tensor, *, block: int) -> None:
    """Residual ← what it would be if the gradients had been sent with `factor` times their factor (rule 11)."""
    weights, D = momentum.weights, momentum.D_KN
    D = (D.denominator(_sqrt) if isinstance(D, Variance) else D).view(-1)
    rows = (momentum.segments.views(flat) for flat in (residual_KN.view(-1), D))
    for grad, residual, d in zip(momentum.grads, *rows, strict=True):
        if grad is not None:
            g, scales = grad.reshape(-1).to(torch.float32), (weights.unscale, weights.unscale * factor)
            sent, right = (_normalised(g * scale, d, weights.own) for scale in scales)
            residual.copy_(residual + right.sub_(sent).mul_(weights.add))


def momentum_sums(momentum: MomentumInputs, sums_KJ2: Tensor, *, block: int) -> None:
    """Sums ← those of g² and g·(m·D) of each block (rule 12)."""
    n = sums_KJ2.shape[1] * block
    sums_of(momentum, _values(momentum.old, n, block) if momentum.is_packed else momentum.old, sums_KJ2)


def sums_of(momentum: MomentumInputs, old_KN: Tensor, sums_KJ2: Tensor) -> None:
    """The same for a momentum m that is not packed, float32 [K, N]."""
    g, D = gathered(momentum, old_KN), momentum.D_KN
    product = g * (old_KN * (D.denominator(_sqrt) if isinstance(D, Variance) else D))
    for k, terms in enumerate((g * g, product)):
        sums_KJ2[..., k] = _lane_sum(terms.view(*sums_KJ2.shape[:2], -1)) + 0.0  # -0.0 is +0.0 in lanes that begin at 0


def gathered(momentum: MomentumInputs, like_KN: Tensor) -> Tensor:
    """The gradients in their places, +0.0 where there is none, float32 [K, N]."""
    g = torch.zeros(like_KN.numel(), device=like_KN.device, dtype=torch.float32)
    for view, grad in zip(momentum.segments.views(g), momentum.grads, strict=True):
        if grad is not None:
            view.copy_(grad.reshape(-1))
    return g.view(like_KN.shape)


def _normalised(g: Tensor, D: Tensor, own: float) -> Tensor:
    return g / _sqrt(D * D + (g * g) * own)


def encode_gradients(step: GradientSum, *, block: int, scale: str) -> None:
    """frames ← frames of c = add·g + owed, the residual; owed becomes the new residual, or stays (rule 10)."""
    K, N = step.owed_KN.shape
    g = torch.zeros(K * N, device=step.owed_KN.device, dtype=torch.float32)
    for view, grad in zip(step.segments.views(g), step.grads, strict=True):
        if grad is not None:
            view.copy_(grad.reshape(-1))
    c_KN = g.mul_(step.unscale).mul_(step.add).view(K, N)
    encode(c_KN, step.owed_KN, step.frames_KB, step.counts_KJ, block=block, scale=scale)
    if step.returned is None:
        return
    decode(step.frames_KB, c_KN, block=block, weight=step.returned, keep=1.0)
    if step.counts_KJ is not None:
        place = torch.arange(block, device=c_KN.device)
        counts_KJ1 = step.counts_KJ.unsqueeze(-1)
        c_KJn, owed_KJn = c_KN.view(K, -1, block), step.owed_KN.view(K, -1, block)
        c_KJn.masked_fill_(place >= counts_KJ1, 0.0)
        c_KN = torch.where(counts_KJ1 > 0, c_KJn, owed_KJn.float()).view(K, N)
    step.owed_KN.copy_(c_KN)


def owner_step(step: OwnerStep, *, block: int) -> None:
    """v and m̂/D of an owner's chunk ← those of the frames of all ranks, and its own gradient (rule 9)."""
    received, (N,) = step.received_WB, step.grad_N.shape
    W, J, device = len(received), N // block, step.grad_N.device
    each, correction1, correction2 = step.correcting
    c1, c2 = (each[0].view(J, 1), each[1].view(J, 1)) if each is not None else (correction1, correction2)
    real = torch.arange(block, device=device) < step.counts_J.unsqueeze(1)
    mean = torch.empty(N, device=device, dtype=torch.float32)
    decode_mean(received, mean, block=block)
    q = torch.where(real, _values(received[step.row : step.row + 1], N, block).view(J, block), 0.0)
    g, v = torch.where(real, step.grad_N.view(J, block), 0.0), step.variance_N.view(J, block)
    m_hat, q_hat = torch.where(real, mean.view(J, block) * c1, 0.0), q * c1

    target = (m_hat * step.common + g * step.own) * g
    v.copy_(torch.where(real, v + (target - v) * step.weight, v))
    v_hat = torch.where(real, _larger(torch.zeros_like(v), v) * c2, 0.0)
    scales_WJ = scales(received, N, block=block).to(torch.float32)
    total_J = scales_WJ[0].clone()
    for row in scales_WJ[1:]:
        total_J += row
    s_J1 = ((total_J * (1.0 / W)).view(J, 1) * c1) * step.inverse_limit
    sums = [_lane_sum(x.unsqueeze(0))[0] for x in (v_hat, g * g, q * q, g * q_hat, g * m_hat)]
    n_J = step.counts_J.clamp(min=1).to(torch.float32)
    least_J1 = _larger(s_J1 * s_J1, ((sums[0] * step.floor) / n_J).unsqueeze(1))
    D = torch.where(real, _sqrt(_larger(v_hat, least_J1)) + step.eps, 1.0)
    step.direction_N.view(J, block).copy_(torch.where(real, m_hat / D, 0.0))
    if step.D_N is not None:
        step.D_N.view(J, block).copy_(D)
    step.sums_J4.copy_(torch.stack(sums[1:], 1))


def step_masters(step: MasterStep, *, block: int, scale: str) -> None:
    """Masters ← those after the step; frame ← frame of what their replicas lack (rule 13)."""
    encode(step_masters_(step), None, step.frame_1B, step.counts_J.unsqueeze(0), block=block, scale=scale)


def step_masters_(step: MasterStep) -> Tensor:
    """Masters ← those after the step. What their replicas lack, float32 [1, N]; the padding is not defined."""
    x, block = step.masters_N, step.segments.block
    stepped = (x * step.keep).add_(step.update_N * step.weight)
    real = torch.arange(block, device=x.device) < step.counts_J.unsqueeze(1)
    torch.where(real, stepped.view(real.shape), x.view(real.shape), out=x.view(real.shape))
    lacking = stepped  # in its memory, which has the replicas first
    if step.replicas:
        torch._foreach_copy_(step.segments.views(lacking), [replica.reshape(-1) for replica in step.replicas])
    return torch.sub(x, lacking, out=lacking).unsqueeze(0)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a > b, a, b)


def scales(frames_KB: Tensor, n: int, *, block: int) -> Tensor:
    """The bfloat16 scales [K, J] of sign frames of n elements (a copy)."""
    return scales_at(frames_KB, n // 8, n // block)


def int8_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32, in place; error float32/bfloat16, read."""
    K, N = x_KN.shape
    J = N // block
    check_shape(frames_KB, K, N + 2 * J)
    q_KN, bits_KJ = quantise_(x_KN, error_KN, counts_KJ, block=block, top=127)
    frames_KB[:, :N] = q_KN.view(torch.uint8)
    write_scales(frames_KB, N, bits_KJ)


def quantise_(
    x_KN: Tensor, error_KN: Tensor | None, counts_KJ: Tensor | None, *, block: int, top: int
) -> tuple[Tensor, Tensor]:
    """The int8 frame's rules 1 to 4, `top` for 127: q, int8 [K, N], and the bits of s, int16 [K, J]. x ← residual."""
    K, N = x_KN.shape
    if error_KN is not None:
        x_KN.add_(error_KN)
    c_KJn = x_KN.view(K, N // block, block)
    if counts_KJ is not None:
        padding = torch.arange(block, device=x_KN.device) >= counts_KJ.unsqueeze(-1)
        c_KJn.masked_fill_(padding, 0.0)
    largest_KJ = torch.linalg.vector_norm(c_KJn, float("inf"), dim=-1)
    # A tensor of its device: a Python divisor becomes a multiplication by its reciprocal on CUDA.
    s_KJ = round_up_to_bfloat16(largest_KJ / x_KN.new_full((), float(top)))
    bad_KJ = ~(largest_KJ.isfinite() & decodes_finite(s_KJ, float(top + 1)))
    c_KJn.masked_fill_(bad_KJ.unsqueeze(-1), 0.0)
    s_KJ1 = s_KJ.to(torch.float32).masked_fill(bad_KJ | (s_KJ == 0), 1.0).unsqueeze(-1)
    q_KJn = torch.div(c_KJn, s_KJ1).round_().clamp_(-top, top)
    q_KN = q_KJn.to(torch.int8).view(K, N)
    c_KJn.sub_(q_KJn.mul_(s_KJ1))
    return q_KN, torch.where(bad_KJ, _NAN_BF16, s_KJ.view(torch.int16)).to(torch.int16)


def write_scales(frames_KB: Tensor, offset: int, bits_KJ: Tensor) -> None:
    """Write the bits of scales, int16, from byte `offset` on, and zeros after them."""
    K, J = bits_KJ.shape
    frames_KB[:, offset : offset + 2 * J] = bits_KJ.contiguous().view(-1).view(torch.uint8).view(K, 2 * J)
    frames_KB[:, offset + 2 * J :] = 0


def int8_decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """out ← keep·out + weight·values; out float32 [K, N]."""
    weigh_into_(out_KN, _int8_values(frames_KB, out_KN.shape[1], block), weight, keep)


def int8_decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """out ← mean over the K frames; out float32 [N]."""
    mean_into_(out_N, frames_KB, lambda frame_1B: _int8_values(frame_1B, out_N.shape[0], block)[0])


def int8_scales(frames_KB: Tensor, n: int, *, block: int) -> Tensor:
    """The bfloat16 scales [K, J] of int8 frames of n elements (a copy)."""
    return scales_at(frames_KB, n, n // block)


def decodes_finite(s: Tensor, steps: float) -> Tensor:
    """Whether each scale times `steps` is finite."""
    return (s.to(torch.float32) * steps).isfinite()


def weigh_into_(out_KN: Tensor, values_KN: Tensor, weight: float, keep: float) -> None:
    if len(values_KN) != len(out_KN):
        raise ValueError(f"{len(values_KN)} frames cannot be decoded into {len(out_KN)} rows")
    if weight != 1.0:
        values_KN.mul_(weight)
    if keep == 0.0:
        out_KN.copy_(values_KN)
    else:
        out_KN.mul_(keep).add_(values_KN)


def mean_into_(out_N: Tensor, frames_KB: Tensor, values: Callable[[Tensor], Tensor]) -> None:
    out_N.copy_(values(frames_KB[:1]))
    for k in range(1, frames_KB.shape[0]):
        out_N.add_(values(frames_KB[k : k + 1]))
    out_N.mul_(1.0 / frames_KB.shape[0])


def scales_at(frames_KB: Tensor, offset: int, J: int) -> Tensor:
    check_shape(frames_KB, len(frames_KB), offset + 2 * J)
    scales_KB = frames_KB[:, offset : offset + 2 * J].clone(memory_format=torch.contiguous_format)
    return scales_KB.view(-1).view(torch.bfloat16).view(frames_KB.shape[0], J)


def _int8_values(frames_KB: Tensor, n: int, block: int) -> Tensor:
    K, s_KJ = len(frames_KB), int8_scales(frames_KB, n, block=block)
    q_KJn = frames_KB[:, :n].view(torch.int8).to(torch.float32).view(K, n // block, block)
    return q_KJn.mul_(s_KJ.to(torch.float32).unsqueeze(-1)).view(K, n)


def round_up_to_bfloat16(x: Tensor) -> Tensor:
    """The least bfloat16 not below x (x >= 0), so that the largest element is within 127 steps."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _values(frames_KB: Tensor, n: int, block: int) -> Tensor:
    K = frames_KB.shape[0]
    s_KJ = scales(frames_KB, n, block=block).to(torch.float32)
    minus = _unpack_bits(frames_KB[:, : n // 8]).view(K, n // block, block)
    s_KJ1 = s_KJ.unsqueeze(-1)
    return torch.where(minus, -s_KJ1, s_KJ1).view(K, n)


def _sqrt(x: Tensor) -> Tensor:
    # Through float64: torch's own float32 sqrt is MKL's, one unit off for 17% of inputs (torch 2.13, AMD, 2026-11).
    return x.to(torch.float64).sqrt().to(torch.float32)


def _lane_sum(terms_KJn: Tensor) -> Tensor:
    K, J, block = terms_KJn.shape
    rows = terms_KJn.reshape(K, J, block // LANES, LANES)
    acc = rows[:, :, 0].clone()
    for i in range(1, block // LANES):
        acc += rows[:, :, i]
    width = LANES
    while width > 1:
        width //= 2
        acc = acc[..., :width] + acc[..., width:]
    return acc[..., 0]


def _pack_bits(minus_KN: Tensor) -> Tensor:
    K, N = minus_KN.shape
    weights = 2 ** torch.arange(8, device=minus_KN.device, dtype=torch.uint8)
    return (minus_KN.view(K, N // 8, 8).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def _unpack_bits(bytes_KB: Tensor) -> Tensor:
    shifts = torch.arange(8, device=bytes_KB.device, dtype=torch.uint8)
    return ((bytes_KB.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
