"""Stored keys and values: the reference's bytes, in the slots that they belong to and nowhere else."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from compress.kernels import kv
from compress.kernels.cpu.build import library
from compress.kernels.cpu.store import store
from compress.kernels.kv import LIMITS, KVCache, static_scales

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")
FORMATS = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
PAGES, SLOTS, HEADS = 5, 16, 2
compiled = partial(store, isa="portable")


def cache(keys: torch.dtype, values: torch.dtype, dim: int, static_K: torch.Tensor | None = None) -> KVCache:
    def scales(dtype: torch.dtype) -> tuple[torch.Tensor, ...] | None:
        if dtype not in LIMITS:
            return None
        if static_K is not None:
            return tuple(static_scales(static_K, PAGES, SLOTS) for _ in range(2))
        return tuple(torch.full((PAGES, SLOTS, HEADS), 7.0) for _ in range(2))

    def pages(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full((PAGES, SLOTS, HEADS, dim), 7.0).to(dtype) for _ in range(2))

    return KVCache(pages(keys), pages(values), scales(keys), scales(values))


def assert_stored_alike(k_TKD: torch.Tensor, v_TKD: torch.Tensor, slots_T: torch.Tensor, *made: object) -> None:
    """As the reference, byte for byte but for the codes of what is not a number."""
    ours, expected = cache(*made), cache(*made)  # type: ignore[arg-type]
    compiled(k_TKD, v_TKD, ours, 1, slots_T)
    kv.store(k_TKD, v_TKD, expected, 1, slots_T)
    for one, other in zip(ours.written, expected.written, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        whole = torch.uint8 if one.itemsize == 1 else {2: torch.int16, 4: torch.int32}[one.itemsize]
        numbers = ~one.isnan()
        assert torch.equal(one.view(whole)[numbers], other.view(whole)[numbers])


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("keys", FORMATS)
def test_formats_are_chosen_apart(keys: torch.dtype, values: torch.dtype) -> None:
    """A slot of −1 is a row of padding; rows are strided."""
    torch.manual_seed(0)
    qkv_THD = torch.randn(6, 7, 16)
    slots_T = torch.tensor([5, 17, -1, 0, 79, 30])
    assert_stored_alike(qkv_THD[:, 3:5], qkv_THD[:, 5:], slots_T, keys, values, 16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_static_scales_are_not_written(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k_TKD, v_TKD = torch.randn(2, 6, HEADS, 16) * 3  # beyond the largest code too
    slots_T = torch.tensor([5, 17, -1, 0, 79, 30])
    assert_stored_alike(k_TKD, v_TKD, slots_T, dtype, dtype, 16, torch.tensor([0.01, 0.002]))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 2.0**-20])
def test_every_rounding(dtype: torch.dtype, scale: float) -> None:
    """All float16 numbers, with their halves between two of them: ties, subnormals, overflow, infinities, NaN."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float() * scale
    between = torch.cat((numbers, torch.nextafter(numbers, torch.tensor(torch.inf)), numbers * 1.00048828125))
    x_TKD = between.view(-1, HEADS, 48)
    slots = PAGES * SLOTS
    for first in range(0, len(x_TKD), slots):
        part_TKD = x_TKD[first : first + slots]
        assert_stored_alike(part_TKD, part_TKD, torch.arange(len(part_TKD)), dtype, dtype, 48)
        if dtype in LIMITS:
            unit_K = torch.ones(HEADS)
            assert_stored_alike(part_TKD, part_TKD, torch.arange(len(part_TKD)), dtype, dtype, 48, unit_K)


def test_fewer_slots_than_tokens_are_refused() -> None:
    x_TKD = torch.randn(4, HEADS, 16)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(x_TKD, x_TKD, cache(torch.float32, torch.float32, 16), 0, torch.tensor([0, 1, 2]))
