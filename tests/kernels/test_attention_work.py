"""Every visible key of every token is in exactly one item, wherever the cuts fall; and a capacity's room suffices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.attention_work import REDUCED, SHORT, Cut, PageTables, Work, plan_work, room_for
from compress.kernels.queries import Capacity, PagedQueries


def make_queries(requests: list[tuple[int, int]], page_size: int) -> PagedQueries:
    tables = [list(range(7, 7 + -(-context // page_size))) for _, context in requests]
    return PagedQueries([r[0] for r in requests], [r[1] for r in requests], tables, page_size)


def plan(queries: PagedQueries, cut: Cut, rows: int = 0) -> Work:
    return plan_work(queries, PageTables().flatten(queries)[1], cut, rows)


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
    work = plan(queries, Cut(window, block_tokens, 32, short))
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
    work = plan(queries, Cut(window, 4, 32))
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
    rows = plan(alone, Cut(None, 4, 32, True)).items_X8[:, 1:5].tolist()
    others = plan(among, Cut(None, 4, 32, True)).items_X8
    assert sorted(others[others[:, 0] == 1][:, 1:5].tolist()) == sorted(rows)
    assert len(rows) == 4


def test_tables_are_padded_for_the_page_ids_that_are_loaded_ahead() -> None:
    for page_size in (1, 16, 64, 256):
        queries = make_queries([(1, 33), (1, 64)], page_size)
        flat, starts_N = PageTables().flatten(queries)
        for index, context in enumerate(queries.contexts):
            start = int(starts_N[index])
            last_key = -(-context // 64) * 64 + 63  # of the tile behind the last
            end = int([*starts_N, len(flat)][index + 1])
            assert start + last_key // page_size < end
            own = flat[start:end].tolist()
            assert own[: len(queries.tables[index])] == queries.tables[index]
            assert not any(own[len(queries.tables[index]) :])


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.integers(1, 9),  # requests
    st.integers(1, 3 * SHORT),  # new tokens
    st.sampled_from([40, 512, 513, 3000]),  # context
    st.sampled_from([None, 1, 600]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([None, True, False]),
    st.randoms(use_true_random=False),
)
def test_every_step_within_a_capacity_has_room(
    requests: int, length: int, context: int, window: int | None, block_tokens: int, short: bool | None, random: Random
) -> None:
    """Often to the last item: the pages are those that the step needs, and requests of full size are drawn."""
    lengths = [random.choice([0, 1, length, random.randint(0, length)]) for _ in range(random.randint(0, requests))]
    contexts = [max(1, n, random.choice([context, random.randint(0, context)])) for n in lengths]
    queries = make_queries(list(zip(lengths, contexts, strict=True)), 16)
    capacity = Capacity(requests, length, max(context, length), sum(map(len, queries.tables)))
    assert capacity.fits(queries)
    cut = Cut(window, block_tokens, 32, short)
    work, room = plan(queries, cut, capacity.tokens), room_for(capacity, cut, 16)
    assert len(work.items_X8) <= room.items
    assert len(work.reductions_Y5) <= room.reductions
    assert work.partial_rows <= room.partial_rows


def test_room_is_not_much_more_than_the_largest_step_needs() -> None:
    queries = make_queries([(1, 3000)] * 4, 16)
    capacity = Capacity(4, 1, 3000, sum(map(len, queries.tables)))
    cut = Cut(None, 4, 32, True)
    work, room = plan(queries, cut, capacity.tokens), room_for(capacity, cut, 16)
    assert (room.items, room.reductions, room.partial_rows) == (24, 4, 24)
    assert (len(work.items_X8), len(work.reductions_Y5), work.partial_rows) == (24, 4, 24)
    assert room_for(replace(capacity, pages=130), cut, 16).items == 130 * 16 // 512 + 4  # 2,080 keys and no more
    assert room_for(replace(capacity, context=512), cut, 16).partial_rows == 0
    assert room_for(capacity, Cut(100, 4, 32, True), 16).items == 8


def test_rows_of_nobody_are_each_in_one_item_without_keys() -> None:
    queries = make_queries([(3, 40), (0, 7), (2, 900)], 16)
    items = plan(queries, Cut(None, 4, 32, True), 16).items_X8
    assert items[-3:].tolist() == [
        [5, 4, 0, 0, 0, 0, -1, 5],
        [9, 4, 0, 0, 0, 0, -1, 9],
        [13, 3, 0, 0, 0, 0, -1, 13],
    ]
    assert (items[:-3, 4] > items[:-3, 3]).all()
    assert not len(plan(queries, Cut(None, 4, 32, False), 16).items_X8)


LARGEST = Capacity(requests=3, length=2, context=40, pages=6)


@pytest.mark.parametrize(
    ("requests", "fits"),
    [
        ([(2, 40), (1, 40)], True),
        ([], True),
        ([(1, 5), (0, 5), (2, 5)], True),
        ([(1, 5)] * 4, False),
        ([(3, 5)], False),
        ([(1, 41)], False),
        ([(1, 40), (1, 40), (1, 1)], False),
    ],
)
def test_what_a_capacity_takes(requests: list[tuple[int, int]], fits: bool) -> None:
    assert LARGEST.fits(make_queries(requests, 16)) == fits


def test_tables_that_change_from_step_to_step() -> None:
    """One grows, one is another request's, one is shorter, one's page is copied before it is written."""
    tables = PageTables()
    steps = [
        [[5, 6], [7, 8, 9], [1, 2, 3]],
        [[5, 6, 4], [7, 8, 9], [1, 2]],
        [[7, 8, 9], [5, 6, 4]],
        [[], [5, 10, 4], [1]],
        [[7, 8, 9], [5, 10, 4], [1], [2]],
    ]
    for step in steps:
        queries = PagedQueries([1] * len(step), [16 * len(table) for table in step], step, 16)
        for ours, wanted in zip(tables.flatten(queries), PageTables().flatten(queries), strict=True):
            assert ours.tolist() == wanted.tolist()
        step[-1][0] = 11  # a list that its owner changes later


def test_pages_of_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 24 slots"):
        PageTables().flatten(make_queries([(1, 30)], 24))
