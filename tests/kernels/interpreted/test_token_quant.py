"""8-bit tokens, interpreted: the codes and scales of the reference, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels import token_quant
from compress.kernels import token_quant_triton as quant_kernel
from compress.kernels.launch import run
from tests.kernels.interpreted.rounding import DTYPES, SM90, hard_rows, randn


def same_codes(x: torch.Tensor, kind: token_quant.Kind, group: int | None = None) -> None:
    """The kernel's codes and scales are the reference's, to the bit."""
    codes, scale = quant_kernel.quantize_tokens(x, kind, group)
    wanted_codes, wanted_scale = token_quant.quantize_tokens(x, kind, group)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scale.view(torch.int32), wanted_scale.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "e4m3"])
@pytest.mark.parametrize(("columns", "group"), [(1, None), (300, None), (300, 128), (4224, 128), (128, 128), (96, 48)])
def test_quantize_tokens(columns: int, group: int | None, kind: token_quant.Kind, dtype: torch.dtype) -> None:
    same_codes(hard_rows(6, columns, dtype), kind, group)


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_quantize_wide_rows(kind: token_quant.Kind) -> None:
    x = hard_rows(4, 20001, torch.float16)
    x[0, 20000] = -6e4
    same_codes(x, kind)


def neighbours(points: torch.Tensor) -> torch.Tensor:
    """Each float32 point, and the float32 numbers on both sides of it."""
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    return torch.cat((points, torch.nextafter(points, up), torch.nextafter(points, down)))


def test_int8_ties() -> None:
    """Rows whose largest is 127 have the scale 1: every half between two codes, and what stands beside it."""
    ties = neighbours(torch.arange(-127, 127) + 0.5)
    x = torch.cat((ties.clamp(-127, 127), torch.tensor([127.0, -0.0, 0.0])))[None]
    same_codes(x, "int8")
    assert quant_kernel.quantize_tokens(x, "int8")[1].item() == 1


def test_e4m3_codes_and_ties() -> None:
    """Rows whose largest is 448 have the scale 1: every code, every half between two, and what stands beside it."""
    values = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    signed = torch.cat((points, -points))
    x = torch.cat((neighbours(signed).clamp(-448, 448), torch.tensor([448.0])))[None]
    same_codes(x, "e4m3")
    codes, scale = quant_kernel.quantize_tokens(x, "e4m3")
    assert scale.item() == 1
    assert len(codes.view(torch.uint8).unique()) == 254  # all but the two NaN
    half = torch.empty(x.shape, dtype=torch.float16)
    run(quant_kernel.plan_quantize_tokens(x, half, scale, SM90))
    assert torch.equal(half.view(torch.int16), codes.half().view(torch.int16))


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_numbers_that_are_not_finite(kind: token_quant.Kind, group: int | None) -> None:
    x = randn(4, 12, dtype=torch.float32)
    x[0, 5], x[1, 5], x[2, 5] = math.nan, math.inf, -math.inf
    same_codes(x, kind, group)
    codes, scale = quant_kernel.quantize_tokens(x, kind, group)
    spoilt = scale[:3] if group is None else scale[:3, 1]
    assert spoilt.isnan().all()
    assert scale[3].isfinite().all()
    assert (codes[:3, 4:8].float() == 0).all()


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_floats_are_quantized_as_by_torch(values: list[float]) -> None:
    for kind in ("int8", "e4m3"):
        same_codes(torch.tensor([values], dtype=torch.float32), kind)


def test_groups_wider_than_a_program_are_refused() -> None:
    x = torch.empty(1, 40000, device="meta")
    codes, scale = torch.empty(1, 40000, dtype=torch.int8, device="meta"), torch.empty(1, 2, device="meta")
    with pytest.raises(ValueError, match="groups of 20000"):
        quant_kernel.plan_quantize_tokens(x, codes, scale, SM90, group=20000)
