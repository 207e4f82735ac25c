"""The compiled paged attention against a float64 softmax, and its independence of company, chunks and threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels import kv
from compress.kernels.cpu.attention import CompiledAttention
from compress.kernels.cpu.isa import ISAS as KNOWN
from compress.kernels.cpu.isa import supported
from compress.kernels.kv import Pages
from compress.kernels.queries import AttentionOptions, PagedQueries

pytestmark = pytest.mark.skipif(not supported(), reason="no C compiler on this machine")
ISAS = supported()


@dataclass(frozen=True)
class Case:
    """Requests with random pages; what lies in unused slots is NaN."""

    queries: PagedQueries
    q_THD: torch.Tensor
    pages: Pages


def make(
    lengths: Sequence[int],
    contexts: Sequence[int],
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 32,
    page_size: int = 16,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // page_size) for context in contexts]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    shape = (sum(needed) + 3, page_size, kv_heads, dim)
    keys, values = (torch.full(shape, torch.nan) for _ in range(2))
    for table, context in zip(tables, contexts, strict=True):
        for position in range(context):
            at = table[position // page_size], position % page_size
            keys[at] = torch.randn(kv_heads, dim, generator=generator)
            values[at] = torch.randn(kv_heads, dim, generator=generator)
    q_THD = torch.randn(sum(lengths), heads, dim, generator=generator)
    return Case(PagedQueries(list(lengths), list(contexts), tables, page_size), q_THD, Pages(keys, values))


def expected(case: Case, pages: Pages, options: AttentionOptions) -> torch.Tensor:
    """One query at a time, in float64."""
    keys, values = pages.keys_PSKD.double(), pages.values_PSKD.double()
    if pages.key_scales_PSK is not None and pages.value_scales_PSK is not None:
        keys, values = keys * pages.key_scales_PSK[..., None], values * pages.value_scales_PSK[..., None]
    heads, dim = case.q_THD.shape[1:]
    group, size, out, token = heads // keys.shape[2], case.queries.page_size, [], 0
    for length, context, table in zip(case.queries.lengths, case.queries.contexts, case.queries.tables, strict=True):
        for position in range(context - length, context):
            first = max(0, position - options.window + 1) if options.window else 0
            slots = [(table[p // size], p % size) for p in range(first, position + 1)]
            k_SKD, v_SKD = (torch.stack([x[at] for at in slots]) for x in (keys, values))
            for head in range(heads):
                q_D = case.q_THD[token, head].double()
                score_S = (k_SKD[:, head // group] @ q_D) * (options.scale or 1 / math.sqrt(dim))
                if options.soft_cap:
                    score_S = options.soft_cap * torch.tanh(score_S / options.soft_cap)
                if options.sinks_H is not None:
                    score_S = torch.cat((score_S, options.sinks_H[head].double()[None]))
                weight_S = score_S.softmax(0)[: len(slots)]
                out.append(weight_S @ v_SKD[:, head // group])
            token += 1
    return torch.stack(out).view(-1, heads, dim).float()


OPTIONS = {
    "plain": AttentionOptions(),
    "window": AttentionOptions(window=70),
    "narrow window": AttentionOptions(window=1),
    "cap": AttentionOptions(soft_cap=2.0, scale=0.9),
    "sinks": AttentionOptions(sinks_H=torch.linspace(-2, 3, 6)),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", OPTIONS)
def test_against_float64(isa: str, name: str) -> None:
    """Outputs are of the size of 1: 2e-6 allows for float32 sums over 200 keys and an exponential to 2 ulp."""
    case = make([1, 5, 0, 1, 130], [200, 5, 64, 1, 130])
    ours = CompiledAttention(case.queries, isa)(case.q_THD, case.pages, OPTIONS[name])  # pyright: ignore[reportArgumentType]
    assert (ours - expected(case, case.pages, OPTIONS[name])).abs().max() < 2e-6


@pytest.mark.parametrize("heads", [(4, 4, 16), (9, 3, 64), (32, 1, 48), (3, 1, 256)])
def test_shapes_of_heads(heads: tuple[int, int, int]) -> None:
    """MHA, GQA, one KV head for more query heads than a block holds, and the widest head."""
    case = make([3, 1], [20, 66], *heads)
    ours = CompiledAttention(case.queries, ISAS[-1])(case.q_THD, case.pages, AttentionOptions())
    assert (ours - expected(case, case.pages, AttentionOptions())).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_narrow_pages(dtype: torch.dtype) -> None:
    """Pages of any format are widened exactly: the bound is that of float32."""
    case = make([2, 1], [40, 90])
    keys, values = (x.nan_to_num() for x in (case.pages.keys_PSKD, case.pages.values_PSKD))
    if dtype in kv.LIMITS:
        scales = [kv.dynamic_scales(x.flatten(0, 1), dtype).view(x.shape[:3]) for x in (keys, values)]
        codes = [
            kv.quantize(x.flatten(0, 1), s.flatten(0, 1), dtype).view(x.shape)
            for x, s in zip((keys, values), scales, strict=True)
        ]
        pages = Pages(*codes, *scales)
    else:
        pages = Pages(keys.to(dtype), values.to(dtype))
    for isa in ISAS:
        ours = CompiledAttention(case.queries, isa)(case.q_THD, pages, AttentionOptions())
        assert (ours - expected(case, pages, AttentionOptions())).abs().max() < 2e-6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    contexts=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    chunk=st.integers(1, 40),
    page_size=st.sampled_from([1, 16, 32]),
    window=st.sampled_from([None, 5, 64, 100]),
    threads=st.sampled_from([1, 2]),
)
def test_bits_depend_on_nothing_but_the_tokens_own_keys(
    contexts: list[int], chunk: int, page_size: int, window: int | None, threads: int
) -> None:
    """Alone or in a batch, whole or in chunks, with any pages, threads, instruction set: equal bits."""
    case, options = make(contexts, contexts, page_size=page_size, seed=sum(contexts)), AttentionOptions(window=window)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = CompiledAttention(case.queries, ISAS[-1])(case.q_THD, case.pages, options)
        start = 0
        for length, table in zip(contexts, case.queries.tables, strict=True):
            for first in range(0, length, chunk):
                stop = min(first + chunk, length)
                queries = PagedQueries([stop - first], [stop], [table], page_size)
                part = CompiledAttention(queries, "portable")(
                    case.q_THD[start + first : start + stop], case.pages, options
                )
                assert torch.equal(part, whole[start + first : start + stop])
            start += length
    finally:
        torch.set_num_threads(before)


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """The last of pages that are 2 GiB apart: memory that nobody wrote costs nothing."""
    stride = 1 << 29
    blank = np.zeros(5 * stride, dtype=np.float32)
    pages_PSKD = torch.from_numpy(blank).as_strided((5, 16, 1, 16), (stride, 16, 16, 1))
    pages_PSKD[4] = torch.randn(16, 1, 16)
    near = Pages(pages_PSKD[4:].clone(), pages_PSKD[4:].clone())
    q_THD = torch.randn(1, 2, 16)
    far, close = (
        CompiledAttention(PagedQueries([1], [9], [[page]], 16), ISAS[-1])(q_THD, pages, AttentionOptions())
        for page, pages in ((4, Pages(pages_PSKD, pages_PSKD)), (0, near))
    )
    assert torch.equal(far, close)


def test_what_the_kernel_does_not_take_goes_to_the_reference() -> None:
    case = make([2], [30], dim=24)
    pages = Pages(case.pages.keys_PSKD.nan_to_num(), case.pages.values_PSKD.nan_to_num())
    for q_THD, bound in ((case.q_THD, 2e-6), (case.q_THD.bfloat16(), 2e-2)):
        narrow = Pages(pages.keys_PSKD.to(q_THD.dtype), pages.values_PSKD.to(q_THD.dtype))
        ours = CompiledAttention(case.queries, ISAS[-1])(q_THD, narrow, AttentionOptions())
        assert ours.dtype == q_THD.dtype
        assert (ours.float() - expected(case, pages, AttentionOptions())).abs().max() < bound


def test_values_of_another_width_than_keys_are_refused() -> None:
    """As by the reference: the kernel would read past the end of the narrower."""
    case = make([2], [30])
    keys, values = case.pages.keys_PSKD.nan_to_num(), case.pages.values_PSKD.nan_to_num()
    with pytest.raises(RuntimeError):
        CompiledAttention(case.queries, ISAS[-1])(
            case.q_THD, Pages(keys, values[..., :16].contiguous()), AttentionOptions()
        )


def test_instruction_sets_are_known_in_order() -> None:
    assert [isa for isa in KNOWN if isa in ISAS] == ISAS
    assert ISAS[0] == "portable"
