"""Every visible key of every token is in exactly one item, wherever the cuts fall."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.attention import PagedQueries
from compress.kernels.attention_work import REDUCED, SHORT, flatten_tables, plan_work

META, CPU = torch.device("meta"), torch.device("cpu")


def make_queries(requests: list[tuple[int, int]], page_size: int) -> PagedQueries:
    tables = [list(range(7, 7 + -(-context // page_size))) for _, context in requests]
    return PagedQueries([r[0] for r in requests], [r[1] for r in requests], tables, page_size)


REQUESTS = st.lists(
    st.tuples(st.sampled_from([0, 1, 3, SHORT, SHORT + 1, 128, 129, 300]), st.integers(0, 3000)), min_size=1, max_size=6
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(REQUESTS, st.sampled_from([None, 1, 600]), st.sampled_from([1, 4, 16]), st.sampled_from([None, True, False]))
def test_every_key_once(
    drawn: list[tuple[int, int]], window: int | None, block_tokens: int, short: bool | None
) -> None:
    requests = [(length, length + past + (length == 0)) for length, past in drawn]
    queries = make_queries(requests, 16)
    work = plan_work(queries, flatten_tables(queries, CPU), window, block_tokens, 32, short)
    chosen = [length for length, _ in requests if length and short in (None, length <= SHORT)]
    seen: dict[int, list[tuple[int, int]]] = {}
    rows: set[int] = set()
    for token, tokens, position, start, end, _, partial, again in work.items_X8.tolist():
        assert token == again
        assert 1 <= tokens <= block_tokens
        assert start % 32 == 0
        assert start < end <= position + tokens
        for offset in range(tokens):
            seen.setdefault(token + offset, []).append((start, end))
            if partial >= 0:
                rows.add(partial + offset)
    assert len(seen) == sum(chosen)
    assert rows == set(range(work.partial_rows))  # none is written twice, as the next test counts
    starts = np.cumsum([0] + [length for length, _ in requests])
    for (length, context), first in zip(requests, starts, strict=False):
        for token in range(first, first + length):
            if token not in seen:
                continue
            position = context - length + token - first
            parts = sorted(seen[token])
            assert all(a[1] == b[0] for a, b in pairwise(parts))
            assert parts[0][0] <= (max(0, position - window + 1) if window else 0)
            assert parts[-1][1] > position


@settings(max_examples=30, derandomize=True, deadline=None)
@given(REQUESTS, st.sampled_from([None, 600]))
def test_reductions_read_what_the_items_write(drawn: list[tuple[int, int]], window: int | None) -> None:
    requests = [(length, length + past + (length == 0)) for length, past in drawn]
    queries = make_queries(requests, 16)
    work = plan_work(queries, flatten_tables(queries, CPU), window, 4, 32)
    written: dict[int, list[tuple[int, int]]] = {}
    for token, tokens, _, start, _, _, partial, _ in work.items_X8.tolist():
        for offset in range(tokens if partial >= 0 else 0):
            written.setdefault(token + offset, []).append((start, partial + offset))
    assert sum(len(parts) for parts in written.values()) == work.partial_rows
    reduced = {}
    for token, base, step, first, end in work.reductions_Y5.tolist():
        assert first < REDUCED
        reduced[token] = [base + split * step for split in range(first, end)]
    assert reduced == {token: [row for _, row in sorted(parts)] for token, parts in written.items()}


def test_cuts_of_a_request_do_not_depend_on_its_neighbours() -> None:
    alone = make_queries([(3, 1700)], 16)
    among = make_queries([(1, 9000), (3, 1700), (200, 200)], 16)
    rows = plan_work(alone, flatten_tables(alone, CPU), None, 4, 32, True).items_X8[:, 1:5].tolist()
    others = plan_work(among, flatten_tables(among, CPU), None, 4, 32, True).items_X8
    assert sorted(others[others[:, 0] == 1][:, 1:5].tolist()) == sorted(rows)
    assert len(rows) == 4


def test_tables_are_padded_for_the_page_ids_that_are_loaded_ahead() -> None:
    for page_size in (1, 16, 64, 256):
        queries = make_queries([(1, 33), (1, 64)], page_size)
        tables = flatten_tables(queries, CPU)
        for index, context in enumerate(queries.contexts):
            start = int(tables.starts_N[index])
            last_key = -(-context // 64) * 64 + 63  # of the tile behind the last
            end = int([*tables.starts_N, len(tables.pages)][index + 1])
            assert start + last_key // page_size < end
            own = tables.pages[start:end].tolist()
            assert own[: len(queries.tables[index])] == queries.tables[index]
            assert not any(own[len(queries.tables[index]) :])


def test_plans_without_a_device() -> None:
    queries = make_queries([(1, 2000), (0, 4)], 16)
    tables = flatten_tables(queries, META)
    work = plan_work(queries, tables, None, 4, 32, True)
    assert (work.items_X8.device, work.items_X8.shape, work.partial_rows) == (META, (4, 8), 4)
    assert plan_work(queries, tables, None, 4, 32, False).items_X8.shape == (0, 8)


def test_pages_of_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 24 slots"):
        flatten_tables(make_queries([(1, 30)], 24), CPU)
