"""Storing and copying pages on a GPU gives the bytes of the references."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import kv, kv_triton
from compress.kernels.kv import LIMITS, KVCache, static_scales
from compress.kernels.launch import run
from compress.kernels.mla import LatentCache, store_latents

PAGES, SIZE = 6, 4


def tensors(heads: int, dim: int, dtype: torch.dtype, static: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pages whose bytes are all 0x5A, and scales of −1."""
    width = torch.empty(0, dtype=dtype).element_size()
    codes = torch.full((PAGES, SIZE, heads, dim * width), 0x5A, dtype=torch.uint8).view(dtype)
    if dtype not in LIMITS:
        return codes, None
    if static:
        return codes, static_scales(torch.linspace(0.01, 0.7, heads), PAGES, SIZE)
    return codes, torch.full((PAGES, SIZE, heads), -1.0)


def caches(heads: int, dim: int, key: torch.dtype, value: torch.dtype, static: bool) -> tuple[KVCache, KVCache]:
    def one() -> KVCache:
        (keys, key_scales), (values, value_scales) = (tensors(heads, dim, dtype, static) for dtype in (key, value))
        return KVCache(
            (keys,),
            (values,),
            None if key_scales is None else (key_scales,),
            None if value_scales is None else (value_scales,),
        )

    return one(), one()


def same_bytes(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(ours.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def tricky(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, subnormals, outliers, ties of both formats, infinity and NaN."""
    x = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0.0
    x[1, 0] = -0.0
    x[2, -1] = 1e-41
    x[3, 0, 3] = 1e4
    x[4] *= 1e-5
    x[5, 0, :8] = torch.tensor([127.0, 2.5, 3.5, -0.5, 0.5, 1.5, -126.5, 1e-3])
    x[6, 0, :8] = torch.tensor([448.0, 1.0625, 1.1875, -17.0, 2**-10, 2**-9 * 1.5, -(2**-6), 300.0])
    x[7, 0, 0], x[8, -1, 1] = torch.nan, -torch.inf
    return x.to(dtype)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    ("key", "value", "dtype"),
    [
        (torch.int8, torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.int8, torch.float16),
        (torch.float16, torch.float8_e4m3fn, torch.float16),
        (torch.bfloat16, torch.int8, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 80), (40, 64)])
def test_store(heads: int, dim: int, key: torch.dtype, value: torch.dtype, dtype: torch.dtype, static: bool) -> None:
    ours, wanted = caches(heads, dim, key, value, static)
    qkv = tricky(12, 2 * heads + 1, dim, dtype)  # keys and values as slices of one product
    slots = torch.tensor([7, 0, 23, 11, 12, 1, 2, 3, 4, -1, 5, -1])
    for cache, write in ((ours, kv_triton.store), (wanted, kv.store)):
        write(qkv[:, :heads], qkv[:, heads + 1 :], cache, 0, slots)
    for a, b in zip(ours.written, wanted.written, strict=True):
        same_bytes(a, b)


def test_latents_are_stored_as_keys_and_values_of_different_size() -> None:
    generator = torch.Generator().manual_seed(0)
    latents, keys = torch.randn(5, 96, generator=generator), torch.randn(5, 16, generator=generator)
    slots = torch.tensor([3, 17, -1, 8, 0])
    both = torch.full((2, PAGES, SIZE, 112), -7.0)
    ours, wanted = (LatentCache((half[..., :96],), (half[..., 96:],)) for half in both)
    store_latents(latents, keys, wanted.layer(0), slots)
    run(kv_triton.plan_store(latents[:, None], keys[:, None], ours.layer(0).as_heads, slots))
    same_bytes(both[0], both[1])


def test_copy_pages() -> None:
    ours, wanted = caches(3, 10, torch.float16, torch.int8, False)
    x = torch.randn(24, 3, 10, generator=torch.Generator().manual_seed(0))
    for cache in (ours, wanted):
        kv.store(x.half(), x.half(), cache, 0, torch.arange(24))
    copies = [(0, 3), (2, 5), (0, 1)]
    kv_triton.copy_pages(ours, copies)
    kv.copy_pages(wanted, copies)
    for a, b in zip(ours.written, wanted.written, strict=True):
        same_bytes(a, b)


def test_pages_of_odd_size_and_pages_apart_are_copied() -> None:
    wide = torch.randint(-100, 100, (4, 2, 3, 3, 5), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    before = wide.clone()
    kv_triton.copy_pages(KVCache((wide[:, 0],), (wide[:, 1],)), [(1, 2)])
    before[2] = before[1]
    assert torch.equal(wide, before)
    with pytest.raises(ValueError, match="not contiguous"):
        kv_triton.copy_pages(KVCache((wide[:, 0].transpose(1, 2),), (wide[:, 1],)), [(1, 2)])
