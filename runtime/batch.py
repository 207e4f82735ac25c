"""A step's plan as flat tensors.

Shapes: T tokens, N requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compress.kernels.queries import PagedQueries
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
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for chunk in chunks:
        pages, span = chunk.request.pages, range(chunk.start, chunk.end)
        ids += chunk.request.token_ids[chunk.start : chunk.end - len(chunk.drafts)]
        ids += chunk.drafts
        positions += span
        slots += [pages[position // page_size] * page_size + position % page_size for position in span]
        starts.append(len(ids))
    queries = PagedQueries(
        lengths=[chunk.count for chunk in chunks],
        contexts=[chunk.end for chunk in chunks],
        tables=[chunk.request.pages for chunk in chunks],
        page_size=page_size,
    )
    rows_3T = torch.from_numpy(np.array((ids, positions, slots), dtype=np.int64)).to(device)
    return Batch(chunks, rows_3T, queries, tuple(starts))
