"""The paged attention kernel against a dense softmax in float64, and against itself in other batches and pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compress.kernels.attention_plan import PackedWork
from compress.kernels.attention_triton import PagedAttentionTriton, choose_tile, plan_attention
from compress.kernels.attention_work import SHORT, Cut
from compress.kernels.kv import Pages, static_scales
from compress.kernels.launch import Target, run
from compress.kernels.queries import AttentionOptions, PagedQueries
from tests.kernels.paged_batches import PagedBatch, expected, make_batch

CPU = torch.device("cpu")
PLAIN = AttentionOptions()
MIXED = [(1, 37), (0, 5), (1, 1), (4, 40), (17, 17), (1, 700), (9, 70)]
NARROW = (torch.int8, torch.float8_e4m3fn)


def attend(batch: PagedBatch, options: AttentionOptions = PLAIN) -> torch.Tensor:
    return PagedAttentionTriton(batch.queries, CPU)(batch.q_THD, batch.pages, options)


def check(ours: torch.Tensor, batch: PagedBatch, options: AttentionOptions) -> None:
    """The weights sum to at most 1 and are rounded to the dtype of q for the product, as is the result: two roundings
    of at most half a last place of the largest value. float32 has its scores' error besides: they are below 64.
    """
    wanted = expected(batch, options)
    assert ours.shape == wanted.shape
    if not len(wanted):
        return
    values = batch.pages.values_PSKD.float()
    if batch.pages.value_scales_PSK is not None:
        values = values * batch.pages.value_scales_PSK[..., None]
    largest = values.nan_to_num(0).abs().max()
    bound = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[batch.q_THD.dtype] * largest
    error = (ours.double() - wanted).abs().max()
    assert error < bound, f"{error} of at most {bound}"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (4, 1, 128, torch.float16),
        (6, 2, 80, torch.float16),
        (2, 2, 32, torch.float32),
        (20, 1, 96, torch.float32),  # a group larger than the tile's least rows
        (4, 2, 64, torch.bfloat16),
    ],
)
def test_requests_of_every_kind_in_one_batch(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, 16, heads, kv_heads, head_dim, dtype)
    check(attend(batch), batch, PLAIN)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(window=1),
        AttentionOptions(window=20, scale=0.11),
        AttentionOptions(window=600, soft_cap=5.0),
        AttentionOptions(sinks_H=torch.tensor([-2.0, 0.5, 3.0, 40.0])),
        AttentionOptions(window=50, soft_cap=30.0, sinks_H=torch.tensor([-torch.inf, 0.5, 3.0, 1.0])),
    ],
    ids=["window 1", "window and scale", "window and cap", "sinks", "all"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_options(options: AttentionOptions, dtype: torch.dtype) -> None:
    batch = make_batch([(1, 37), (4, 40), (1, 1300), (10, 70)], 16, 4, 2, 32, dtype)
    check(attend(batch, options), batch, options)


def test_the_split_of_a_window_does_not_depend_on_the_first_visible_key() -> None:
    options = AttentionOptions(window=520)
    batch = make_batch([(4, 1536), (4, 1031), (2, 1033)], 16, 2, 1, 32, torch.float32)
    check(attend(batch, options), batch, options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_results_are_the_same_bits_for_every_page_size(dtype: torch.dtype) -> None:
    batches = [make_batch(MIXED, size, 4, 2, 64, dtype) for size in (1, 16, 32, 64)]
    first, *others = [attend(batch) for batch in batches]
    check(first, batches[0], PLAIN)
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize("key_format", [None, torch.int8])
def test_results_are_the_same_bits_alone_and_in_a_batch(key_format: torch.dtype | None) -> None:
    requests = [(1, 37), (1, 513), (3, 40), (1, 1700), (12, 20), (1, 512)]
    batch = make_batch(requests, 16, 4, 2, 64, torch.float16, key_format, key_format)
    options = AttentionOptions(sinks_H=torch.tensor([-2.0, 0.5, 3.0, 1.0]))
    together = attend(batch, options).split([length for length, _ in requests])
    for index, result in enumerate(together):
        assert torch.equal(attend(batch.alone(index), options), result)


@pytest.mark.parametrize("window", [None, 100])
def test_verification_gives_the_bits_of_decoding(window: int | None) -> None:
    """The fourth token has a split more than the others, whose part of it is empty."""
    batch = make_batch([(4, 514)], 16, 4, 2, 64, torch.float16)
    options = AttentionOptions(window)
    table = batch.queries.tables[0]
    one_by_one = PagedQueries([1] * 4, [511, 512, 513, 514], [table] * 4, 16)
    assert torch.equal(attend(batch, options), attend(PagedBatch(batch.q_THD, batch.pages, one_by_one), options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key_format", "value_format"),
    [(torch.int8, torch.int8), (torch.float8_e4m3fn, torch.float8_e4m3fn), (None, torch.float8_e4m3fn)],
)
def test_quantized_pages(key_format: torch.dtype | None, value_format: torch.dtype | None, dtype: torch.dtype) -> None:
    batch = make_batch([(1, 37), (4, 40), (1, 530), (9, 33)], 16, 4, 2, 64, dtype, key_format, value_format)
    check(attend(batch), batch, PLAIN)


@pytest.mark.parametrize("codes", NARROW)
def test_tiny_values_keep_their_precision_in_float16(codes: torch.dtype) -> None:
    """Their scales are subnormal in float16."""
    batch = make_batch([(1, 37), (9, 33)], 16, 4, 2, 64, torch.float16, codes, codes)
    scales = batch.pages.value_scales_PSK
    assert scales is not None
    pages = dataclasses.replace(batch.pages, value_scales_PSK=scales * 2**-16)
    batch = dataclasses.replace(batch, pages=pages)
    check(attend(batch).float(), batch, PLAIN)


def test_static_scales_of_a_head() -> None:
    batch = make_batch([(1, 37), (9, 33)], 16, 4, 2, 64, torch.float16, torch.int8, torch.int8)
    shape = batch.pages.keys_PSKD.shape
    scales = [static_scales(torch.tensor(pair), shape[0], shape[1]) for pair in ([0.02, 0.01], [0.5, 0.003])]
    batch = dataclasses.replace(batch, pages=Pages(batch.pages.keys_PSKD, batch.pages.values_PSKD, *scales))
    check(attend(batch), batch, PLAIN)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_e4m3_without_compiler_support(dtype: torch.dtype) -> None:
    """Every code but NaN occurs, and bytes give the bits of the native format."""
    formats = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    batch = make_batch([(1, 37), (4, 40), (9, 33)], 16, 4, 2, 64, dtype, *formats)
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    page = batch.queries.tables[1][0]
    batch.pages.values_PSKD[page].view(-1)[: len(codes)] = codes
    out = _attend_on(batch, Target("cuda", 80))
    check(out, batch, PLAIN)
    assert torch.equal(out, attend(batch))


def _attend_on(batch: PagedBatch, target: Target, spare_rows: int = 0) -> torch.Tensor:
    """As if on another target, into rows of NaN of which some are spare."""
    tokens, heads, head_dim = batch.q_THD.shape
    out = torch.full((tokens + spare_rows, heads, head_dim), torch.nan, dtype=batch.q_THD.dtype)
    for short in (True, False):
        tile = choose_tile(batch.q_THD, batch.pages, target, short)
        cut = Cut(None, tile.rows * batch.pages.keys_PSKD.shape[2] // heads, tile.keys, short)
        packed = PackedWork(batch.queries, [cut], CPU)
        arguments = (packed.works[cut], packed.table, tile, out, packed.partials(heads, head_dim), target)
        run(plan_attention(batch.q_THD, batch.pages, PLAIN, *arguments))
    return out


def test_rows_of_no_request_are_left_as_they_are() -> None:
    batch = make_batch([(1, 37), (3, 600), (9, 33)], 16, 6, 2, 32, torch.float32)
    out = _attend_on(batch, Target("cuda", 90), spare_rows=5)
    check(out[:13], batch, PLAIN)
    assert out[13:].isnan().all()


def test_dropped_pages_are_not_read() -> None:
    """Entries of pages before the window are 0: page 0, another request's, holds NaN here."""
    options = AttentionOptions(window=20)
    batch = make_batch(MIXED, 16, 4, 2, 32, torch.float32)
    kept = [
        [page if (16 * i + 15) > context - length - 20 else 0 for i, page in enumerate(table)]
        for length, context, table in zip(
            batch.queries.lengths, batch.queries.contexts, batch.queries.tables, strict=True
        )
    ]
    assert any(0 in table for table in kept)
    dropped = PagedBatch(batch.q_THD, batch.pages, dataclasses.replace(batch.queries, tables=kept))
    assert torch.equal(attend(dropped, options), attend(batch, options))


def test_strided_queries_and_pages() -> None:
    """Queries are a slice of a wider product, keys and values two halves of one tensor."""
    batch = make_batch([(1, 37), (9, 33)], 16, 4, 2, 32, torch.float32)
    wide = torch.full((10, 8, 32), torch.nan)
    wide[:, :4] = batch.q_THD
    both = torch.stack((batch.pages.keys_PSKD, batch.pages.values_PSKD), dim=3)
    strided = PagedBatch(wide[:, :4], Pages(both[:, :, :, 0], both[:, :, :, 1]), batch.queries)
    assert torch.equal(attend(strided), attend(batch))


def test_offsets_beyond_32_bits() -> None:
    """Pages 2³⁰ elements apart in memory that the system provides where it is touched."""
    batch = make_batch([(1, 37), (9, 40)], 16, 2, 1, 32, torch.float16)
    pages, size, kv_heads, head_dim = batch.pages.keys_PSKD.shape
    stride = 1 << 30
    blank = torch.from_numpy(np.zeros(pages * stride, dtype=np.float16))
    far = blank.as_strided((pages, size, kv_heads, head_dim), (stride, head_dim, head_dim, 1))
    far.copy_(batch.pages.keys_PSKD)
    moved = PagedBatch(batch.q_THD, Pages(far, batch.pages.values_PSKD), batch.queries)
    assert torch.equal(attend(moved), attend(batch))


@st.composite
def _requests(draw: st.DrawFn) -> list[tuple[int, int]]:
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, SHORT, SHORT + 1, 33]), min_size=1, max_size=5))
    return [(n, max(1, n + draw(st.sampled_from([0, 1, 15, 16, 31, 64, 479, 511, 512])))) for n in lengths]


@settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_requests(), st.sampled_from([1, 4, 16, 64]), st.sampled_from([None, 1, 16, 500]), st.booleans())
def test_ragged_batches(requests: list[tuple[int, int]], page_size: int, window: int | None, sinks: bool) -> None:
    options = AttentionOptions(window, sinks_H=torch.tensor([0.5, -1.0, 2.0]) if sinks else None)
    batch = make_batch(requests, page_size, 3, 1, 32, torch.float32)
    check(attend(batch, options), batch, options)
