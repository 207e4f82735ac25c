"""The page pool's accounts."""

from __future__ import annotations

import pytest

from compress.runtime.pages import PagePool


def test_pages_are_counted_in_and_out() -> None:
    pool = PagePool(8, page_size=16)
    first, second = pool.allocate(3), pool.allocate(5)
    assert first is not None
    assert second is not None
    assert first == [0, 1, 2]
    assert pool.allocate(1) is None
    pool.check([first, second])
    pool.release(second)
    assert (pool.free, pool.used) == (5, 3)
    pool.check([first])
    pool.release(first)
    pool.check([])
    assert pool.allocate(8) == list(range(8)), "a pool that is empty again gives consecutive pages"


def test_a_refused_allocation_changes_nothing() -> None:
    pool = PagePool(2, page_size=16)
    assert pool.allocate(3) is None
    assert pool.free == 2
    assert pool.allocate(0) == []


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    pool = PagePool(4, page_size=16)
    pages = pool.allocate(2)
    assert pages is not None
    pool.share(pages[:1])
    pool.check([pages, pages[:1]])
    pool.release(pages)
    assert pool.free == 3
    pool.check([pages[:1]])
    pool.release(pages[:1])
    assert pool.free == 4


def test_check_finds_lost_and_doubly_held_pages() -> None:
    pool = PagePool(4, page_size=16)
    pages = pool.allocate(2)
    assert pages is not None
    for tables in ([], [pages[:1]], [pages, pages[:1]]):
        with pytest.raises(AssertionError, match="differ from the table entries"):
            pool.check(tables)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert PagePool(1, page_size=16).pages_for(tokens) == pages
