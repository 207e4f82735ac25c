"""A step's plan as flat tensors.

Shapes: T tokens, N requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.kernels.attention import PagedQueries
from compress.runtime.scheduler import Chunk, StepPlan


@dataclass(frozen=True)
class Batch:
    """The tokens of all chunks, one after the other; `chunks` is their order."""

    chunks: tuple[Chunk, ...]
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor  # where the keys and values of each token go
    queries: PagedQueries
    query_starts: tuple[int, ...]  # N + 1: chunk n is tokens query_starts[n] to query_starts[n + 1]

    @property
    def sampled(self) -> tuple[Chunk, ...]:
        """The chunks whose requests get their next token from this step."""
        return tuple(chunk for chunk in self.chunks if chunk.catches_up)

    @property
    def logit_rows(self) -> list[int]:
        """The tokens whose logits are needed: the last of each sampled chunk."""
        ends = self.query_starts[1:]
        return [end - 1 for chunk, end in zip(self.chunks, ends, strict=True) if chunk.catches_up]


def build_batch(plan: StepPlan, page_size: int, device: torch.device) -> Batch:
    """Lay the chunks out by size, so that requests with as many new tokens and about as long a past are neighbours."""
    chunks = tuple(sorted(plan, key=lambda chunk: (chunk.count, chunk.end)))
    ids, positions, slots, starts = [], [], [], [0]
    for chunk in chunks:
        pages = chunk.request.pages
        ids += chunk.request.token_ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        slots += [pages[p // page_size] * page_size + p % page_size for p in range(chunk.start, chunk.end)]
        starts.append(len(ids))
    queries = PagedQueries(
        lengths=[chunk.count for chunk in chunks],
        contexts=[chunk.end for chunk in chunks],
        tables=[chunk.request.pages for chunk in chunks],
        page_size=page_size,
    )
    ids_T, positions_T, slots_T = torch.tensor([ids, positions, slots], device=device)
    return Batch(chunks, ids_T, positions_T, slots_T, queries, tuple(starts))
