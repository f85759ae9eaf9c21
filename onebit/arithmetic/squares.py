"""Squares, norms and products of gradients: limits of float32, and sums with the same bits on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..agreement.skips import TOO_LARGE
from ..comm.messages import numbers_on

LARGEST_GRADIENT = 2.0**59
"""Up to this value a gradient fits a variance: its square, and a block's sum of squares, are finite in float32."""


def norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor, float32 [len(tensors)], on their device; float64 if any of them is."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of tensors with elements, by device; there are several devices if some shards are offloaded."""
    those: dict[torch.device, list[int]] = {}
    for k, x in enumerate(tensors):
        if x.numel() > 0:
            those.setdefault(x.device, []).append(k)
    return list(those.values())


def has_squares(x: Tensor) -> Tensor:
    """Whether all of x is finite and at most `LARGEST_GRADIENT`. A bool tensor of no dimensions, on x's device."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    return _largest(x).float() <= LARGEST_GRADIENT


def bad_gradients(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the gradients that no variance can take in, and the size of those that are finite.

    Waits for devices.

    Args:
        named: (name, gradient) pairs.
    """
    found = []
    for name, grad in named:
        if not bool(has_squares(grad)):
            largest = float(_largest(grad).abs())
            found.append(f"{name}{TOO_LARGE} ({largest:.2g})" if math.isfinite(largest) else name)
    return found


def _largest(x: Tensor) -> Tensor:
    """The largest |x|; NaN if x contains one.

    torch's vector_norm takes 15 times as long (4 M floats, AVX-512, 2026-11).
    """
    least, most = torch.aminmax(x)
    return torch.maximum(-least, most)


def gradients_are_finite(grads: list[Tensor], scale: float, device: torch.device) -> bool:
    """Whether scale times each gradient is finite. Waits for the device once.

    Args:
        grads: Gradients on this device, none of them empty.
        scale: Their factor.
        device: Their device.
    """
    # On the host torch's largest norm takes 20 times as long as the 2-norm, which is finite if no square overflows.
    order = float("inf") if device.type != "cpu" else 2.0
    are_finite = bool((torch.stack(torch._foreach_norm(grads, order, dtype=torch.float32)) * scale).isfinite().all())
    if are_finite or device.type != "cpu":
        return are_finite
    return bool(torch.stack([_largest(x).float() * abs(scale) for x in grads]).isfinite().all())


def dot(a: Tensor, b: Tensor) -> float:
    """Sum of products of two tensors of equal shape. If it overflows in float32, it is computed in float64."""
    a, b = a.reshape(-1), b.reshape(-1)
    product = float(torch.dot(a.float(), b.float()))
    return product if math.isfinite(product) else float(torch.dot(a.double(), b.double()))


def gradient_dots(pairs: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> list[tuple[float, float]]:
    """<g, g> and <g, m> of each pair (g, m), as `dot` computes them.

    Waits for each device once, however many pairs there are, unless a product overflows.

    Args:
        pairs: Returns the pairs; m has one dimension and is float32. Called again if a product is not finite.
    """
    numbers = read_numbers(_float32_dots(pairs()))
    if not all(map(math.isfinite, numbers)):
        numbers = [dot(g, other) for g, m in pairs() for other in (g, m)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def gradient_sums(
    pairs: Iterable[tuple[Tensor, Tensor]], shares: Sequence[float], scale: float, device: torch.device
) -> Tensor:
    """Σ share·scale²·<g, g> and Σ share·scale·<g, m>, float64 [2]. Not finite if a product is not finite in float32.

    The products of `gradient_dots`, added up in the host's order. Does not wait for the device.

    Args:
        pairs: (g, m) pairs, as in `gradient_dots`.
        shares: The share of each pair.
        scale: Factor of the gradients.
        device: Device of the result.
    """
    weights = [weight for share in shares for weight in (share * scale * scale, share * scale)]
    return sums_in_turn(_float32_dots(pairs), weights, device, columns=2)


def sums_in_turn(
    numbers: Sequence[Tensor], weights: Sequence[float], device: torch.device, *, columns: int = 1
) -> Tensor:
    """Σ weight·number, each number added to those before it: float64 [columns]. Does not wait for the device.

    Args:
        numbers: Tensors of no dimensions and one dtype, one row after the other.
        weights: A weight for each number.
        device: Device of the result.
        columns: Numbers in a row. Default 1.
    """
    if not numbers:
        return torch.zeros(columns, dtype=torch.float64, device=device)
    here = [number.to(device) for number in numbers]
    terms = (torch.stack(here) if len(here) > 1 else here[0].view(1)).to(torch.float64)
    terms = terms * (weights[0] if len(set(weights)) == 1 else numbers_on(device, weights, torch.float64))
    return terms.view(-1, columns).cumsum(0)[-1] if len(numbers) > columns else terms


def _float32_dots(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """<g, g> and <g, m> of one pair after the other."""
    products = []
    for g, m in pairs:
        flat = g.reshape(-1).float()
        products += [torch.dot(flat, flat), torch.dot(flat, m)]
    return products


def read_numbers(numbers: Sequence[Tensor]) -> list[float]:
    """The values of tensors of no dimensions and one dtype. Waits once for each device."""
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    found: dict[int, float] = {}
    for there in places.values():
        found.update(zip(there, torch.stack([numbers[place] for place in there]).tolist(), strict=True))
    return [found[place] for place in range(len(numbers))]


def portable_norm(x: Tensor) -> Tensor:
    """The 2-norm with the same bits on every machine, float32 [].

    Halves are added element by element, which no machine does in another order or with a fused multiplication. It takes
    six times as long as a plain norm: 37 ms for 25 million elements on two cores (2026-11).

    Args:
        x: Any shape, float32.
    """
    squares = x.flatten().square()
    while squares.numel() > 1:
        half = squares.numel() // 2
        first, second, rest = squares[:half], squares[half : 2 * half], squares[2 * half :]
        squares = first + second
        squares[:1] += rest.sum()
    return squares.sum().double().sqrt().float()  # torch's float32 sqrt is MKL's, one unit off for many inputs
