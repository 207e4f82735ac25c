"""W8A8 matmuls, interpreted: the codes' products against float64, and every path against the others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.launch import Target, run
from compress.kernels.narrow_matmul import BLOCK, NarrowWeight, narrow_matmul
from compress.kernels.narrow_matmul_triton import (
    Rows,
    W8A8Triton,
    new_scratch,
    plan_narrow_matmul,
    rows_of,
    split_span,
    tiles_of,
)
from compress.kernels.token_quant import quantize_tokens

SM80, SM90 = Target("cuda", 80), Target("cuda", 90)
U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
KINDS = ["int8", "channels", "blocks"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: str, outs: int, ins: int, bias_dtype: torch.dtype | None = None) -> NarrowWeight:
    """Codes over their whole range; scales over four powers of two."""
    if kind == "int8":
        codes = torch.randint(-128, 128, (outs, ins), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    else:
        codes = (randn(outs, ins, seed=1) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (-(-outs // BLOCK), -(-ins // BLOCK)) if kind == "blocks" else (outs,)
    scale = torch.exp2(randn(*shape, seed=2).clamp(-2, 2)) / 1000
    bias = None if bias_dtype is None else randn(outs, seed=3).to(bias_dtype)
    return NarrowWeight("int8" if kind == "int8" else "e4m3", codes, scale, bias)


def activations(tokens: int, ins: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An outlier in one row; where there are rows enough, one of zeros and one of subnormals."""
    x = randn(tokens, ins, seed=4)
    x[0, ins // 2] = 300.0
    if tokens > 3:
        x[1], x[2] = 0.0, 2.0**-140
    return x.to(dtype)


def exact_product(x: torch.Tensor, weight: NarrowWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """y and Σ|x·w| in float64, of the numbers that the codes stand for."""
    outs, ins = weight.codes_OI.shape
    codes, scale = quantize_tokens(x, weight.kind, BLOCK if weight.blocks else None)
    wide_x = codes.double() * scale.double().repeat_interleave(BLOCK if weight.blocks else ins, 1)[:, :ins]
    wide_w = weight.codes_OI.double()
    if weight.blocks:
        wide_w *= weight.scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:outs, :ins]
    else:
        wide_w *= weight.scale.double()[:, None]
    bias = 0.0 if weight.bias_O is None else weight.bias_O.double()
    return wide_x @ wide_w.t() + bias, wide_x.abs() @ wide_w.abs().t() + abs(bias)


def product(x: torch.Tensor, weight: NarrowWeight, target: Target = SM90, rows: Rows | None = None) -> torch.Tensor:
    """All launches, with everything between them poisoned, into a window of a poisoned tensor."""
    tokens, outs = x.shape[0], weight.codes_OI.shape[0]
    scratch = new_scratch(x, weight, target, rows or rows_of(tokens))
    scratch.codes_TI.view(torch.uint8).fill_(0x7F)
    scratch.scale_TG.fill_(math.nan)
    if scratch.parts_STO is not None:
        scratch.parts_STO.fill_(-7777777)
    room = torch.full((tokens + 1, outs + 3), math.nan, dtype=x.dtype)
    run(plan_narrow_matmul(x, weight, scratch, room[:tokens, :outs], target))
    assert room[tokens].isnan().all()
    assert room[:, outs:].isnan().all()
    return room[:tokens, :outs]


def assert_right(y: torch.Tensor, x: torch.Tensor, weight: NarrowWeight) -> None:
    """int8: sums are exact, five roundings follow. e4m3: float32 sums of 128, then of the blocks and splits; a sum of n
    terms is off by at most n roundings of Σ|x·w|, and typically by √n."""
    exact, magnitude = exact_product(x, weight)
    roundings = 5 if weight.kind == "int8" else 5 + math.sqrt(weight.codes_OI.shape[1]) * 4
    bound = U[x.dtype] * exact.abs() + roundings * 2.0**-24 * magnitude + torch.finfo(x.dtype).smallest_normal
    assert ((y.double() - exact).abs() <= bound).all()


SHAPES = [(1, 64, 128), (3, 100, 200), (17, 130, 1160), (4, 33, 31), (16, 64, 2048), (20, 200, 2100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "outs", "ins"), SHAPES)
def test_product(tokens: int, outs: int, ins: int, kind: str, dtype: torch.dtype) -> None:
    x, weight = activations(tokens, ins, dtype), weight_of(kind, outs, ins, dtype if outs % 2 else None)
    y = product(x, weight)
    assert_right(y, x, weight)
    if kind == "int8":
        assert torch.equal(y, narrow_matmul(x, weight))  # the same exact sums, then the same roundings


@pytest.mark.parametrize("kind", KINDS)
def test_product_in_bf16(kind: str) -> None:
    x, weight = activations(5, 700, torch.bfloat16), weight_of(kind, 70, 700, torch.bfloat16)
    assert_right(product(x, weight), x, weight)


@pytest.mark.parametrize("kind", ["channels", "blocks"])
@pytest.mark.parametrize(("tokens", "outs", "ins"), [(1, 64, 128), (20, 130, 1160)])
def test_e4m3_by_bit_operations(tokens: int, outs: int, ins: int, kind: str) -> None:
    """Where the compiler has no e4m3: the same products, in float16 at 2^-8 of their size."""
    x, weight = activations(tokens, ins), weight_of(kind, outs, ins, torch.float32)
    assert_right(product(x, weight, SM80), x, weight)


def test_every_code_of_e4m3_by_bit_operations() -> None:
    """x = 1 in one column picks one code: all 254 finite ones come out as they are."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[:, None].expand(254, 32).contiguous()
    x = torch.zeros(1, 32)
    x[0, 3] = 448.0  # the scale is 1, the code 448: exact in float16 and e4m3
    y = product(x, NarrowWeight("e4m3", codes, torch.ones(254), None), SM80)
    assert torch.equal(y[0] / 448, codes[:, 0].float())


@pytest.mark.parametrize("kind", KINDS)
def test_split_and_whole_agree(kind: str) -> None:
    """I = 2048 is split for few tokens and never for many: int8 to the bit, e4m3 within its bound."""
    x, weight = activations(6, 2048), weight_of(kind, 70, 2048, torch.float32)
    few, some, many = (product(x, weight, rows=rows) for rows in ("few", "some", "many"))
    assert split_span(70, 2048, tiles_of("few", "int8", SM90)) == 512
    assert split_span(70, 2048, tiles_of("many", "int8", SM90)) == 2048
    for y in (few, some, many):
        assert_right(y, x, weight)
    if kind == "int8":
        assert torch.equal(few, some)
        assert torch.equal(few, many)


def test_many_tokens() -> None:
    assert [rows_of(tokens) for tokens in (1, 16, 17, 256, 257)] == ["few", "few", "some", "some", "many"]
    for kind in KINDS:
        x, weight = activations(130, 150, torch.float16), weight_of(kind, 130, 150, torch.float16)
        assert_right(product(x, weight, rows="many"), x, weight)


def test_more_tiles_of_tokens_than_a_panel() -> None:
    """150 tokens in tiles of 16 are a whole panel of 8 tiles and a part of one, times three tiles of outs."""
    x, weight = activations(150, 64, torch.float16), weight_of("int8", 130, 64)
    assert torch.equal(product(x, weight, rows="few"), narrow_matmul(x, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_batch(kind: str) -> None:
    weight = weight_of(kind, 70, 1300, torch.float16)
    x = activations(16, 1300, torch.float16)
    together = product(x, weight)
    for first, last in ((0, 1), (5, 8), (15, 16)):
        assert torch.equal(product(x[first:last], weight), together[first:last])
    assert torch.equal(product(x.flip(0), weight), together.flip(0))
    more = activations(40, 1300, torch.float16)
    more[24:] = x
    if kind == "int8":
        assert torch.equal(product(more, weight)[24:], together)
    assert torch.equal(W8A8Triton(weight, invariant=True)(more)[24:], together)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_spoils_itself_alone(kind: str) -> None:
    weight, x = weight_of(kind, 70, 1300), activations(4, 1300)
    x[2, 7], x[3, 1299] = math.nan, -math.inf
    y = product(x, weight)
    assert y[2:].isnan().all()
    assert torch.equal(y[:2], product(x[:2], weight))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: str) -> None:
    assert product(torch.empty(0, 300), weight_of(kind, 70, 300)).shape == (0, 70)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_far_apart(kind: str) -> None:
    """Rows of codes 2^24 bytes apart, in memory that is only touched where they lie: the last lies beyond 2^31."""
    outs, ins, stride = 140, 40, 1 << 24
    weight = weight_of(kind, outs, ins)
    memory = torch.from_numpy(np.zeros((outs - 1) * stride + ins, dtype=np.int8)).view(weight.codes_OI.dtype)
    far = memory.as_strided((outs, ins), (stride, 1))
    far.view(torch.int8).copy_(weight.codes_OI.view(torch.int8))
    x = activations(2, ins)
    assert torch.equal(product(x, replace(weight, codes_OI=far)), product(x, weight))


@settings(derandomize=True, max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 20),
    outs=st.integers(1, 140),
    ins=st.integers(1, 400),
    kind=st.sampled_from(KINDS),
    target=st.sampled_from([SM80, SM90]),
)
def test_any_shape(tokens: int, outs: int, ins: int, kind: str, target: Target) -> None:
    x, weight = activations(tokens, ins), weight_of(kind, outs, ins, torch.float32)
    assert_right(product(x, weight, target), x, weight)
