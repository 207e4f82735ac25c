"""The compiled linears against float64, against each other on every instruction set, and at the edges of a file."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.cpu.isa import supported
from compress.kernels.cpu.linear import block_of, prepare_compiled
from compress.kernels.matmul import dequantized
from compress.kernels.packing import pack_int32
from compress.kernels.weights import PackedWeight

pytestmark = pytest.mark.skipif(not supported(), reason="no C compiler on this machine")
ISAS = supported()


def weights(
    rows: int, columns: int, group: int, bits: int = 4, asymmetric: bool = False, scale: torch.dtype = torch.bfloat16
) -> PackedWeight:
    half = 1 << (bits - 1)
    codes_OI = torch.randint(-half, half, (rows, columns), dtype=torch.int8)
    scale_OG = (torch.rand(rows, columns // group) * 0.02 + 0.001).to(scale)
    zero_OG = torch.randint(-half, half, scale_OG.shape, dtype=torch.int8) if asymmetric else None
    return PackedWeight(bits, columns, pack_int32(codes_OI, bits), scale_OG, zero_OG)


def tokens(count: int, columns: int) -> torch.Tensor:
    """Channels of very different sizes, an outlier, a negative zero, a subnormal, and a block of zeros."""
    x_TI = torch.randn(count, columns) * torch.randn(columns).exp()
    x_TI[0, 0], x_TI[0, 1], x_TI[-1, 2] = 80.0, -0.0, 1e-40
    x_TI[:, 16 : min(48, columns - 1)] = 0.0
    return x_TI


def quantized_tokens(x_TI: torch.Tensor, block: int) -> torch.Tensor:
    """What the integer path multiplies: each block of columns rounded to 127 steps of its largest magnitude."""
    parts = []
    for part in x_TI.split(block, dim=1):
        step = part.abs().amax(1, keepdim=True) / 127
        parts.append(torch.where(step > 0, (part / step).round() * step, 0.0))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_integer_products(isa: str, bits: int, asymmetric: bool) -> None:
    """The sums of codes are exact, so only the sum over the blocks rounds: 1e-6 of the row's norms.

    A code may differ from the reference's where x · 127 / max lies within rounding of a tie; the inputs have none.
    """
    torch.manual_seed(0)
    for rows, columns, group, scale in (
        (70, 192, 64, torch.float16),
        (16, 576, 576, torch.float32),
        (5, 96, 32, torch.bfloat16),
    ):
        weight = weights(rows, columns, group, bits, asymmetric, scale)
        x_TI, bias_O = tokens(13, columns), torch.randn(rows)
        linear = prepare_compiled([weight], [bias_O], isa, exact=False)  # pyright: ignore[reportArgumentType]
        dense_OI = dequantized(weight, torch.float64)
        met_TI = quantized_tokens(x_TI, block_of(columns, group)).double()
        size = met_TI.norm(dim=1)[:, None] * dense_OI.norm(dim=1) + 1
        assert ((linear(x_TI).double() - met_TI @ dense_OI.t() - bias_O.double()).abs() / size).max() < 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [4, 8, torch.bfloat16, torch.float16, torch.float32])
def test_exact_products(isa: str, kind: int | torch.dtype) -> None:
    """Float32 sums by fused multiply-add: 1e-6 of the row's norms at 576 terms."""
    torch.manual_seed(1)
    for rows, columns in ((37, 576), (33, 46 if isinstance(kind, torch.dtype) else 48), (1, 2048)):
        weight = (
            weights(rows, columns, columns, kind, kind == 4)
            if isinstance(kind, int)
            else torch.randn(rows, columns).to(kind)
        )
        x_TI, bias_O = tokens(29, columns), torch.randn(rows)
        linear = prepare_compiled([weight], [bias_O], isa, exact=True)  # pyright: ignore[reportArgumentType]
        dense_OI = weight.double() if isinstance(weight, torch.Tensor) else dequantized(weight, torch.float64)
        size = x_TI.double().norm(dim=1)[:, None] * dense_OI.norm(dim=1) + 1
        error = (linear(x_TI).double() - x_TI.double() @ dense_OI.t() - bias_O.double()).abs() / size
        assert error.max() < 1e-6


def test_error_of_quantized_activations() -> None:
    """W4A8's own error, of the output's norm, on normal activations: below 8e-3."""
    torch.manual_seed(2)
    weight, x_TI = weights(512, 2048, 128), torch.randn(8, 2048)
    expected = x_TI.double() @ dequantized(weight, torch.float64).t()
    fast, exact = (prepare_compiled([weight], [None], ISAS[-1], exact)(x_TI).double() for exact in (False, True))
    assert (fast - expected).norm() / expected.norm() < 8e-3
    assert (exact - expected).norm() / expected.norm() < 1e-6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 40),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 48, 64, 128, 144]),
    bits=st.sampled_from([4, 8]),
    asymmetric=st.booleans(),
    exact=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_bits_depend_on_nothing_but_the_row(
    count: int, rows: int, groups: int, group: int, bits: int, asymmetric: bool, exact: bool, threads: int
) -> None:
    """Every token alone, in a batch, fused with other weights, on any instruction set and number of threads: equal."""
    torch.manual_seed(count * 1000 + rows)
    weight, other = (weights(n, groups * group, group, bits, asymmetric) for n in (rows, 21))
    x_TI = tokens(count, groups * group)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = prepare_compiled([weight], [None], "portable", exact)(x_TI)
        for isa in ISAS:
            fused = prepare_compiled([other, weight], [None, None], isa, exact)
            assert torch.equal(fused(x_TI)[:, 21:], whole)
            assert torch.equal(torch.cat([fused(row[None]) for row in x_TI])[:, 21:], whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
def test_extremes_of_codes_and_activations_do_not_overflow(isa: str) -> None:
    """Row after row of the largest codes against ±127: pairs of products pass 16 bits in the 8-bit case."""
    for bits, code in ((4, 7), (4, -8), (8, 127), (8, -128)):
        codes_OI = torch.full((16, 256), code, dtype=torch.int8)
        weight = PackedWeight(bits, 256, pack_int32(codes_OI, bits), torch.ones(16, 2), None)
        for sign in (1.0, -1.0):
            x_TI = torch.full((3, 256), sign)
            linear = prepare_compiled([weight], [None], isa, exact=False)  # pyright: ignore[reportArgumentType]
            assert (linear(x_TI) == 256 * code * sign).all()


@pytest.mark.parametrize("exact", [False, True])
def test_infinities_and_nans_come_out_as_nans_of_their_token_alone(exact: bool) -> None:
    weight = weights(32, 128, 64)
    x_TI = torch.randn(4, 128)
    x_TI[1, 3], x_TI[2, 70] = float("inf"), float("nan")
    y_TO = prepare_compiled([weight], [None], ISAS[-1], exact)(x_TI)
    assert torch.isfinite(y_TO[[0, 3]]).all()
    assert not torch.isfinite(y_TO[1:3]).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [16, 37])
def test_nothing_past_the_last_row_is_read(isa: str, rows: int, tmp_path: Path) -> None:
    """The rows end exactly where a mapping ends: one byte more would be a segmentation fault."""
    weight = weights(rows, 72 * 8, 32)
    raw = weight.words_OW.numpy().tobytes()
    size = -(-len(raw) // mmap.PAGESIZE) * mmap.PAGESIZE
    (tmp_path / "rows").write_bytes(bytes(size - len(raw)) + raw)
    mapped = np.memmap(tmp_path / "rows", dtype=np.int32, mode="c", shape=(size // 4,))
    words_OW = torch.from_numpy(mapped[-weight.words_OW.numel() :]).view(rows, -1)
    x_TI = tokens(3, 72 * 8)
    for exact in (False, True):
        there = PackedWeight(4, weight.columns, words_OW, weight.scale_OG, None)
        linear, expected = (prepare_compiled([w], [None], isa, exact)(x_TI) for w in (there, weight))  # pyright: ignore[reportArgumentType]
        assert torch.equal(linear, expected)


def test_rows_are_read_where_they_are() -> None:
    """Weights are not copied: a change of the stored words is a change of the result."""
    weight = weights(32, 64, 64)
    linear = prepare_compiled([weight], [None], ISAS[-1], exact=False)
    before = linear(torch.ones(1, 64))
    weight.words_OW.zero_()
    after = linear(torch.ones(1, 64))
    assert not torch.equal(before, after)
    assert linear.nbytes == weight.words_OW.nbytes + weight.scale_OG.nbytes


def test_other_activations_and_layouts() -> None:
    weight = weights(24, 64, 64)
    linear = prepare_compiled([weight], [None], ISAS[-1], exact=True)
    wide = torch.randn(3, 130)
    assert torch.equal(linear(wide[:, 1:129:2]), linear(wide[:, 1:129:2].contiguous()))
    assert torch.equal(linear(wide[:, :64]), linear(wide[:, :64].contiguous()))
    half = wide[:, :64].bfloat16()
    assert torch.equal(linear(half), linear(half.float()).bfloat16())
    assert linear(wide[:0, :64]).shape == (0, 24)
    with pytest.raises(ValueError, match="x has 63 columns, the weight 64"):
        linear(wide[:, :63])


@pytest.mark.slow
def test_rows_beyond_two_gibibytes() -> None:
    """Offsets are 64 bits: the last row of a sparse matrix of 3 GiB is found."""
    columns = 1 << 16
    rows = (3 << 30) // (columns // 2)
    words_OW = np.zeros((rows, columns // 8), dtype=np.int32)  # pages that nobody wrote cost nothing
    words_OW[-1] = 0x99999999 - (1 << 32)  # code 1 in the last row; elsewhere -8
    weight = PackedWeight(4, columns, torch.from_numpy(words_OW), torch.ones(rows, 1), None)
    y_O = prepare_compiled([weight], [None], ISAS[-1], exact=False)(torch.ones(1, columns))[0]
    assert y_O[-1] == columns
    assert (y_O[:-1] == -8 * columns).all()
