"""Ragged batches over a paged cache, and what their attention must be, in float64.

Shapes: T tokens, H query heads, K KV heads, D head dim, P pages, S slots of a page, N keys of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.kernels.kv import LIMITS, KVCache, Pages, dequantize, store
from compress.kernels.queries import AttentionOptions, PagedQueries


@dataclass(frozen=True)
class PagedBatch:
    """New tokens of some requests, and a cache in which their keys and values stand among poisoned slots."""

    q_THD: torch.Tensor
    pages: Pages
    queries: PagedQueries

    def alone(self, index: int) -> PagedBatch:
        """The same request on the same pages, without its neighbours."""
        lengths = self.queries.lengths
        first = sum(lengths[:index])
        queries = PagedQueries(
            [lengths[index]], [self.queries.contexts[index]], [self.queries.tables[index]], self.queries.page_size
        )
        return PagedBatch(self.q_THD[first : first + lengths[index]], self.pages, queries)


def make_batch(
    requests: Sequence[tuple[int, int]],
    page_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    key_format: torch.dtype | None = None,
    value_format: torch.dtype | None = None,
    seed: int = 0,
    unwritten: float = torch.nan,
) -> PagedBatch:
    """(new tokens, context) of each request. Keys and values have outliers; one token in seven is all zeros.

    What is drawn for a request depends on its place and the seed alone, not on the page size. Slots that nobody wrote
    hold `unwritten` (of int8 it is the scale that does): the references do not bear NaN there.
    """
    shuffle = torch.Generator().manual_seed(seed)
    used = sum(-(-context // page_size) for _, context in requests)
    shape = (used + 3, page_size, kv_heads, head_dim)
    cache = _poisoned_cache(shape, key_format or dtype, value_format or dtype, unwritten)
    free = (torch.randperm(used + 2, generator=shuffle) + 1).tolist()  # never page 0, which pads tables
    tables, queries = [], []
    for index, (length, context) in enumerate(requests):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        table = [free.pop() for _ in range(-(-context // page_size))]
        k, v = torch.randn(2, context, kv_heads, head_dim, generator=generator)
        k[::5, :, 0] *= 6
        v[3::11] *= 8
        v[6::7] = 0
        slots = torch.tensor([table[p // page_size] * page_size + p % page_size for p in range(context)])
        store(k.to(dtype), v.to(dtype), cache, 0, slots.long())
        tables.append(table)
        queries.append(torch.randn(length, heads, head_dim, generator=generator))
    paged = PagedQueries([r[0] for r in requests], [r[1] for r in requests], tables, page_size)
    return PagedBatch(torch.cat(queries).to(dtype), cache.layer(0), paged)


def _poisoned_cache(
    shape: tuple[int, int, int, int], key_format: torch.dtype, value_format: torch.dtype, unwritten: float
) -> KVCache:
    def tensors(dtype: torch.dtype) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor] | None]:
        if dtype not in LIMITS:
            return (torch.full(shape, unwritten, dtype=dtype),), None
        codes = torch.full(shape, 113 if dtype == torch.int8 else unwritten).to(dtype)
        return (codes,), (torch.full(shape[:3], unwritten),)

    (keys, key_scales), (values, value_scales) = tensors(key_format), tensors(value_format)
    return KVCache(keys, values, key_scales, value_scales)


def expected(batch: PagedBatch, options: AttentionOptions) -> torch.Tensor:
    """Each query on its own over a dense softmax, float64 [T, H, D]."""
    k_PSKD = _wide(batch.pages.keys_PSKD, batch.pages.key_scales_PSK)
    v_PSKD = _wide(batch.pages.values_PSKD, batch.pages.value_scales_PSK)
    queries, token, rows = batch.queries, 0, []
    for length, context, table in zip(queries.lengths, queries.contexts, queries.tables, strict=True):
        if length == 0:
            continue
        k, v = (x[torch.tensor(table)].flatten(0, 1)[:context] for x in (k_PSKD, v_PSKD))
        for position in range(context - length, context):
            first = max(0, position + 1 - options.window) if options.window else 0
            seen = slice(first, position + 1)
            rows.append(_attend_one(batch.q_THD[token].double(), k[seen], v[seen], options))
            token += 1
    return torch.stack(rows) if rows else batch.q_THD.double()


def _wide(codes_PSKD: torch.Tensor, scales_PSK: torch.Tensor | None) -> torch.Tensor:
    return codes_PSKD.double() if scales_PSK is None else dequantize(codes_PSKD, scales_PSK, torch.float64)


def _attend_one(
    q_HD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    heads, head_dim = q_HD.shape
    group = heads // k_NKD.shape[1]
    k_HND, v_HND = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k_NKD, v_NKD))
    scores_HN = (k_HND @ q_HD[:, :, None])[:, :, 0] * (options.scale or head_dim**-0.5)
    if options.soft_cap is not None:
        scores_HN = options.soft_cap * torch.tanh(scores_HN / options.soft_cap)
    weights_HN = scores_HN.exp()
    total_H = weights_HN.sum(dim=1)
    if options.sinks_H is not None:
        total_H = total_H + options.sinks_H.double().exp()
    return (weights_HN[:, None] @ v_HND)[:, 0] / total_H[:, None]
