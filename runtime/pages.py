"""The pool of cache pages: who holds which, and what those that nobody holds still remember.

A page is free, used (held by requests, which are counted) or cached: full, held by nobody, and known by the hash of all
tokens up to its end, until its space is needed. Equal hashes mean equal contents, so a request takes what it finds.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np


def page_hash(parent: bytes | None, tokens: Sequence[int], salt: str = "") -> bytes:
    """The name of a full page: its tokens and, through its parent, all tokens before them. The salt names the first."""
    first = sha256(salt.encode()).digest() if parent is None else parent
    return sha256(first + np.asarray(tokens, dtype=np.int64).tobytes()).digest()


class PagePool:
    """`total` pages of `page_size` tokens each. Without `caching`, a page that nobody holds is forgotten."""

    def __init__(self, total: int, page_size: int, caching: bool = True) -> None:
        self.total = total
        self.page_size = page_size
        self.caching = caching
        self._references = [0] * total
        # a heap, lowest page first: a request alone gets consecutive pages, which are read without a copy
        self._free = list(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder each, or None and no change where there are not as many free and cached."""
        if count > len(self._free) + len(self._cached):
            return None
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            heapq.heappush(self._free, page)
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest known run of these hashes, from the first on."""
        pages = []
        for name in hashes:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, name: bytes) -> None:
        """A held page is full: others may find it. Where an equal one is known, that one stays."""
        if self.caching and name not in self._page_of and page not in self._hash_of:
            self._page_of[name] = page
            self._hash_of[page] = name

    def writable(self, page: int) -> bool:
        """Whether a held page may be written: nobody else holds it or can find it."""
        return self._references[page] == 1 and page not in self._hash_of

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these held or cached pages."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page; those without any are cached, or free where they are not known.

        The last page is the first to go: the start of a sequence is of use to more requests than its end.
        """
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._hash_of:
                self._cached[page] = None
            else:
                heapq.heappush(self._free, page)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the counts agree with the page tables of everyone who holds pages."""
        entries = Counter(page for table in tables for page in table)
        counted = {page: count for page, count in enumerate(self._references) if count}
        if counted != dict(entries):
            raise AssertionError(f"page references {counted} differ from the table entries {dict(entries)}")
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise AssertionError("a page is free twice")
        if free & cached or (free | cached) & counted.keys() or self.free + self.cached + len(counted) != self.total:
            raise AssertionError(
                f"{self.free} free + {self.cached} cached + {len(counted)} used pages are not {self.total}"
            )
        if {page: name for name, page in self._page_of.items()} != self._hash_of or not cached <= self._hash_of.keys():
            raise AssertionError("a cached page has no hash, or hashes and pages are not one to one")
        if free & self._hash_of.keys():
            raise AssertionError("a free page can be found")
