"""The compiled paged attention gives a token the same bits whatever is computed beside it.

Few rows read their keys in place, many rows turn them; blocks hold one KV head or several, and are divided among
threads: each path must follow the same order of operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from compress.kernels import kv
from compress.kernels.cpu.attention import CompiledAttention
from compress.kernels.cpu.isa import Isa, supported
from compress.kernels.kv import Pages
from compress.kernels.queries import AttentionOptions, PagedQueries
from tests.kernels.test_cpu_attention import OPTIONS, Case, expected, make

pytestmark = pytest.mark.skipif(not supported(), reason="no C compiler on this machine")
ISAS = supported()
CONTEXTS = [1, 15, 16, 17, 63, 64, 65, 150, 260]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attend(case: Case, options: AttentionOptions, isa: Isa = ISAS[-1]) -> torch.Tensor:
    return CompiledAttention(case.queries, isa)(case.q_THD, case.pages, options)


def last_tokens(case: Case) -> tuple[Case, list[int]]:
    """The decode step that computes the last token of each request, and where these lie in the batch."""
    lengths, queries = case.queries.lengths, case.queries
    last = [sum(lengths[: index + 1]) - 1 for index in range(len(lengths))]
    decode = PagedQueries([1] * len(lengths), queries.contexts, queries.tables, queries.page_size)
    return Case(decode, case.q_THD[last], case.pages), last


def check_decode(case: Case, options: AttentionOptions) -> None:
    """A prompt computed as one is the definition; decoding must repeat its last token in every way there is."""
    with threads(1):
        whole = attend(case, options)
    decode, last = last_tokens(case)
    for isa in ISAS:
        for count in (1, 2, 5):
            with threads(count):
                assert torch.equal(attend(decode, options, isa), whole[last]), (isa, count)
    with threads(3):
        assert torch.equal(attend(case, options), whole)
        for index, (context, table) in enumerate(zip(decode.queries.contexts, decode.queries.tables, strict=True)):
            alone = Case(
                PagedQueries([1], [context], [table], case.queries.page_size), decode.q_THD[index, None], case.pages
            )
            assert torch.equal(attend(alone, options)[0], whole[last[index]])


@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_gives_the_bits_of_prefill(name: str) -> None:
    check_decode(make(CONTEXTS, CONTEXTS), OPTIONS[name])


@pytest.mark.parametrize("group", range(1, 10))
def test_any_size_of_group(group: int) -> None:
    """Up to 8 rows read their keys in place, 9 turn them."""
    check_decode(make([70, 9, 130], [70, 9, 130], 3 * group, 3, 48), AttentionOptions())


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 128, 192, 256, 576])
def test_any_width_of_head(dim: int) -> None:
    case = make([67, 1, 33], [67, 1, 33], 4, 2, dim)
    check_decode(case, AttentionOptions())
    assert (attend(case, AttentionOptions()) - expected(case, case.pages, AttentionOptions())).abs().max() < 3e-6


@pytest.mark.parametrize("page_size", [1, 8, 24, 128])
def test_any_size_of_page(page_size: int) -> None:
    check_decode(make(CONTEXTS, CONTEXTS, page_size=page_size), AttentionOptions(window=100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_narrow_pages(dtype: torch.dtype) -> None:
    case = make(CONTEXTS, CONTEXTS, 9, 3, 64)
    check_decode(Case(case.queries, case.q_THD, narrowed(case.pages, dtype)), AttentionOptions())


def narrowed(pages: Pages, dtype: torch.dtype) -> Pages:
    keys, values = pages.keys_PSKD.nan_to_num(), pages.values_PSKD.nan_to_num()
    if dtype not in kv.LIMITS:
        return Pages(keys.to(dtype), values.to(dtype))
    scales = [kv.dynamic_scales(x.flatten(0, 1), dtype).view(x.shape[:3]) for x in (keys, values)]
    codes = [kv.quantize(x.flatten(0, 1), s.flatten(0, 1), dtype) for x, s in zip((keys, values), scales, strict=True)]
    return Pages(codes[0].view(keys.shape), codes[1].view(values.shape), *scales)


@pytest.mark.parametrize("lengths", [[1, 130, 1, 3, 1], [5, 5, 5, 5, 5], [1, 1, 1, 1, 1], [0, 200, 0, 16, 2]])
def test_mixed_batches(lengths: Sequence[int]) -> None:
    """Prompts, drafts and single tokens together, on any number of threads and each alone."""
    contexts = [300, 231, 64, 500, 2 if lengths[4] < 3 else 40]
    case = make(lengths, contexts, 8, 4, 32)
    with threads(1):
        together = attend(case, AttentionOptions())
    assert (together - expected(case, case.pages, AttentionOptions())).abs().max() < 2e-6
    token = 0
    for index, length in enumerate(lengths):
        queries = PagedQueries([length], [contexts[index]], [case.queries.tables[index]], 16)
        for count in (1, 2, 7):
            with threads(count):
                alone = attend(Case(queries, case.q_THD[token : token + length], case.pages), AttentionOptions())
                assert torch.equal(alone, together[token : token + length])
        token += length
    for count in (2, 3, 16):
        with threads(count):
            assert torch.equal(attend(case, AttentionOptions()), together)


def test_a_long_context_is_divided_among_threads() -> None:
    """More threads than KV heads: 47 tiles of two heads are cut in places that no head ends at."""
    case = make([1], [3000], 6, 2, 64)
    with threads(1):
        one = attend(case, OPTIONS["sinks"])
    for count in (2, 3, 8, 64):
        with threads(count):
            assert torch.equal(attend(case, OPTIONS["sinks"]), one)
    assert (one - expected(case, case.pages, OPTIONS["sinks"])).abs().max() < 2e-6


@pytest.mark.parametrize("length", [1, 40])
def test_every_code_of_e4m3(length: int) -> None:
    """Values of one visible key are the output: codes are exact, those of NaN stay NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    queries = PagedQueries([1], [1], [[0]], 1)
    for isa in ISAS:
        out = CompiledAttention(queries, isa)(
            torch.zeros(1, length, 256), Pages(torch.zeros_like(codes), codes), AttentionOptions()
        )
        assert torch.equal(out[0].nan_to_num(), codes.float().view(1, 256).expand(length, 256).nan_to_num())
        assert torch.equal(out[0].isnan(), codes.float().view(1, 256).expand(length, 256).isnan())


@pytest.mark.parametrize("isa", ISAS)
def test_a_key_of_nan_is_not_lost(isa: Isa) -> None:
    """Where it is the only visible key of its tile, and in a row that does not see it, which stays as it is."""
    case = make([66], [66], 2, 1, 16)
    before = attend(case, AttentionOptions(), isa)
    table = case.queries.tables[0]
    case.pages.keys_PSKD[table[4], 0] = torch.nan
    after = attend(case, AttentionOptions(), isa)
    assert torch.equal(after[:64], before[:64])
    assert after[64:].isnan().all()
    decode, _ = last_tokens(Case(PagedQueries([1], [65], [table], 16), case.q_THD[64, None], case.pages))
    assert attend(decode, AttentionOptions(), isa).isnan().all()
