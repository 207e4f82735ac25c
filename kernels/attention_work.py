"""What the paged attention kernels are to do in a step, as arrays: query blocks, the keys of each, and their reduction.

A request is cut into blocks of a few new tokens, and the keys of a block into splits. Where the cuts are depends on the
request alone, on positions and never on its neighbours, so a token's result is the same bits in any batch.

Shapes: X items, Y reduced tokens, N requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from compress.kernels.attention import PagedQueries

SHORT = 8  # new tokens of a request that is decoded or verified: few rows, so its keys are split among programs
SPLITS = ((SHORT, 512), (128, 2048))  # keys of a split for requests of up to so many new tokens; longer ones have none
UNSPLIT = 1 << 30
REDUCED = 16  # splits that the reduction adds at once; a block of them starts at a multiple
MAX_TILE_KEYS = 64


@dataclass(frozen=True)
class Tile:
    """The shape of a program's work: query rows (tokens × heads of a group) and keys of one iteration."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Work:
    """Columns of an item: first token, tokens, position of the first, first key, end of the keys, where the page table
    starts, first partial row or −1 for one that writes its result itself, first token (read again when it is needed
    again). Columns of a reduction: token, partial row of split 0 of its first block of REDUCED, rows from split to
    split, first split, end of the splits in that block's count.
    """

    items_X8: torch.Tensor
    reductions_Y5: torch.Tensor
    partial_rows: int  # of [heads, D] that the items write between them


@dataclass(frozen=True)
class PageTables:
    """Page tables one after the other, padded so that the tile after a request's last one finds page ids too."""

    pages: torch.Tensor
    starts_N: np.ndarray


def flatten_tables(queries: PagedQueries, device: torch.device) -> PageTables:
    """ValueError for pages whose size is no power of two: the kernels find a key's page by a shift."""
    if queries.page_size & (queries.page_size - 1):
        raise ValueError(f"pages of {queries.page_size} slots: the GPU kernels take powers of two")
    padding = [0] * (2 * MAX_TILE_KEYS // queries.page_size + 1)  # page 0 exists; its slots are masked
    widths = np.array([len(table) + len(padding) for table in queries.tables], dtype=np.int64)
    flat = list(chain.from_iterable(chain(table, padding) for table in queries.tables))
    return PageTables(torch.tensor(flat, dtype=torch.int32).to(device), np.cumsum(widths) - widths)


def plan_work(
    queries: PagedQueries,
    tables: PageTables,
    window: int | None,
    block_tokens: int,
    tile_keys: int,
    short: bool | None = None,
) -> Work:
    """The work of the requests of up to SHORT new tokens, of the others, or (None) of all, on the tables' device.

    Items with most keys come first: they take longest.
    """
    lengths_N = np.array(queries.lengths, dtype=np.int64)
    starts_N = np.cumsum(lengths_N) - lengths_N
    chosen = lengths_N > 0
    if short is not None:
        chosen &= (lengths_N <= SHORT) == short
    chosen = np.flatnonzero(chosen)
    request, index = _repeat(chosen, -(-lengths_N[chosen] // block_tokens))
    skipped = index * block_tokens
    tokens = np.minimum(block_tokens, lengths_N[request] - skipped)
    position = np.array(queries.contexts, dtype=np.int64)[request] - lengths_N[request] + skipped
    first_key = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    first_key -= first_key % tile_keys
    end_key = position + tokens
    size = np.select([lengths_N[request] <= limit for limit, _ in SPLITS], [size for _, size in SPLITS], UNSPLIT)
    first_split = first_key // size
    splits = -(-end_key // size) - first_split
    partials = np.where(splits > 1, splits * tokens, 0)
    partial = np.cumsum(partials) - partials

    block, split = _repeat(np.arange(len(request)), splits)
    low = (first_split[block] + split) * size[block]
    start, end = np.maximum(first_key[block], low), np.minimum(end_key[block], low + size[block])
    row = np.where(splits[block] > 1, partial[block] + split * tokens[block], -1)
    first_token = starts_N[request] + skipped
    columns = (first_token[block], tokens[block], position[block], start, end, tables.starts_N[request[block]], row)
    items = np.stack([*columns, columns[0]], axis=1)
    items = items[np.argsort(start - end, kind="stable")]

    block, token = _repeat(np.flatnonzero(splits > 1), tokens[splits > 1])
    shift = first_split[block] % REDUCED
    base = partial[block] + token - shift * tokens[block]
    reductions = np.stack([first_token[block] + token, base, tokens[block], shift, shift + splits[block]], axis=1)
    device = tables.pages.device
    return Work(_int32(items, device), _int32(reductions, device), int(partials.sum()))


def _repeat(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value as often as its count says, and which repetition each is."""
    starts = np.cumsum(counts) - counts
    return np.repeat(values, counts), np.arange(counts.sum()) - np.repeat(starts, counts)


def _int32(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table.astype(np.int32)).to(device)
