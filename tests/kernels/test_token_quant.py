"""8-bit tokens: what the codes and scales must satisfy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.token_quant import LARGEST, TINY, Kind, quantize_tokens

KINDS: list[Kind] = ["int8", "e4m3"]


def rows(columns: int) -> torch.Tensor:
    x_TI = torch.randn(5, columns, generator=torch.Generator().manual_seed(0))
    x_TI[0, 3], x_TI[1], x_TI[2], x_TI[3] = 3e4, 0.0, -0.0, 2.0**-140
    return x_TI


def check(x_TI: torch.Tensor, kind: Kind, group: int | None) -> None:
    """Each value within half a step of its code: of the scale, or of e4m3's spacing at the code's size; the largest of
    a group has the largest code, as long as its scale is not the least one."""
    codes_TI, scale_TG = quantize_tokens(x_TI, kind, group)
    columns = x_TI.shape[1]
    scale_TI = scale_TG.double().repeat_interleave(group or columns, 1)[:, :columns]
    value_TI = x_TI.double() / scale_TI
    spacing = 1.0
    if kind == "e4m3":
        spacing = torch.exp2(value_TI.abs().clamp_min(2.0**-6).log2().floor() - 3)
    # the quotient is rounded to float32 before it is rounded to a code
    assert ((codes_TI.double() - value_TI).abs() <= spacing * (0.5 + 1e-4)).all()
    for first in range(0, columns, group or columns):
        part = slice(first, first + (group or columns))
        normal = x_TI[:, part].abs().amax(1) >= TINY * LARGEST[kind]
        assert (codes_TI[normal, part].float().abs().amax(1) == LARGEST[kind]).all()
    assert (codes_TI.float().abs() <= LARGEST[kind]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "group"), [(300, None), (300, 128), (128, 128), (7, 3)])
def test_codes_are_nearest(columns: int, group: int | None, kind: Kind) -> None:
    check(rows(columns), kind, group)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.sampled_from(KINDS))
def test_codes_are_nearest_for_any_floats(values: list[float], kind: Kind) -> None:
    check(torch.tensor([values], dtype=torch.float32), kind, None)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_their_signs(kind: Kind) -> None:
    codes_TI, scale_TG = quantize_tokens(rows(8), kind)
    assert (codes_TI[1:3].float() == 0).all()
    assert (scale_TG[1:4] == TINY).all()
    assert codes_TI[2].float().signbit().all() == (kind == "e4m3")


def test_ties_go_to_even() -> None:
    x_TI = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert quantize_tokens(x_TI, "int8")[0].tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    x_TI = torch.tensor([[448.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, -1.0625]])
    assert quantize_tokens(x_TI, "e4m3")[0].float().tolist() == [[448, 1, 1.25, 0, 2.0**-8, -1]]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite(kind: Kind) -> None:
    x_TI = rows(6)
    x_TI[0, 4], x_TI[4, 1] = math.nan, -math.inf
    codes_TI, scale_TG = quantize_tokens(x_TI, kind, 3)
    assert scale_TG.isnan().nonzero().tolist() == [[0, 1], [4, 0]]
    assert (codes_TI[0, 3:].float() == 0).all()
    assert (codes_TI[4, :3].float() == 0).all()
    assert (codes_TI[4, 3:].float() != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: Kind) -> None:
    codes_TI, scale_TG = quantize_tokens(torch.empty(0, 300), kind, 128)
    assert codes_TI.shape == (0, 300)
    assert scale_TG.shape == (0, 3)
