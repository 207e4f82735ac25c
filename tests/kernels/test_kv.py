"""The paged cache in formats of one byte, against NumPy and exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress.kernels.kv import (
    LIMITS,
    TINY,
    KVCache,
    copy_pages,
    dequantize,
    dynamic_scales,
    is_static,
    quantize,
    static_scales,
    store,
)

FORMATS = list(LIMITS)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 to 448, in order


def tricky(tokens: int = 6, heads: int = 2, dim: int = 8) -> torch.Tensor:
    """Zeros of both signs, a subnormal token, an outlier, and large and small magnitudes."""
    x = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(0))
    x[0] = 0.0
    x[1, 0] = -0.0
    x[1, 1] = 1e-41
    x[2, 0, 3] = 1e4
    x[3] *= 1e-6
    return x


def empty(dtype: torch.dtype, scales: torch.Tensor | None = None) -> KVCache:
    """Five pages of four slots for both sides."""
    codes = [torch.zeros(5, 4, 2, 8).to(dtype) for _ in range(2)]
    return KVCache((codes[0],), (codes[1],), *((scale,) for scale in ([scales] * 2 if scales is not None else dyn())))


def dyn() -> list[torch.Tensor]:
    return [torch.full((5, 4, 2), torch.nan) for _ in range(2)]


@pytest.mark.parametrize("dtype", FORMATS)
def test_codes_are_the_nearest(dtype: torch.dtype) -> None:
    """No other code is nearer to x / scale, and of two as near the even one is taken."""
    x = tricky()
    scale = dynamic_scales(x, dtype)
    codes = quantize(x, scale, dtype).double()
    ratio = (x / scale[..., None]).double()
    values = torch.arange(128).double() if dtype == torch.int8 else E4M3
    distance = (ratio.abs()[..., None] - values).abs()
    assert torch.equal((ratio - codes).abs(), distance.amin(dim=-1))


@pytest.mark.parametrize(("dtype", "tie", "even"), [(torch.int8, 2.5, 2), (torch.float8_e4m3fn, 1.0625, 1.0)])
def test_ties_and_overflow(dtype: torch.dtype, tie: float, even: float) -> None:
    x = torch.tensor([tie, -tie, 1e6, -1e6, torch.inf, torch.nan]).view(1, 1, -1)
    limit = LIMITS[dtype]
    codes = quantize(x, torch.ones(1, 1), dtype).float().flatten().tolist()
    assert codes == [even, -even, limit, -limit, limit, 0]


@pytest.mark.parametrize("dtype", FORMATS)
def test_error_of_dynamic_scales_is_bounded(dtype: torch.dtype) -> None:
    """int8: half a step, absmax/254. e4m3: 2⁻⁴ of the value, or half its least step, 2⁻¹⁰ of the scale."""
    x = tricky()
    scale = dynamic_scales(x, dtype)
    error = (dequantize(quantize(x, scale, dtype), scale, torch.float32) - x).abs()
    half = scale[..., None] * 0.5 if dtype == torch.int8 else torch.maximum(x.abs() / 16, scale[..., None] / 1024)
    assert (error <= half * 1.0001 + TINY).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_and_what_is_not_finite(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 1, 8)
    x[1, 0, 2], x[2, 0, 5] = torch.nan, -torch.inf
    scale = dynamic_scales(x, dtype)
    back = dequantize(quantize(x, scale, dtype), scale, torch.float32)
    assert torch.equal(back[0], x[0])
    assert back[1:].isnan().all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_store_quantizes_into_the_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    cache, x = empty(dtype), tricky()
    slots = torch.tensor([7, -1, 0, 19, 4, -1])
    store(x, 2 * x, cache, 0, slots)
    kept = slots >= 0
    pages = cache.layer(0)
    for codes, scales, wanted in (
        (pages.keys_PSKD, pages.key_scales_PSK, x),
        (pages.values_PSKD, pages.value_scales_PSK, 2 * x),
    ):
        assert scales is not None
        scale = dynamic_scales(wanted, dtype)
        assert torch.equal(scales.flatten(0, 1)[slots[kept]], scale[kept])
        stored = codes.float().flatten(0, 1)
        assert torch.equal(stored[slots[kept]], quantize(wanted, scale, dtype).float()[kept])
        others = torch.ones(20, dtype=torch.bool)
        others[slots[kept]] = False
        assert (stored[others] == 0).all()
        assert scales.flatten(0, 1)[others].isnan().all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_static_scales_are_not_written(dtype: torch.dtype) -> None:
    scales = static_scales(torch.tensor([0.5, 0.01]), 5, 4)
    assert is_static(scales)
    cache, x = empty(dtype, scales), tricky()
    store(x, x, cache, 0, torch.arange(6))
    assert torch.equal(scales[3, 2], torch.tensor([0.5, 0.01]))
    wanted = quantize(x, scales[0, 0].expand(6, -1), dtype).float()
    assert torch.equal(cache.keys[0].float().flatten(0, 1)[:6], wanted)
    assert scales.untyped_storage().nbytes() == 8


def test_one_page_of_one_slot_can_be_static() -> None:
    assert is_static(static_scales(torch.ones(3), 1, 1))
    assert not is_static(torch.ones(1, 1, 3))


def test_bytes_count_scales_once() -> None:
    assert empty(torch.int8).nbytes == 2 * (5 * 4 * 2 * 8 + 5 * 4 * 2 * 4)
    assert empty(torch.int8, static_scales(torch.ones(2), 5, 4)).nbytes == 2 * 5 * 4 * 2 * 8


@pytest.mark.parametrize("dtype", FORMATS)
def test_copied_pages_bring_their_scales(dtype: torch.dtype) -> None:
    cache, x = empty(dtype), torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(1))
    store(x, 3 * x, cache, 0, torch.arange(20))
    before = [tensor.float().clone() for tensor in cache.written]
    copy_pages(cache, [(0, 3), (2, 4)])
    for old, new in zip(before, cache.written, strict=True):
        np.testing.assert_array_equal(new.float().numpy(), old[[0, 1, 2, 0, 2]].numpy())
