"""Paged attention, latent attention and their cache: what the gate compiles, and what it looks for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compress.kernels.attention_plan import PackedWork
from compress.kernels.attention_triton import choose_tile, plan_attention, plan_reduction
from compress.kernels.attention_work import SHORT, Cut
from compress.kernels.gate_case import Case
from compress.kernels.kv import LIMITS, KVCache, Pages, static_scales
from compress.kernels.kv_triton import plan_copy_pages, plan_store
from compress.kernels.launch import TARGETS, Launch, Target
from compress.kernels.mla import LatentPages
from compress.kernels.mla_triton import choose_latent_tile, plan_latent_attention
from compress.kernels.queries import AttentionOptions, PagedQueries

META = torch.device("meta")
PAGES, CONTEXT = 4096, 3000  # six splits
BF16, INT8, E4M3 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
# 16 rows are too few for the matrix units that take their operands from shared memory
FEW_ROWS = {str(target): "HMMA" if target.backend == "cuda" else "v_mfma" for target in TARGETS}
MANY_ROWS = {**FEW_ROWS, "sm_90": "HGMMA", "sm_100": "UTCHMMA"}


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def make_pages(page: int, kv_heads: int, head_dim: int, key: torch.dtype, value: torch.dtype, static: bool) -> Pages:
    def scales(dtype: torch.dtype) -> torch.Tensor | None:
        if dtype not in LIMITS:
            return None
        if static:
            return static_scales(meta(kv_heads, dtype=torch.float32), PAGES, page)
        return meta(PAGES, page, kv_heads, dtype=torch.float32)

    shape = (PAGES, page, kv_heads, head_dim)
    return Pages(meta(*shape, dtype=key), meta(*shape, dtype=value), scales(key), scales(value))


def requests(length: int, page: int) -> PagedQueries:
    return PagedQueries([length] * 2, [CONTEXT] * 2, [list(range(-(-CONTEXT // page)))] * 2, page)


def attention(
    length: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page: int = 16,
    dtype: torch.dtype = BF16,
    key: torch.dtype = BF16,
    value: torch.dtype = BF16,
    options: AttentionOptions | None = None,
    static: bool = False,
) -> Callable[[Target], list[Launch]]:
    def plan(target: Target) -> list[Launch]:
        # heads of queries, keys and values lie side by side, as a model computes them
        q = meta(2 * length, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
        pages = make_pages(page, kv_heads, head_dim, key, value, static)
        tile = choose_tile(q, pages, target, length <= SHORT)
        chosen = options or AttentionOptions()
        cut = Cut(chosen.window, tile.rows // (heads // kv_heads), tile.keys, length <= SHORT)
        packed = PackedWork(requests(length, page), [cut], META)
        out = meta(2 * length, heads, head_dim, dtype=dtype)
        partials = packed.partials(heads, head_dim)
        return plan_attention(q, pages, chosen, packed.works[cut], packed.table, tile, out, partials, target)

    return plan


def latent(rank: int, page: int = 16) -> Callable[[Target], list[Launch]]:
    def plan(target: Target) -> list[Launch]:
        q, q_rotated, cache = meta(2, 128, rank), meta(2, 128, 64), meta(PAGES, page, rank + 64)
        tile = choose_latent_tile(q, target)
        cut = Cut(None, 1, tile.keys)
        packed = PackedWork(requests(1, page), [cut], META)
        pages = LatentPages(cache[..., :rank], cache[..., rank:])
        work, partials = packed.works[cut], packed.partials(128, rank)
        return plan_latent_attention(
            q, q_rotated, pages, 0.07, work, packed.table, tile, meta(2, 128, rank), partials, target
        )

    return plan


def reduction(target: Target) -> list[Launch]:
    del target  # the same for all
    cut = Cut(None, 4, 32, True)
    packed = PackedWork(requests(1, 16), [cut], META)
    return [plan_reduction(packed.works[cut], packed.partials(32, 128), meta(32), meta(2, 32, 128))]


def storing(key: torch.dtype, value: torch.dtype, static: bool = False) -> Callable[[Target], list[Launch]]:
    def plan(target: Target) -> list[Launch]:
        del target  # codes are made of bits, the same for all
        qkv = meta(64, 48, 128)
        pages = make_pages(16, 8, 128, key, value, static)
        return plan_store(qkv[:, 32:40], qkv[:, 40:], pages, meta(64, dtype=torch.int64))

    return plan


def copying(target: Target) -> list[Launch]:
    del target
    pages = make_pages(16, 8, 128, BF16, INT8, False)
    assert pages.value_scales_PSK is not None
    cache = KVCache((pages.keys_PSKD,), (pages.values_PSKD,), None, (pages.value_scales_PSK,))
    return plan_copy_pages(cache, meta(3, 2, dtype=torch.int32))


GEMMA = AttentionOptions(window=1024, soft_cap=50.0, scale=0.0625)
SINKS = AttentionOptions(window=128, sinks_H=meta(64))
TWO_TILES = (2, 2 * 32 * 128 * 2)  # 32 keys and 32 values of 128 numbers of 2 bytes, or 64 of 1 byte

# The elements are those of NVIDIA's tiles; where another target's are smaller its count is of more than one iteration.
CASES = [
    Case("decode D=128 G=4", attention(), 2 * 32 * 128, FEW_ROWS, TWO_TILES),
    Case("decode D=128 G=8", attention(heads=64), 2 * 32 * 128, FEW_ROWS, TWO_TILES),
    Case("decode D=128 int8 pages", attention(key=INT8, value=INT8), 2 * 64 * 128, FEW_ROWS, TWO_TILES),
    Case("decode D=128 fp8 pages", attention(key=E4M3, value=E4M3), 2 * 64 * 128, FEW_ROWS, TWO_TILES),
    Case(
        "decode D=128 fp8 pages, static scales",
        attention(key=E4M3, value=E4M3, static=True),
        2 * 64 * 128,
        FEW_ROWS,
        TWO_TILES,
    ),
    Case("decode D=128 bf16 keys, fp8 values", attention(value=E4M3), 2 * 32 * 128, FEW_ROWS),
    Case(
        "decode D=128 fp16, int8 pages",
        attention(dtype=torch.float16, key=INT8, value=INT8),
        2 * 32 * 128,
        FEW_ROWS,
        (2, 2 * 32 * 128),
    ),
    Case("decode D=64", attention(head_dim=64), 2 * 64 * 64, FEW_ROWS, (2, 2 * 64 * 64 * 2)),
    Case("decode D=80", attention(head_dim=80, heads=32, kv_heads=32), 2 * 32 * 80, FEW_ROWS),
    Case("decode D=256", attention(head_dim=256), 2 * 32 * 256, FEW_ROWS, (2, 2 * 32 * 256 * 2)),
    Case("decode D=128 page 1", attention(page=1), 2 * 32 * 128, FEW_ROWS, TWO_TILES),
    Case("decode D=128 page 32", attention(page=32), 2 * 32 * 128, FEW_ROWS, TWO_TILES),
    Case("decode D=64 G=71", attention(heads=71, kv_heads=1, head_dim=64), 2 * 64 * 64, MANY_ROWS),
    Case("decode D=256 soft cap and window", attention(head_dim=256, options=GEMMA), 2 * 32 * 256, FEW_ROWS),
    Case("decode D=64 sinks and window", attention(heads=64, head_dim=64, options=SINKS), 2 * 64 * 64, FEW_ROWS),
    Case("decode D=128 float32", attention(dtype=torch.float32, key=torch.float32, value=torch.float32)),
    Case("verify D=128 q=4", attention(length=4), 2 * 32 * 128, FEW_ROWS, TWO_TILES),
    Case("prefill D=128", attention(length=512), 2 * 64 * 128, MANY_ROWS),
    Case("prefill D=128 fp8 pages", attention(length=512, key=E4M3, value=E4M3), 2 * 64 * 128, MANY_ROWS),
    Case("prefill D=64", attention(length=512, head_dim=64), 2 * 64 * 64, MANY_ROWS),
    Case("prefill D=256 soft cap and window", attention(length=512, head_dim=256, options=GEMMA), 2 * 32 * 256),
    Case("latent attention 512+64", latent(512), 32 * 576, FEW_ROWS, (2, 32 * 576 * 2)),
    Case("latent attention 256+64", latent(256), 32 * 320, FEW_ROWS, (2, 32 * 320 * 2)),
    Case("latent attention 512+64 page 1", latent(512, page=1), 32 * 576, FEW_ROWS, (2, 32 * 576 * 2)),
    Case("latent attention 385+64", latent(385), 16 * 449, FEW_ROWS),
    Case("reduction of splits", reduction),
    Case("store bf16", storing(BF16, BF16)),
    Case("store int8 and fp8", storing(INT8, E4M3)),
    Case("store fp8, static scales", storing(E4M3, E4M3, static=True)),
    Case("copy pages", copying),
]
