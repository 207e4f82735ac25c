"""Rows of floats on the compiled kernels: against float64, and bit for bit against the order of sums that rows.h gives.

Shapes: T tokens, O out features, I in features, L lanes.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.cpu.isa import supported
from compress.kernels.cpu.linear import prepare_compiled, refusal

pytestmark = pytest.mark.skipif(not supported(), reason="no C compiler on this machine")
ISAS = supported()
KINDS = [torch.bfloat16, torch.float16, torch.float32]
LANES = 16


def fused(a_L: np.ndarray, b_L: np.ndarray, c_L: np.ndarray) -> np.ndarray:
    """float32 a · b + c rounded once: the 80-bit product of two float32 numbers is exact, and so is their sum here."""
    return (a_L.astype(np.longdouble) * b_L.astype(np.longdouble) + c_L.astype(np.longdouble)).astype(np.float32)


def ordered_sum(w_I: torch.Tensor, x_I: torch.Tensor) -> float:
    """Lane l sums k ≡ l (mod 16) in order; then the lanes 8, 4, 2 and 1 apart are added."""
    padding = -len(w_I) % LANES
    w_KL, x_KL = (np.pad(v.float().numpy(), (0, padding)).reshape(-1, LANES) for v in (w_I, x_I))
    sum_L = np.zeros(LANES, np.float32)
    for w_L, x_L in zip(w_KL, x_KL, strict=True):
        sum_L = fused(w_L, x_L, sum_L)
    while len(sum_L) > 1:
        half = len(sum_L) // 2
        sum_L = sum_L[:half] + sum_L[half:]
    return float(sum_L[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 33, 577])
def test_the_order_of_a_sum(isa: str, kind: torch.dtype, columns: int) -> None:
    """Small integers times powers of two: sums round, but in 80 bits they are exact before each rounding."""
    generator = torch.Generator().manual_seed(columns)
    w_OI = torch.randint(-127, 128, (5, columns), generator=generator) * 2.0 ** -torch.randint(
        0, 7, (5, columns), generator=generator
    )
    x_TI = torch.randint(-(1 << 20), 1 << 20, (3, columns), generator=generator).float()
    y_TO = prepare_compiled([w_OI.to(kind)], [None], isa, exact=True)(x_TI)  # pyright: ignore[reportArgumentType]
    expected = [[ordered_sum(w_I.to(kind), x_I) for w_I in w_OI] for x_I in x_TI]
    assert y_TO.tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 40),
    rows=st.integers(1, 70),
    columns=st.integers(1, 700),
    kind=st.sampled_from(KINDS),
    threads=st.sampled_from([1, 2, 5]),
    gap=st.integers(0, 3),
)
def test_bits_depend_on_nothing_but_the_row(
    count: int, rows: int, columns: int, kind: torch.dtype, threads: int, gap: int
) -> None:
    """Every token alone, in a batch, in wider rows, fused with other weights, on any instruction set: equal."""
    torch.manual_seed(count * 1000 + rows)
    weight, other = (torch.randn(n, columns + gap).to(kind)[:, :columns] for n in (rows, 21))
    x_TI, bias_O = torch.randn(count, columns + gap)[:, :columns], torch.randn(rows)
    before = torch.get_num_threads()
    whole = prepare_compiled([weight.contiguous()], [bias_O], "portable", exact=True)(x_TI.contiguous())
    size = x_TI.double().norm(dim=1)[:, None] * weight.double().norm(dim=1) + 1
    expected = x_TI.double() @ weight.double().t() + bias_O.double()
    assert ((whole.double() - expected).abs() / size).max() < 1e-6
    torch.set_num_threads(threads)
    try:
        for isa in ISAS:
            fused = prepare_compiled([other, weight], [None, bias_O], isa, exact=True)
            assert torch.equal(fused(x_TI)[:, 21:], whole)
            assert torch.equal(torch.cat([fused(row[None]) for row in x_TI])[:, 21:], whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("count", "columns"), [(70, 9001), (300, 1200)])
def test_long_rows_and_many_tokens(isa: str, count: int, columns: int) -> None:
    """Columns in several pieces, tokens in several slabs: each token as it is alone."""
    torch.manual_seed(3)
    weight, x_TI = torch.randn(30, columns).half(), torch.randn(count, columns)
    linear = prepare_compiled([weight], [None], isa, exact=True)  # pyright: ignore[reportArgumentType]
    y_TO = linear(x_TI)
    for token in (0, 1, 8, 31, 32, 63, 64, count - 1):
        assert torch.equal(linear(x_TI[token : token + 1])[0], y_TO[token])
    size = x_TI.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((y_TO.double() - x_TI.double() @ weight.double().t()).abs() / size).max() < 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [48, 53])
def test_infinities_and_nans_stay_in_their_row_and_token(isa: str, kind: torch.dtype, columns: int) -> None:
    torch.manual_seed(4)
    weight, x_TI = torch.randn(27, columns).to(kind), torch.randn(19, columns)
    weight[3, columns - 1], weight[25, 0], x_TI[7, columns - 2] = float("inf"), float("nan"), float("nan")
    finite_TO = torch.isfinite(prepare_compiled([weight], [None], isa, exact=True)(x_TI))  # pyright: ignore[reportArgumentType]
    expected_TO = torch.ones(19, 27, dtype=torch.bool)
    expected_TO[:, [3, 25]], expected_TO[7] = False, False
    assert torch.equal(finite_TO, expected_TO)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 67])
def test_nothing_past_the_last_number_is_read(isa: str, kind: torch.dtype, columns: int, tmp_path: Path) -> None:
    """Rows, and tokens, end exactly where a mapping ends: one byte more would be a segmentation fault."""
    torch.manual_seed(5)
    weight, x_TI = torch.randn(26, columns).to(kind), torch.randn(9, columns)
    there, tokens = (at_the_end(tensor, tmp_path / name) for tensor, name in ((weight, "rows"), (x_TI, "tokens")))
    linear, expected = (prepare_compiled([w], [None], isa, exact=True) for w in (there, weight))  # pyright: ignore[reportArgumentType]
    assert torch.equal(linear(tokens), expected(x_TI))
    assert torch.equal(linear(tokens[8:]), expected(x_TI)[8:])


def at_the_end(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The same numbers in a mapped file, whose last page they fill to its end."""
    raw = tensor.view(torch.uint8).numpy().tobytes()
    size = -(-len(raw) // mmap.PAGESIZE) * mmap.PAGESIZE
    path.write_bytes(bytes(size - len(raw)) + raw)
    mapped = np.memmap(path, dtype=np.uint8, mode="c", shape=(size,))
    return torch.from_numpy(mapped[size - len(raw) :]).view(tensor.dtype).view(tensor.shape)


def test_rows_of_any_length_are_taken() -> None:
    assert refusal(torch.zeros(2, 3, dtype=torch.float16)) is None
    assert refusal(torch.zeros(2, 3, dtype=torch.float64)) == "torch.float64 rows"
