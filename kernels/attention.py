"""Causal attention with grouped KV heads: over a paged cache, and over whole sequences.

A query at position p sees the keys at positions ≤ p, and > p − window where there is one. Scores are q·k · scale; a
soft cap c makes them c · tanh(score / c) (Gemma 2, arXiv 2408.00118). A sink is one more logit of each head in the
softmax's denominator, without a value (gpt-oss, arXiv 2508.10925).

Shapes: T tokens of a flat batch, H query heads, K KV heads, G = H/K, D head dim, P pages, N requests, L new tokens of a
request, S keys (slots of a page in PSKD and PSK), R rows of one product, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compress.kernels.kv import Pages, dequantize
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries, count_pages

FOLDED_ROWS = 16  # up to so many new tokens the query heads of a KV head become rows of one product


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
    unseen_NS: torch.Tensor | None  # keys that none of the queries sees; None where all are seen


class PagedAttention:
    """Attention of one step, planned on the host once and run in every layer. The reference of the paged kernel."""

    def __init__(self, queries: PagedQueries, capacity: Capacity | None = None) -> None:
        self._queries = queries
        self._capacity = capacity
        self._plans: dict[int | None, list[Span]] = {}

    def update(self, queries: PagedQueries) -> bool:
        """As `operations.Attention`."""
        if self._capacity is not None and not self._capacity.fits(queries):
            return False
        self._queries = queries
        self._plans.clear()
        return True

    def __call__(self, q_THD: torch.Tensor, pages: Pages, options: AttentionOptions) -> torch.Tensor:
        """[T, H, D] in the dtype of q. Quantized pages are dequantized to that dtype."""
        window = options.window
        if window not in self._plans:
            group = q_THD.shape[1] // pages.keys_PSKD.shape[2]
            self._plans[window] = plan_spans(self._queries, window, group, q_THD.dtype, q_THD.device)
        parts = [_attend_span(q_THD[span.tokens], pages, span, options) for span in self._plans[window]]
        return join_rows(parts, q_THD)


def join_rows(parts: list[torch.Tensor], q_THD: torch.Tensor) -> torch.Tensor:
    """The results of the requests one after the other, and zeros for the rows behind them."""
    unused = len(q_THD) - sum(map(len, parts))
    if unused:
        parts = [*parts, torch.zeros_like(q_THD[:unused])]
    return parts[0] if len(parts) == 1 else torch.cat([q_THD[:0], *parts])


def plan_spans(
    queries: PagedQueries, window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> list[Span]:
    """Split the batch into spans, and find the pages and the mask of each.

    A span ends where the number of new tokens changes, or where padding its shortest request to its longest would
    read more than twice what the shortest needs. Requests without new tokens are in none.
    """
    spans, first, token = [], 0, 0
    for last in range(1, len(queries.lengths) + 1):
        if last < len(queries.lengths) and _alike(queries, first, last):
            continue
        if queries.lengths[first]:
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
    used = [count_pages(context, size) for context in contexts]
    tables = [table[skip:stop] for table, skip, stop in zip(queries.tables[first:last], skipped, used, strict=True)]
    first_keys = [skip * size for skip in skipped]
    keys = max(context - first_key for context, first_key in zip(contexts, first_keys, strict=True))
    causal = length > 1 and all(context == length for context in contexts) and (window is None or window >= length)
    folded = length <= FOLDED_ROWS and not causal
    mask = unseen_NS = None
    if not causal and not _sees_all(contexts, first_keys, length, keys, window):
        visible_NLS = _visible(contexts, first_keys, length, keys, window, device)
        unseen_NS = ~visible_NLS.any(dim=1)
        unseen_NS = unseen_NS if bool(unseen_NS.any()) else None
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
        unseen_NS=unseen_NS,
    )


def _page_index(tables: Sequence[Sequence[int]], device: torch.device) -> slice | torch.Tensor:
    pages = tables[0]
    if len(tables) == 1 and pages[-1] - pages[0] == len(pages) - 1 and list(pages) == sorted(pages):
        return slice(pages[0], pages[-1] + 1)
    width = max(len(table) for table in tables)
    # page 0 pads: it exists, and none of its keys is seen
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


def gather(cache_PSX: torch.Tensor, span: Span) -> torch.Tensor:
    """[N, S, ...]: a view where the pages are consecutive and all seen, else a copy.

    Zeros where no query sees the key: another request's numbers may lie there, and a weight of 0 does not hide a NaN.
    """
    pages = cache_PSX[span.pages] if isinstance(span.pages, slice) else cache_PSX.index_select(0, span.pages)
    x_NSX = pages.reshape(span.requests, -1, *cache_PSX.shape[2:])[:, : span.keys]
    if span.unseen_NS is None:
        return x_NSX
    unseen = span.unseen_NS.view(*span.unseen_NS.shape, *[1] * (x_NSX.dim() - 2))
    return torch.where(unseen, torch.zeros((), dtype=x_NSX.dtype, device=x_NSX.device), x_NSX)


def _gather_heads(
    cache_PSKD: torch.Tensor, scales_PSK: torch.Tensor | None, span: Span, dtype: torch.dtype
) -> torch.Tensor:
    """[N, K, S, D]"""
    x_NSKD = gather(cache_PSKD, span)
    wide_NSKD = x_NSKD.to(dtype) if scales_PSK is None else dequantize(x_NSKD, gather(scales_PSK, span), dtype)
    return wide_NSKD.transpose(1, 2)


def _attend_span(q_THD: torch.Tensor, pages: Pages, span: Span, options: AttentionOptions) -> torch.Tensor:
    heads, head_dim = q_THD.shape[1:]
    k_NKSD = _gather_heads(pages.keys_PSKD, pages.key_scales_PSK, span, q_THD.dtype)
    v_NKSD = _gather_heads(pages.values_PSKD, pages.value_scales_PSK, span, q_THD.dtype)
    kv_heads = k_NKSD.shape[1]
    q_NLHD = q_THD.view(span.requests, span.length, heads, head_dim)
    if not span.folded:
        sinks_H1 = None if options.sinks_H is None else options.sinks_H[:, None]
        out_NHLD = _softmax_attention(
            q_NLHD.transpose(1, 2), k_NKSD, v_NKSD, span.mask_N1RS, span.causal, options, sinks_H1
        )
        return out_NHLD.transpose(1, 2).reshape(-1, heads, head_dim)
    rows = (span.requests, kv_heads, -1, head_dim)
    q_NKRD = q_NLHD.view(span.requests, span.length, kv_heads, -1, head_dim).transpose(1, 2).reshape(rows)
    sinks_KR = None if options.sinks_H is None else options.sinks_H.view(kv_heads, -1).repeat(1, span.length)
    out_NKRD = _softmax_attention(q_NKRD, k_NKSD, v_NKSD, span.mask_N1RS, False, options, sinks_KR)
    out_NLKGD = out_NKRD.view(span.requests, kv_heads, span.length, -1, head_dim).transpose(1, 2)
    return out_NLKGD.reshape(-1, heads, head_dim)


def _softmax_attention(
    q_NHRD: torch.Tensor,
    k_NKSD: torch.Tensor,
    v_NKSD: torch.Tensor,
    mask_N1RS: torch.Tensor | None,
    causal: bool,
    options: AttentionOptions,
    sinks_HR: torch.Tensor | None,
) -> torch.Tensor:
    """[N, H, R, D]; the sinks are [H, R] or [H, 1]."""
    if options.is_plain_softmax:
        return F.scaled_dot_product_attention(
            q_NHRD,
            k_NKSD,
            v_NKSD,
            attn_mask=mask_N1RS,
            is_causal=causal,
            scale=options.scale,
            enable_gqa=q_NHRD.shape[1] != k_NKSD.shape[1],
        )
    group = q_NHRD.shape[1] // k_NKSD.shape[1]
    k_NHSD, v_NHSD = (x.repeat_interleave(group, dim=1) for x in (k_NKSD, v_NKSD))
    scale = q_NHRD.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores_NHRS = (q_NHRD @ k_NHSD.mT).float() * scale
    if options.soft_cap is not None:
        scores_NHRS = options.soft_cap * torch.tanh(scores_NHRS / options.soft_cap)
    if causal:
        rows, keys = scores_NHRS.shape[-2:]
        hidden_RS = torch.ones(rows, keys, dtype=torch.bool, device=scores_NHRS.device).triu(keys - rows + 1)
        scores_NHRS = scores_NHRS.masked_fill(hidden_RS, -torch.inf)
    elif mask_N1RS is not None:
        scores_NHRS = scores_NHRS + mask_N1RS
    if sinks_HR is None:
        weights_NHRS = scores_NHRS.softmax(dim=-1)
    else:
        sinks_NHR1 = sinks_HR.float()[..., None].expand(*scores_NHRS.shape[:-1], 1)
        weights_NHRS = torch.cat((scores_NHRS, sinks_NHR1), dim=-1).softmax(dim=-1)[..., :-1]
    return weights_NHRS.to(v_NHSD.dtype) @ v_NHSD


class FullAttention:
    """Attention of B whole sequences of length S, without a cache."""

    def __init__(self, sequences: int, length: int, device: torch.device) -> None:
        self._sequences = sequences
        self._length = length
        self._device = device
        self._masks: dict[int, torch.Tensor] = {}

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (self._sequences, self._length)).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        mask = self._mask(options.window, q.dtype) if options.window and options.window < self._length else None
        sinks_H1 = None if options.sinks_H is None else options.sinks_H[:, None]
        out = _softmax_attention(q, k, v, mask, mask is None, options, sinks_H1)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """[1, 1, S, S]"""
        if window not in self._masks:
            shape = (1, 1, self._length, self._length)
            visible = torch.ones(shape, dtype=torch.bool, device=self._device).tril().triu(1 - window)
            self._masks[window] = torch.zeros(shape, dtype=dtype, device=self._device).masked_fill(~visible, -torch.inf)
        return self._masks[window]
