"""Keys and values into the paged cache on a GPU, quantized on the way, and copies of pages.

Codes and scales are those of the reference to the bit: division is IEEE's, rounding is done on the bits.

Shapes: T tokens, K KV heads, D head dim, P pages, S slots of a page, X copies.
"""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from compress.kernels.kv import LIMITS, Cache, KVCache, Pages, is_static
from compress.kernels.launch import Launch, run, strides, unit_stride
from compress.kernels.token_quant_triton import encode_e4m3, encode_int8

TILE = 2048  # elements of a program that stores
COPIED = 4096  # bytes of a program that copies


@triton.jit
def _store_tile(
    source_at,
    pages_at,
    scales_at,
    mask,
    present,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    STATIC: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Some heads of one token, [K, D]; their scales, if they are quantized, are at [K]."""
    x = tl.load(source_at, mask=mask, other=0.0)
    if not SCALED:
        tl.store(pages_at, x.to(pages_at.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        if STATIC:
            scale = tl.load(scales_at, mask=present, other=1.0)
        else:
            # as integers, magnitudes order as they do as floats, with NaN above all
            largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
            finite = largest < 0x7F800000
            limits = tl.full(largest.shape, LIMIT, tl.float32)
            scale = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), limits), 1.1754943508222875e-38)
            scale = tl.where(finite, scale, float("nan"))
            tl.store(scales_at, scale, mask=present)
        ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        ratio = tl.where(ratio == ratio, tl.minimum(tl.maximum(ratio, -LIMIT), LIMIT), 0.0)
        if INTEGER:
            tl.store(pages_at, encode_int8(ratio), mask=mask)
        else:
            tl.store(pages_at, encode_e4m3(ratio), mask=mask)


@triton.jit
def _store(
    slots,
    keys,
    values,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    kv_heads,
    key_t,
    key_h,
    value_t,
    value_h,
    key_page_p,
    key_page_s,
    key_page_h,
    value_page_p,
    value_page_s,
    value_page_h,
    key_scale_p,
    key_scale_s,
    key_scale_h,
    value_scale_p,
    value_scale_s,
    value_scale_h,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    KEY_SCALED: tl.constexpr,
    KEY_LIMIT: tl.constexpr,
    KEY_STATIC: tl.constexpr,
    KEY_INTEGER: tl.constexpr,
    VALUE_SCALED: tl.constexpr,
    VALUE_LIMIT: tl.constexpr,
    VALUE_STATIC: tl.constexpr,
    VALUE_INTEGER: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE
    slot = slot % PAGE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    present = head < kv_heads
    dims = tl.arange(0, KEY_DIMS)
    _store_tile(
        keys + token * key_t + head[:, None] * key_h + dims[None, :],
        key_pages + page * key_page_p + slot * key_page_s + head[:, None] * key_page_h + dims[None, :],
        key_scales + page * key_scale_p + slot * key_scale_s + head * key_scale_h if KEY_SCALED else key_scales,
        present[:, None] & (dims < KEY_DIM)[None, :],
        present,
        KEY_SCALED,
        KEY_LIMIT,
        KEY_STATIC,
        KEY_INTEGER,
    )
    value_dims = tl.arange(0, VALUE_DIMS)
    _store_tile(
        values + token * value_t + head[:, None] * value_h + value_dims[None, :],
        value_pages + page * value_page_p + slot * value_page_s + head[:, None] * value_page_h + value_dims[None, :],
        value_scales + page * value_scale_p + slot * value_scale_s + head * value_scale_h
        if VALUE_SCALED
        else value_scales,
        present[:, None] & (value_dims < VALUE_DIM)[None, :],
        present,
        VALUE_SCALED,
        VALUE_LIMIT,
        VALUE_STATIC,
        VALUE_INTEGER,
    )


@triton.jit
def _copy(copies, pages, words, page_words, BLOCK: tl.constexpr):
    copy = copies + tl.program_id(0).to(tl.int64) * 2
    source = tl.load(copy).to(tl.int64)
    destination = tl.load(copy + 1).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    content = tl.load(pages + source * page_words + word, mask=word < words)
    tl.store(pages + destination * page_words + word, content, mask=word < words)


def plan_store(k_TKD: torch.Tensor, v_TKD: torch.Tensor, pages: Pages, slots_T: torch.Tensor) -> list[Launch]:
    """Write the keys and values of T tokens to their slots. Tokens whose slot is −1 are left out.

    D of keys and values may differ, as those of latents and rotated keys do.
    """
    tokens, kv_heads, key_dim = k_TKD.shape
    value_dim = v_TKD.shape[2]
    key_dims, value_dims = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    heads = int(min(triton.next_power_of_2(kv_heads), max(1, TILE // max(key_dims, value_dims))))
    arguments = {
        "slots": slots_T,
        "keys": k_TKD,
        "values": v_TKD,
        "key_pages": _as_bytes(pages.keys_PSKD),
        "value_pages": _as_bytes(pages.values_PSKD),
        "key_scales": pages.key_scales_PSK,
        "value_scales": pages.value_scales_PSK,
        "kv_heads": kv_heads,
        **strides("key", k_TKD, "th"),
        **strides("value", v_TKD, "th"),
        **strides("key_page", pages.keys_PSKD, "psh"),
        **strides("value_page", pages.values_PSKD, "psh"),
        **strides("key_scale", pages.key_scales_PSK, "psh"),
        **strides("value_scale", pages.value_scales_PSK, "psh"),
        "PAGE": pages.keys_PSKD.shape[1],
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "KEY_DIMS": key_dims,
        "VALUE_DIM": value_dim,
        "VALUE_DIMS": value_dims,
        **_format("KEY", pages.keys_PSKD, pages.key_scales_PSK),
        **_format("VALUE", pages.values_PSKD, pages.value_scales_PSK),
    }
    return [Launch(_store, (tokens, -(-kv_heads // heads)), arguments)]


def _format(name: str, pages_PSKD: torch.Tensor, scales_PSK: torch.Tensor | None) -> dict[str, object]:
    return {
        f"{name}_SCALED": scales_PSK is not None,
        f"{name}_LIMIT": LIMITS.get(pages_PSKD.dtype, 0.0),
        f"{name}_STATIC": scales_PSK is not None and is_static(scales_PSK),
        f"{name}_INTEGER": pages_PSKD.dtype == torch.int8,
    }


def _as_bytes(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def plan_copy_pages(cache: Cache, copies_X2: torch.Tensor) -> list[Launch]:
    """Copy whole pages, rows (source, destination) of `copies_X2`, in every tensor of the cache.

    The copies run at once: no destination may be a source. A page must be contiguous, pages may be apart.
    """
    launches = []
    for tensor in cache.written:
        if not tensor[0].is_contiguous():
            raise ValueError("the slots of a page are not contiguous")
        width = max(size for size in (4, 2, 1) if tensor[0].nbytes % size == 0 and tensor.stride(0) % size == 0)
        words = tensor.view(torch.uint8).flatten(1).view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
        count, block = words.shape[1], COPIED // width
        launches.append(
            Launch(
                _copy,
                (len(copies_X2), -(-count // block)),
                {
                    "copies": copies_X2,
                    "pages": words,
                    "words": count,
                    "page_words": words.stride(0),
                    "BLOCK": block,
                },
            )
        )
    return launches


def store(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: KVCache, layer: int, slots_T: torch.Tensor) -> None:
    """As `compress.kernels.kv.store`."""
    run(plan_store(unit_stride(k_TKD), unit_stride(v_TKD), cache.layer(layer), unit_stride(slots_T)))


def copy_pages(cache: Cache, copies: Sequence[tuple[int, int]]) -> None:
    """As `compress.kernels.kv.copy_pages`, but no destination may be a source."""
    run(plan_copy_pages(cache, torch.tensor(copies, dtype=torch.int32).to(cache.written[0].device)))
