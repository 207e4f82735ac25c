"""Causal attention with grouped KV heads and sliding windows: over a paged cache, and over whole sequences.

A query at position p sees the keys at positions ≤ p, and > p − window where there is one.

Shapes: T tokens of a flat batch, H query heads, K KV heads, G = H/K, D head dim, P pages, N requests, L new tokens of a
request, S keys, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

FOLDED_ROWS = 16  # up to so many new tokens the query heads of a KV head become rows of one product


@dataclass(frozen=True)
class PagedQueries:
    """The requests of a flat batch, in its order.

    `lengths` counts the new tokens of each, `contexts` all of its tokens up to the last new one, `tables` lists its
    pages. Requests with equal lengths are attended together where they are neighbours.
    """

    lengths: Sequence[int]
    contexts: Sequence[int]
    tables: Sequence[Sequence[int]]
    page_size: int


@dataclass(frozen=True)
class Span:
    """Neighbouring requests with L new tokens each, and the pages that they can see under one window."""

    tokens: slice
    requests: int
    length: int
    pages: slice | torch.Tensor  # consecutive pages of one request, or [N·pages per request]
    keys: int  # S: the keys of each request that are read
    causal: bool  # the new tokens are the whole sequence, so the mask is the triangle
    folded: bool  # the G query heads of a KV head are rows of one product: R = L·G, else R = L
    mask_N1RS: torch.Tensor | None  # 0 where visible, else -inf; None where all is


class PagedAttention:
    """Attention of one step, planned on the host once and run in every layer. The reference of the paged kernel."""

    def __init__(self, queries: PagedQueries) -> None:
        self._queries = queries
        self._plans: dict[int | None, list[Span]] = {}

    def __call__(
        self, q_THD: torch.Tensor, keys_PSKD: torch.Tensor, values_PSKD: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        if window not in self._plans:
            group = q_THD.shape[1] // keys_PSKD.shape[2]
            self._plans[window] = plan_spans(self._queries, window, group, q_THD.dtype, q_THD.device)
        parts = [
            _attend_span(q_THD[span.tokens], _gather(keys_PSKD, span), _gather(values_PSKD, span), span)
            for span in self._plans[window]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_spans(
    queries: PagedQueries, window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> list[Span]:
    """Split the batch into spans, and find the pages and the mask of each.

    A span ends where the number of new tokens changes, or where padding its shortest request to its longest would
    read more than twice what the shortest needs.
    """
    spans, first, token = [], 0, 0
    for last in range(1, len(queries.lengths) + 1):
        if last < len(queries.lengths) and _alike(queries, first, last):
            continue
        spans.append(_plan_span(queries, first, last, token, window, group, dtype, device))
        token += queries.lengths[first] * (last - first)
        first = last
    return spans


def _alike(queries: PagedQueries, first: int, other: int) -> bool:
    slack = 8 * queries.page_size
    short, long = sorted((queries.contexts[first], queries.contexts[other]))
    return queries.lengths[first] == queries.lengths[other] and long <= 2 * short + slack


def _plan_span(
    queries: PagedQueries,
    first: int,
    last: int,
    token: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Span:
    size, length, count = queries.page_size, queries.lengths[first], last - first
    contexts = queries.contexts[first:last]
    # the pages before the window of the oldest new token are not read at all
    skipped = [max(0, context - length - window + 1) // size if window else 0 for context in contexts]
    used = [-(-context // size) for context in contexts]
    tables = [table[skip:stop] for table, skip, stop in zip(queries.tables[first:last], skipped, used, strict=True)]
    first_keys = [skip * size for skip in skipped]
    keys = max(context - first_key for context, first_key in zip(contexts, first_keys, strict=True))
    causal = length > 1 and all(context == length for context in contexts) and (window is None or window >= length)
    folded = length <= FOLDED_ROWS and not causal
    mask = None
    if not causal and not _sees_all(contexts, first_keys, length, keys, window):
        visible_NLS = _visible(contexts, first_keys, length, keys, window, device)
        # additive, once for all layers: a boolean mask would be turned into this one in each
        mask = torch.zeros(visible_NLS.shape, dtype=dtype, device=device).masked_fill_(~visible_NLS, -torch.inf)
        mask = mask.repeat_interleave(group if folded else 1, dim=1)[:, None]
    return Span(
        tokens=slice(token, token + length * count),
        requests=count,
        length=length,
        pages=_page_index(tables, device),
        keys=keys,
        causal=causal,
        folded=folded,
        mask_N1RS=mask,
    )


def _page_index(tables: Sequence[Sequence[int]], device: torch.device) -> slice | torch.Tensor:
    pages = tables[0]
    if len(tables) == 1 and pages[-1] - pages[0] == len(pages) - 1 and list(pages) == sorted(pages):
        return slice(pages[0], pages[-1] + 1)
    width = max(len(table) for table in tables)
    # page 0 pads: it exists, and the mask hides what it holds
    flat = [page for table in tables for page in [*table, *[0] * (width - len(table))]]
    return torch.tensor(flat, device=device)


def _sees_all(contexts: Sequence[int], first_keys: Sequence[int], length: int, keys: int, window: int | None) -> bool:
    equal = all(context - first == keys for context, first in zip(contexts, first_keys, strict=True))
    return length == 1 and equal and (window is None or keys <= window)


def _visible(
    contexts: Sequence[int],
    first_keys: Sequence[int],
    length: int,
    keys: int,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    """Which of the S keys from first_keys on each of the L last tokens of each request sees, [N, L, S]."""
    key_NS = torch.tensor(first_keys, device=device)[:, None] + torch.arange(keys, device=device)
    query_NL = torch.tensor(contexts, device=device)[:, None] - length + torch.arange(length, device=device)
    visible_NLS = key_NS[:, None, :] <= query_NL[:, :, None]
    if window is not None:
        visible_NLS &= key_NS[:, None, :] > query_NL[:, :, None] - window
    return visible_NLS


def _gather(cache_PSKD: torch.Tensor, span: Span) -> torch.Tensor:
    """[N, K, S, D]: a view where the pages are consecutive, else a copy."""
    pages = cache_PSKD[span.pages] if isinstance(span.pages, slice) else cache_PSKD.index_select(0, span.pages)
    kv_heads, head_dim = cache_PSKD.shape[2:]
    return pages.view(span.requests, -1, kv_heads, head_dim)[:, : span.keys].transpose(1, 2)


def _attend_span(q_THD: torch.Tensor, k_NKSD: torch.Tensor, v_NKSD: torch.Tensor, span: Span) -> torch.Tensor:
    heads, head_dim = q_THD.shape[1:]
    kv_heads = k_NKSD.shape[1]
    q_NLHD = q_THD.view(span.requests, span.length, heads, head_dim)
    if not span.folded:
        out_NHLD = F.scaled_dot_product_attention(
            q_NLHD.transpose(1, 2), k_NKSD, v_NKSD, attn_mask=span.mask_N1RS, is_causal=span.causal, enable_gqa=True
        )
        return out_NHLD.transpose(1, 2).reshape(-1, heads, head_dim)
    rows = (span.requests, kv_heads, -1, head_dim)
    q_NKRD = q_NLHD.view(span.requests, span.length, kv_heads, -1, head_dim).transpose(1, 2).reshape(rows)
    out_NKRD = F.scaled_dot_product_attention(q_NKRD, k_NKSD, v_NKSD, attn_mask=span.mask_N1RS)
    out_NLKGD = out_NKRD.view(span.requests, kv_heads, span.length, -1, head_dim).transpose(1, 2)
    return out_NLKGD.reshape(-1, heads, head_dim)


class FullAttention:
    """Attention of B whole sequences of length S, without a cache."""

    def __init__(self, sequences: int, length: int, device: torch.device) -> None:
        self._sequences = sequences
        self._length = length
        self._device = device
        self._masks: dict[int, torch.Tensor] = {}

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (self._sequences, self._length)).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        mask = self._mask(window) if window is not None and window < self._length else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int) -> torch.Tensor:
        if window not in self._masks:
            ones_SS = torch.ones(self._length, self._length, dtype=torch.bool, device=self._device)
            self._masks[window] = ones_SS.tril().triu(1 - window)
        return self._masks[window]
