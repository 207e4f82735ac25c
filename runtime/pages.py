"""The pool of cache pages: who holds which, counted.

A page may be held by several requests once prefixes are shared, so holders are counted and a page is free at zero.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence


class PagePool:
    """`total` pages of `page_size` tokens each."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._references = [0] * total
        # a heap, lowest page first: a request alone gets consecutive pages, which are read without a copy
        self._free = list(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder each, or None and no change where fewer are free."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these held pages."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page; those without any are free."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the counts agree with the page tables of everyone who holds pages."""
        entries = Counter(page for table in tables for page in table)
        counted = {page: count for page, count in enumerate(self._references) if count}
        if counted != dict(entries):
            raise AssertionError(f"page references {counted} differ from the table entries {dict(entries)}")
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a page is free twice")
        if any(self._references[page] for page in self._free) or len(self._free) + len(counted) != self.total:
            raise AssertionError(f"{len(self._free)} free + {len(counted)} used pages are not {self.total}")
