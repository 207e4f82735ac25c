"""Paged attention against a loop over queries that is plainly right."""

from __future__ import annotations

import pytest
import torch

from compress.kernels.attention import FullAttention, PagedAttention, plan_spans
from compress.kernels.kv import KVCache, copy_pages, store
from compress.kernels.queries import AttentionOptions, PagedQueries
from tests.kernels.paged_batches import expected, make_batch

CPU = torch.device("cpu")
BOUND = 2e-6  # values are about 1; float32 sums of at most 90 terms


def one_by_one(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, first: int, window: int | None
) -> torch.Tensor:
    """Each query head on its own, in float64; query t stands at position first + t."""
    group = q_THD.shape[1] // k_SKD.shape[1]
    out = torch.empty_like(q_THD, dtype=torch.float64)
    for t in range(q_THD.shape[0]):
        stop = first + t + 1
        start = max(0, stop - window) if window else 0
        for h in range(q_THD.shape[1]):
            k, v = k_SKD[start:stop, h // group].double(), v_SKD[start:stop, h // group].double()
            weight = torch.softmax(k @ q_THD[t, h].double() / q_THD.shape[2] ** 0.5, dim=0)
            out[t, h] = weight @ v
    return out.float()


BATCHES = {
    "decode one": [(1, 37)],
    "decode ragged": [(1, 5), (1, 33), (1, 64), (1, 90)],
    "decode equal": [(1, 32), (1, 32)],
    "decode far apart": [(1, 1), (1, 2), (1, 90)],
    "fresh prompts": [(20, 20), (20, 20)],
    "short fresh prompt": [(3, 3)],
    "chunk after a prefix": [(24, 60)],
    "verify drafts": [(4, 40), (4, 51)],
    "mixed": [(1, 9), (1, 70), (3, 3), (3, 50), (17, 17), (18, 80)],
}


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", list(BATCHES))
def test_paged_attention(name: str, page_size: int, window: int | None) -> None:
    heads, kv_heads, head_dim = 6, 2, 8
    batch = BATCHES[name]
    generator = torch.Generator().manual_seed(0)
    pages = sum(-(-context // page_size) for _, context in batch) + 3
    # what nobody wrote is large: reading it by mistake cannot go unseen
    cache = KVCache(*((torch.full((pages, page_size, kv_heads, head_dim), 50.0),) for _ in range(2)))
    free = torch.randperm(pages, generator=generator).tolist()
    if len(batch) == 1:
        free.sort(reverse=True)  # consecutive pages take the path without a copy
    tables, queries, wanted = [], [], []
    for length, context in batch:
        table = [free.pop() for _ in range(-(-context // page_size))]
        k, v = torch.randn(2, context, kv_heads, head_dim, generator=generator)
        slots = torch.tensor([table[p // page_size] * page_size + p % page_size for p in range(context)])
        store(k, v, cache, 0, slots)
        q = torch.randn(length, heads, head_dim, generator=generator)
        tables.append(table)
        queries.append(q)
        wanted.append(one_by_one(q, k, v, context - length, window))
    paged = PagedAttention(PagedQueries([b[0] for b in batch], [b[1] for b in batch], tables, page_size))
    ours = paged(torch.cat(queries), cache.layer(0), AttentionOptions(window))
    assert (ours - torch.cat(wanted)).abs().max() < BOUND


OPTIONS = {
    "scale": AttentionOptions(scale=0.11),
    "cap": AttentionOptions(soft_cap=5.0),
    "window and cap": AttentionOptions(window=7, soft_cap=5.0),
    "sinks": AttentionOptions(sinks_H=torch.tensor([-2.0, 0.5, 3.0, 40.0, -torch.inf, 1.0])),
    "all": AttentionOptions(20, 0.2, 30.0, torch.tensor([-2.0, 0.5, 3.0, 10.0, 0.0, 1.0])),
}


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("name", [*BATCHES, "empty"])
def test_options(name: str, options: AttentionOptions) -> None:
    batch = make_batch({**BATCHES, "empty": [(0, 5), (2, 9)]}[name], 4, 6, 2, 8, unwritten=50.0)
    ours = PagedAttention(batch.queries)(batch.q_THD, batch.pages, options)
    # values are up to 30, scores up to 60 in float32
    assert (ours - expected(batch, options)).abs().max() < 1e-4


@pytest.mark.parametrize("options", [AttentionOptions(), OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize(("key", "value"), [(torch.int8, None), (None, torch.float8_e4m3fn), (torch.int8, torch.int8)])
def test_quantized_pages(key: torch.dtype | None, value: torch.dtype | None, options: AttentionOptions) -> None:
    batch = make_batch(BATCHES["mixed"], 4, 6, 2, 8, torch.float32, key, value, unwritten=50.0)
    ours = PagedAttention(batch.queries)(batch.q_THD, batch.pages, options)
    assert (ours - expected(batch, options)).abs().max() < 1e-4


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_options_of_whole_sequences(options: AttentionOptions) -> None:
    batch = make_batch([(40, 40), (40, 40)], 40, 6, 2, 8, unwritten=50.0)
    rows = [table[0] for table in batch.queries.tables]
    k, v = (x[rows].flatten(0, 1) for x in (batch.pages.keys_PSKD, batch.pages.values_PSKD))
    ours = FullAttention(2, 40, CPU)(batch.q_THD, k, v, options)
    assert (ours - expected(batch, options)).abs().max() < 1e-4


def test_a_window_reads_only_the_pages_it_can_see() -> None:
    queries = PagedQueries([1], [90], [[5, 3, 1, 0, 2, 4]], page_size=16)
    (span,) = plan_spans(queries, 20, 3, torch.float32, CPU)
    # position 89 sees 70 to 89: the pages of 64 to 79 and 80 to 95, third and second from last
    assert isinstance(span.pages, torch.Tensor)
    assert span.pages.tolist() == [2, 4]
    assert span.keys == 26


def test_requests_of_very_different_length_are_not_padded_to_each_other() -> None:
    tables = [[0], [0], list(range(64))]
    queries = PagedQueries([1, 1, 1], [5, 7, 1000], tables, page_size=16)
    spans = plan_spans(queries, None, 3, torch.float32, CPU)
    assert [(span.requests, span.keys) for span in spans] == [(2, 7), (1, 1000)]


@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_full_attention(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2 * 40, 6, 8, generator=generator)
    k, v = torch.randn(2, 2 * 40, 2, 8, generator=generator)
    ours = FullAttention(2, 40, CPU)(q, k, v, AttentionOptions(window))
    halves = (slice(0, 40), slice(40, 80))
    wanted = torch.cat([one_by_one(q[half], k[half], v[half], 0, window) for half in halves])
    assert (ours - wanted).abs().max() < BOUND


def test_pages_are_copied_whole_in_every_layer() -> None:
    cache = KVCache(*(tuple(torch.randn(5, 4, 2, 8) for _ in range(3)) for _ in range(2)))
    before = [tensor.clone() for tensor in cache.keys + cache.values]
    copy_pages(cache, [(0, 3), (2, 4)])
    for old, new in zip(before, cache.keys + cache.values, strict=True):
        assert torch.equal(new, old[[0, 1, 2, 0, 2]])
