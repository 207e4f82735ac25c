"""What attention is asked for: the requests of a batch, how much a plan has room for, what differs between layers.

Shapes: H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What differs between layers and models."""

    window: int | None = None
    scale: float | None = None  # None: 1/√D
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None

    @property
    def is_plain_softmax(self) -> bool:
        return self.soft_cap is None and self.sinks_H is None


@dataclass(frozen=True)
class PagedQueries:
    """The requests of a flat batch, in its order.

    `lengths` counts the new tokens of each, `contexts` all of its tokens up to the last new one, `tables` lists its
    pages. Requests with equal lengths are attended together where they are neighbours.
    """

    lengths: Sequence[int]
    contexts: Sequence[int]
    tables: Sequence[Sequence[int]]
    page_size: int


def count_pages(context: int, page_size: int) -> int:
    return -(-context // page_size)


@dataclass(frozen=True)
class Capacity:
    """The largest step of a plan whose memory serves many steps, one after the other.

    Each of them has `tokens` rows. Those behind the requests' own belong to nobody, and their attention is zero.
    """

    requests: int
    length: int  # new tokens of a request
    context: int  # tokens of a request, up to its last new one
    pages: int  # table entries of all requests together
    windows: tuple[int | None, ...] = (None,)  # of all layers

    @property
    def tokens(self) -> int:
        return self.requests * self.length

    def fits(self, queries: PagedQueries) -> bool:
        return (
            len(queries.lengths) <= self.requests
            and max(queries.lengths, default=0) <= self.length
            and max(queries.contexts, default=0) <= self.context
            and sum(count_pages(context, queries.page_size) for context in queries.contexts) <= self.pages
        )
