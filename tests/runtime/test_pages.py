"""The page pool's accounts."""

from __future__ import annotations

import pytest

from compress.runtime.pages import PagePool, page_hash


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


def cached_chain(pool: PagePool, length: int, salt: str = "") -> list[bytes]:
    """A sequence of `length` full pages that was computed and released; the hashes of its pages."""
    pages = pool.allocate(length)
    assert pages is not None
    names: list[bytes] = []
    for i, page in enumerate(pages):
        names.append(page_hash(names[-1] if names else None, range(i, i + pool.page_size), salt))
        pool.register(page, names[-1])
    pool.release(pages)
    pool.check([])
    return names


def test_released_pages_are_found_until_their_space_is_needed() -> None:
    pool = PagePool(4, page_size=16)
    names = cached_chain(pool, 3)
    assert (pool.free, pool.cached, pool.used) == (1, 3, 0)
    assert pool.find(names) == [0, 1, 2]
    assert pool.allocate(2) == [2, 3], "the free page, and the end of the sequence"
    assert pool.find(names) == [0, 1]
    pool.share([0, 1])
    pool.check([[2, 3], [0, 1]])
    assert pool.allocate(1) is None, "what is held again cannot be taken"


def test_the_least_recently_used_sequence_goes_first() -> None:
    pool = PagePool(6, page_size=16)
    old, young = cached_chain(pool, 2, "old"), cached_chain(pool, 2, "young")
    pool.share(pool.find(old))
    pool.release(pool.find(old))
    pool.allocate(4)
    assert (len(pool.find(old)), len(pool.find(young))) == (2, 0)


def test_a_known_page_is_not_writable_and_a_shared_one_neither() -> None:
    pool = PagePool(4, page_size=16)
    pages = pool.allocate(2)
    assert pages is not None
    assert pool.writable(pages[0])
    pool.register(pages[0], b"name")
    pool.share(pages[1:])
    assert not pool.writable(pages[0])
    assert not pool.writable(pages[1])


def test_of_two_equal_pages_the_first_is_found_and_the_other_free_again() -> None:
    pool = PagePool(4, page_size=16)
    pages = pool.allocate(2)
    assert pages is not None
    for page in pages:
        pool.register(page, b"name")
    pool.release(pages)
    assert (pool.find([b"name"]), pool.cached, pool.free) == ([pages[0]], 1, 3)
    pool.check([])


def test_without_caching_nothing_is_remembered() -> None:
    pool = PagePool(4, page_size=16, caching=False)
    assert pool.find(cached_chain(pool, 2)) == []
    assert pool.free == 4


def test_hashes_tell_tokens_parents_and_salts_apart() -> None:
    first = page_hash(None, [1, 2])
    names = {first, page_hash(None, [2, 1]), page_hash(first, [1, 2]), page_hash(None, [1, 2], "salt")}
    assert len(names) == 4
    assert page_hash(first, [3, 4], "salt") == page_hash(first, [3, 4]), "the parent has the salt in it"
