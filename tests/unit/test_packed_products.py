"""Matrices in few bits: their products, rows and floats, against loops in float64 over the codes themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from onebit.zero.compression.matrices import Form
from onebit.zero.compression.packing import Codes
from onebit.zero.compression.quantizers import Code, Grid, Scales, pack_bits
from onebit.zero.inference.codes import packed_of
from onebit.zero.inference.layers import ServedEmbedding, ServedLinear
from onebit.zero.inference.packed import Groups, Rows
from onebit.zero.inference.plan import WEIGHT_BYTES

HALF = 2.0**-8
"""The relative error of a number rounded to bfloat16."""


def drawn(
    kind: str, bits: int, rows: list[int], columns: list[int], *, has_zeros: bool = False
) -> tuple[Codes, Tensor]:
    """Random codes, and the matrix that they stand for, float64 [N, K], by the definition in `Codes` and `Scales`."""
    draw = torch.Generator().manual_seed(bits)
    N, K = sum(rows), sum(columns)
    code_NK = torch.randint(2**bits if bits != 2 else 3, (N, K), generator=draw)
    scale = torch.rand(len(rows), len(columns), generator=draw) + 0.1
    zero = torch.randint(2**bits, scale.shape, generator=draw).float() if kind == "asymmetric" and bits > 2 else None
    if bits > 2 and zero is None:
        code_NK = code_NK.clamp(max=2**bits - 2)  # the levels are symmetric
    kept_NK = torch.rand(N, K, generator=draw) < 0.5 if has_zeros else torch.ones(N, K, dtype=torch.bool)
    w_NK = torch.zeros(N, K, dtype=torch.float64)
    for (i, r), (j, c) in itertools.product(enumerate(rows), enumerate(columns)):
        for n, k in itertools.product(
            range(sum(rows[:i]), sum(rows[:i]) + r), range(sum(columns[:j]), sum(columns[:j]) + c)
        ):
            first = zero[i, j].item() if zero is not None else {1: 0.5, 2: 1}.get(bits, 2 ** (bits - 1) - 1)
            level = (code_NK[n, k].item() - first) * (2 if bits == 1 else 1)
            w_NK[n, k] = level * scale[i, j].item() * kept_NK[n, k].item()
    stream, kept = pack_bits(code_NK[kept_NK], bits), pack_bits(kept_NK, 1) if has_zeros else None
    scales = Scales(Code(kind, bits), Grid(tuple(rows), tuple(columns)), scale, zero)
    return Codes(Form((N, K)), scales, torch.float32, stream, kept, int(kept_NK.sum())), w_NK


def spread(codes: Codes) -> Tensor:
    """For each weight how far its levels reach, [N, K]: of this a group's bfloat16 scale and zero point lose a part."""
    return codes.scales.grid.expand(codes.scales.scale_IJ).double() * 2**codes.scales.code.bits


SHAPES = [([7], [40]), ([1] * 5, [33]), ([2, 1, 4], [256]), ([1] * 3, [64, 64]), ([70], [32, 32, 32]), ([1], [1])]


@pytest.mark.pairwise
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_codes_are_multiplied_as_they_are(kind: str, bits: int, has_zeros: bool) -> None:
    """Of any number of rows, also in int8. Only inputs and outputs are rounded; of groups, also their scales."""
    for rows, columns in SHAPES:
        codes, w_NK = drawn(kind, bits, rows, columns, has_zeros=has_zeros)
        packed = packed_of(codes)
        assert isinstance(packed, Rows if bits > 4 and len(columns) == 1 else Groups)
        K, is_by_group = sum(columns), len(columns) > 1
        off_NK = 2 * HALF * spread(codes) if is_by_group else 1e-6 * spread(codes)
        assert ((packed.weight.double() - w_NK).abs() <= off_NK).all()
        ids = torch.tensor([[0, sum(rows) - 1], [sum(rows) // 2, 0]])
        assert torch.equal(packed.lookup(ids), packed.weight[ids])
        for B in (0, 1, 3, 70):
            wide = torch.randn(B, 2 * K, generator=torch.Generator().manual_seed(B))
            for x in (wide[:, ::2], wide[:, :K].t().contiguous().t()):
                y, exact = packed.product(x, False), x.double() @ w_NK.t()
                weights = x.double().abs() @ w_NK.abs().t() * (1.01 * HALF + 1e-6)
                # A row's offset multiplies the sum of rounded inputs, a group's zero point each of them.
                weights += (
                    x.double().abs()
                    @ spread(codes).t()
                    * (2 * HALF if is_by_group or codes.scales.zero_IJ is not None else 0)
                )
                assert (
                    y.dtype == torch.float32 and ((y - exact).abs() <= weights + 1.01 * HALF * exact.abs() + 1e-6).all()
                )
                if isinstance(packed, Rows):
                    step_B1 = x.double().abs().amax(1, keepdim=True) / 127 if B else torch.zeros(0, 1)
                    y, off_BN = packed.product(x, True), step_B1 * w_NK.abs().sum(1) * 0.51
                    assert ((y - exact).abs() <= off_BN + step_B1 * spread(codes).sum(1) * 0.51 + 1e-5).all()


@pytest.mark.parametrize(
    ("bits", "rows", "columns"),
    [(4, [1] * 70, [128, 128]), (3, [35] * 2, [200]), (8, [1] * 70, [96, 96]), (4, [70], [256]), (8, [7] * 10, [200])],
)
def test_a_part_is_these_rows_and_columns(bits: int, rows: list[int], columns: list[int]) -> None:
    """Its floats, and the products of whole rows, to the bit; those of parts of rows, rounded once each, add up."""
    whole = packed_of(drawn("asymmetric", bits, rows, columns)[0])
    assert isinstance(whole, Rows | Groups)
    N, K, x = sum(rows), sum(columns), torch.randn(5, sum(columns), generator=torch.Generator().manual_seed(0))
    for own in (torch.arange(N), torch.arange(33, N), torch.tensor([1, 2, 3, 40, 41, 69]), torch.arange(0)):
        for B, is_int8 in itertools.product((1, 5, 70), (False, True)):
            given = x[:1].expand(B, K) if B > 5 else x[:B]
            part = whole.part(own, range(K))
            assert torch.equal(part.product(given, is_int8), whole.product(given, is_int8)[:, own])
        for cuts in ((0, K // 2, K), (0, 33, 66, 98, K), (0, 1, K - 1, K)):
            parts = [whole.part(own, range(*ends)) for ends in itertools.pairwise(cuts)]
            assert torch.equal(torch.cat([part.weight for part in parts], 1), whole.weight[own])
            ids = torch.arange(len(own)).flip(0)
            assert all(torch.equal(part.lookup(ids), part.weight.flip(0)) for part in parts)
            given = [x[:, slice(*ends)] for ends in itertools.pairwise(cuts)]
            total = torch.stack([part.product(y, False) for part, y in zip(parts, given, strict=True)]).sum(0)
            off = 4 * HALF * x.abs() @ whole.weight[own].abs().t() + 1e-6
            assert ((total - whole.product(x, False)[:, own]).abs() <= off).all()
    half = whole.part(torch.arange(N), range(32, K - 8)).part(torch.arange(5, N), range(3, 70))
    assert torch.equal(half.weight, whole.weight[5:, 35:102])


@pytest.mark.slow
def test_a_compiled_step_multiplies_by_parts_that_begin_in_a_group() -> None:
    """The compiler chooses the strides of what it pads, and the kernel takes no others than those of rows."""
    up, down = (packed_of(drawn("symmetric", 4, [N], [K])[0]) for N, K in ((65, 64), (64, 130)))
    assert isinstance(up, Groups) and isinstance(down, Groups)
    part, bias, x = down.part(torch.arange(64), range(65, 130)), torch.randn(65), torch.randn(3, 1, 64)
    compiled = torch.compile(lambda x: part.product(torch.tanh(up.product(x) + bias)), fullgraph=True)
    exact = part.product(torch.tanh(up.product(x) + bias))
    torch.testing.assert_close(compiled(x), exact, rtol=0, atol=2 * HALF * float(exact.abs().max()))


@pytest.mark.parametrize("kind", [Rows, Groups])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_holds_its_part_of_the_bytes(kind: type[Rows | Groups], ranks: int) -> None:
    whole = kind.quantized(torch.randn(512, 1024))
    held = sum(x.nbytes for name, x in whole.named_buffers() if name != "ones_N")
    for part in (
        whole.part(torch.arange(512 // ranks), range(1024)),
        whole.part(torch.arange(512), range(1024 // ranks)),
    ):
        own = sum(x.nbytes for name, x in part.named_buffers() if name != "ones_N")
        assert own * ranks / held == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("bits", "rows", "columns", "why"),
    [
        (9, [2], [32], "9 bits are more than kernels take"),
        (4, [1, 1], [32, 40], "its groups have different widths, 32 to 40"),
        (4, [1, 1], [40, 40], "its groups of 40 inputs are no multiple of 32"),
        (4, [2], [0], "it is empty"),
    ],
)
def test_what_no_kernel_takes(bits: int, rows: list[int], columns: list[int], why: str) -> None:
    scales = Scales(Code("symmetric", bits), Grid(tuple(rows), tuple(columns)), torch.ones(len(rows), len(columns)))
    form = Form((sum(rows), sum(columns)))
    codes = torch.zeros(form.rows * form.columns, dtype=torch.int32)
    assert packed_of(Codes(form, scales, torch.float32, pack_bits(codes, bits), None, len(codes))) == why


@pytest.mark.parametrize(("N", "K", "group"), [(1, 1, 32), (7, 31, 128), (130, 64, 64), (65, 300, 256), (16, 256, 128)])
def test_groups_are_within_half_a_step(N: int, K: int, group: int) -> None:
    """Of the step that products use, rounded to bfloat16; so the ends may be off by some of those roundings."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N * K)) * torch.logspace(-6, 3, N)[:, None] + 0.1
    w[0] = 0
    packed = Groups.quantized(w, group)
    assert packed.weight.shape == w.shape and not packed.weight[0].any()
    for part, own in zip(w.split(packed.group, 1), packed.weight.split(packed.group, 1), strict=True):
        padded = torch.nn.functional.pad(part, (0, -K % packed.group)) if part.shape[1] < packed.group else part
        step = (padded.amax(1) - padded.amin(1))[:, None] / 15
        ends = padded.abs().amax(1)[:, None] * 4 * HALF
        assert ((own - part).abs() <= 0.51 * step + 8 * step * HALF + ends).all()


def test_matrices_in_int4_are_of_host_memory() -> None:
    with pytest.raises(ValueError, match="served from host memory, got meta: use int8"):
        Groups.quantized(torch.zeros(4, 32, device="meta"))


@pytest.mark.parametrize("kind", [Rows, Groups])
def test_a_weight_is_in_floats_only_when_it_is_used(kind: type[Rows | Groups], monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 asks for its dtype in every pass."""
    matrix = kind.quantized(torch.randn(6, 32).bfloat16())
    floats, made = matrix.weight, list[bool]()
    monkeypatch.setattr(kind, "weight", property(lambda self: made.append(True) or floats))
    for layer in (ServedLinear(matrix, None, None), ServedEmbedding(matrix)):
        weight = layer.weight
        assert weight.dtype == torch.bfloat16 and weight.shape == (6, 32) and weight.device == floats.device
        assert isinstance(weight, Tensor) and weight.numel() == 192 and not made
        x = torch.randn(3, 32).bfloat16()
        assert torch.equal(x @ weight.T, x @ floats.T) and torch.equal(weight.float()[2], floats[2].float()) and made
        assert type(weight + 1) is Tensor and torch.equal(weight, floats)
        made.clear()


def test_a_compiled_step_may_ask_a_packed_weight_for_its_dtype() -> None:
    layer, x = ServedLinear(Rows.quantized(torch.randn(6, 32)), None, None), torch.randn(3, 32).bfloat16()
    compiled = torch.compile(lambda x: layer(x.to(layer.weight.dtype)), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x.float()))


@pytest.mark.parametrize(("kind", "dtype"), [(Rows, "int8"), (Groups, "int4")])
def test_the_plan_knows_the_bytes_of_a_weight(kind: type[Rows | Groups], dtype: str) -> None:
    matrix = kind.quantized(torch.randn(512, 1024))
    held = sum(buffer.nbytes for name, buffer in matrix.named_buffers() if name != "ones_N")
    assert held / (512 * 1024) == pytest.approx(WEIGHT_BYTES[dtype], rel=0.01)


def test_a_packed_table_has_the_attributes_of_an_embedding() -> None:
    """PEFT's adapters of embeddings look their own table up with those of the layer below."""
    table = torch.nn.Embedding(8, 16)
    packed = ServedEmbedding(Rows.quantized(table.weight.detach()))
    assert {name: getattr(packed, name) for name in table.__constants__} == {
        name: getattr(table, name) for name in table.__constants__
    }
