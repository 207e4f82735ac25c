"""Ragged batches over a paged cache of latents, and what their attention must be, in float64.

Shapes: T tokens, H heads, R latent rank, E rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.kernels.mla import LatentPages, store_latents
from compress.kernels.queries import PagedQueries


@dataclass(frozen=True)
class LatentBatch:
    q_THR: torch.Tensor
    q_THE: torch.Tensor
    pages: LatentPages
    queries: PagedQueries


def latent_batch(
    requests: Sequence[tuple[int, int]],
    page_size: int,
    heads: int,
    rank: int,
    rotated: int,
    dtype: torch.dtype = torch.float32,
    blank: float = 0.0,
) -> LatentBatch:
    """(new tokens, context) of each request. Slots that nobody wrote hold `blank`."""
    shuffle = torch.Generator().manual_seed(0)
    pages = sum(-(-context // page_size) for _, context in requests) + 3
    both = torch.full((pages, page_size, rank + rotated), blank, dtype=dtype)
    cache = LatentPages(both[..., :rank], both[..., rank:])
    free = (torch.randperm(pages - 1, generator=shuffle) + 1).tolist()
    tables, queries = [], []
    for index, (length, context) in enumerate(requests):
        generator = torch.Generator().manual_seed(index)
        table = [free.pop() for _ in range(-(-context // page_size))]
        written = torch.randn(context, rank + rotated, generator=generator).to(dtype)
        written[::7] *= 4
        slots = torch.tensor([table[p // page_size] * page_size + p % page_size for p in range(context)])
        store_latents(written[:, :rank], written[:, rank:], cache, slots)
        tables.append(table)
        queries.append(torch.randn(length, heads, rank + rotated, generator=generator).to(dtype))
    q = torch.cat(queries)
    paged = PagedQueries([r[0] for r in requests], [r[1] for r in requests], tables, page_size)
    return LatentBatch(q[..., :rank], q[..., rank:], cache, paged)


def expected(batch: LatentBatch, scale: float) -> torch.Tensor:
    """Each token and head on its own, in float64."""
    rows, token = [], 0
    queries = batch.queries
    for length, context, table in zip(queries.lengths, queries.contexts, queries.tables, strict=True):
        index = torch.tensor(table)
        c, k = (x[index].flatten(0, 1)[:context].double() for x in (batch.pages.latents_PSR, batch.pages.keys_PSE))
        for seen in range(context - length + 1, context + 1):
            q_HR, q_HE = batch.q_THR[token].double(), batch.q_THE[token].double()
            weights = ((q_HR @ c[:seen].T + q_HE @ k[:seen].T) * scale).softmax(dim=1)
            rows.append(weights @ c[:seen])
            token += 1
    return torch.stack(rows)
