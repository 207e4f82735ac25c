"""A step's plan as flat tensors.

Shapes: T tokens, N requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compress.kernels.attention import PagedQueries
from compress.runtime.plan import Chunk, StepPlan


@dataclass(frozen=True)
class Batch:
    """The tokens of all chunks, one after the other; `chunks` is their order."""

    chunks: tuple[Chunk, ...]
    rows_3T: torch.Tensor  # ids, positions, and slots: where the keys and values of each token go
    queries: PagedQueries
    query_starts: tuple[int, ...]  # N + 1: chunk n is tokens query_starts[n] to query_starts[n + 1]

    @property
    def tokens(self) -> int:
        return self.rows_3T.shape[1]

    @property
    def ids_T(self) -> torch.Tensor:
        return self.rows_3T[0]

    @property
    def positions_T(self) -> torch.Tensor:
        return self.rows_3T[1]

    @property
    def slots_T(self) -> torch.Tensor:
        return self.rows_3T[2]

    @property
    def sampled(self) -> list[tuple[Chunk, int]]:
        """The chunks whose requests get their next token from this step, with the row of their last known token.

        The rows after that are those of the drafts.
        """
        ends = self.query_starts[1:]
        return [
            (chunk, end - 1 - len(chunk.drafts))
            for chunk, end in zip(self.chunks, ends, strict=True)
            if chunk.catches_up
        ]


def build_batch(plan: StepPlan, page_size: int, device: torch.device) -> Batch:
    """Lay the chunks out by size, so that requests with as many new tokens and about as long a past are neighbours."""
    chunks = tuple(sorted(plan.chunks, key=lambda chunk: (chunk.count, chunk.end)))
    ids: list[int] = []
    pages: list[int] = []  # those that are written, of one chunk after the other
    shift_N: list[int] = []  # from a page's number in its table to its number in `pages`
    for chunk in chunks:
        first = chunk.start // page_size
        shift_N.append(len(pages) - first)
        pages += chunk.request.pages[first : (chunk.end - 1) // page_size + 1]
        ids += chunk.request.token_ids[chunk.start : chunk.end - len(chunk.drafts)]
        ids += chunk.drafts
    counts_N = np.array([chunk.count for chunk in chunks], dtype=np.int64)
    starts_N = np.cumsum(np.concatenate(([0], counts_N)), dtype=np.int64)
    offsets_N = np.array([chunk.start for chunk in chunks]) - starts_N[:-1]
    positions_T = np.arange(len(ids)) + np.repeat(offsets_N, counts_N)
    page_T = np.array(pages, dtype=np.int64)[positions_T // page_size + np.repeat(np.array(shift_N), counts_N)]
    slots_T = page_T * page_size + positions_T % page_size
    queries = PagedQueries(
        lengths=[chunk.count for chunk in chunks],
        contexts=[chunk.end for chunk in chunks],
        tables=[chunk.request.pages for chunk in chunks],
        page_size=page_size,
    )
    rows_3T = torch.from_numpy(np.stack((np.array(ids), positions_T, slots_T))).to(device)
    return Batch(chunks, rows_3T, queries, tuple(starts_N.tolist()))
