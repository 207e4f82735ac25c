"""What the paged attention kernels are to do in a step, as arrays: query blocks, the keys of each, and their reduction.

A request is cut into blocks of a few new tokens, and the keys of a block into splits. Where the cuts are depends on the
request alone, on positions and never on its neighbours, so a token's result is the same bits in any batch.

Shapes: X items, Y reduced tokens, N requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compress.kernels.queries import Capacity, PagedQueries, count_pages

SHORT = 8  # new tokens of a request that is decoded or verified: few rows, so its keys are split among programs
SPLIT_LENGTHS = np.array([SHORT, 128])  # up to so many new tokens ...
SPLIT_KEYS = np.array([512, 2048, 1 << 30])  # ... a split has so many keys; requests of more tokens are not split
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
class Cut:
    """Which requests a launch takes, and how it cuts them."""

    window: int | None
    block_tokens: int
    tile_keys: int
    short: bool | None = None  # those of up to SHORT new tokens, the others, or (None) all


@dataclass(frozen=True)
class Work:
    """Columns of an item: first token, tokens, position of the first, first key, end of the keys, where the page table
    starts, first partial row or −1 for one that writes its result itself, first token (read again when it is needed
    again). Columns of a reduction: token, partial row of split 0 of its first block of REDUCED, rows from split to
    split, first split, end of the splits in that block's count.
    """

    items_X8: np.ndarray
    reductions_Y5: np.ndarray
    partial_rows: int  # of [heads, D] that the items write between them


@dataclass(frozen=True)
class Room:
    """How much work there may be."""

    items: int
    reductions: int
    partial_rows: int

    @staticmethod
    def of(work: Work) -> Room:
        return Room(len(work.items_X8), len(work.reductions_Y5), work.partial_rows)


def table_padding(page_size: int) -> int:
    """Entries after a request's last one: the tile after its last tile finds page ids too."""
    return 2 * MAX_TILE_KEYS // page_size + 1


class PageTables:
    """The page tables of one step after another, as arrays. Most stay as they are, and are not converted again."""

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[int], np.ndarray]] = []

    def flatten(self, queries: PagedQueries) -> tuple[np.ndarray, np.ndarray]:
        """The tables one after the other, padded, and where each starts.

        ValueError for pages whose size is no power of two: the kernels find a key's page by a shift.
        """
        size = queries.page_size
        if size & (size - 1):
            raise ValueError(f"pages of {size} slots: the GPU kernels take powers of two")
        padding = [0] * table_padding(size)  # page 0 exists; its slots are masked
        for i, (table, context) in enumerate(zip(queries.tables, queries.contexts, strict=True)):
            pages = table[: count_pages(context, size)]
            if i == len(self._known):
                self._known.append(([], np.zeros(0, dtype=np.int32)))
            if pages != self._known[i][0] or not pages:
                self._known[i] = pages, np.array([*pages, *padding], dtype=np.int32)
        arrays = [array for _, array in self._known[: len(queries.tables)]]
        widths = np.array([len(array) for array in arrays], dtype=np.int64)
        return np.concatenate([*arrays, np.zeros(0, dtype=np.int32)]), np.cumsum(widths) - widths


@dataclass(frozen=True)
class _Blocks:
    """The new tokens of requests, a few at a time: one entry of each array for each block."""

    first_token: np.ndarray
    tokens: np.ndarray
    position: np.ndarray  # of the first token
    first_key: np.ndarray
    table: np.ndarray  # where the request's page table starts
    split_keys: np.ndarray  # keys of a split

    @property
    def first_split(self) -> np.ndarray:
        return self.first_key // self.split_keys

    @property
    def splits(self) -> np.ndarray:
        return -(-(self.position + self.tokens) // self.split_keys) - self.first_split


def plan_work(queries: PagedQueries, table_starts_N: np.ndarray, cut: Cut, rows: int = 0) -> Work:
    """Items with most keys come first: they take longest.

    Of `rows` of the batch, those behind the requests' belong to nobody. Items without keys set them to zero, among the
    work of short requests.
    """
    blocks = _cut_tokens(queries, table_starts_N, cut)
    splits, first_split = blocks.splits, blocks.first_split
    partials = np.where(splits > 1, splits * blocks.tokens, 0)
    partial = np.cumsum(partials) - partials

    block, split = _repeat(np.arange(len(splits)), splits)
    first_token, tokens, position = blocks.first_token[block], blocks.tokens[block], blocks.position[block]
    size = blocks.split_keys[block]
    low = (first_split[block] + split) * size
    start, end = np.maximum(blocks.first_key[block], low), np.minimum(position + tokens, low + size)
    row = np.where(splits[block] > 1, partial[block] + split * tokens, -1)
    items = np.stack([first_token, tokens, position, start, end, blocks.table[block], row, first_token], axis=1)
    items = items[np.argsort(start - end, kind="stable")]
    if cut.short is not False:
        items = np.concatenate((items, _items_of_nobody(sum(queries.lengths), rows, cut.block_tokens)))

    block, token = _repeat(np.flatnonzero(splits > 1), blocks.tokens[splits > 1])
    shift, step = first_split[block] % REDUCED, blocks.tokens[block]
    base = partial[block] + token - shift * step
    reductions = np.stack([blocks.first_token[block] + token, base, step, shift, shift + splits[block]], axis=1)
    return Work(items.astype(np.int32), reductions.astype(np.int32), int(partials.sum()))


def _cut_tokens(queries: PagedQueries, table_starts_N: np.ndarray, cut: Cut) -> _Blocks:
    lengths_N = np.array(queries.lengths, dtype=np.int64)
    starts_N = np.cumsum(lengths_N) - lengths_N
    chosen_N = lengths_N > 0
    if cut.short is not None:
        chosen_N &= (lengths_N <= SHORT) == cut.short
    chosen = np.flatnonzero(chosen_N)
    request, index = _repeat(chosen, -(-lengths_N[chosen] // cut.block_tokens))
    lengths, skipped = lengths_N[request], index * cut.block_tokens
    position = np.array(queries.contexts, dtype=np.int64)[request] - lengths + skipped
    first_key = np.zeros_like(position) if cut.window is None else np.maximum(0, position - cut.window + 1)
    return _Blocks(
        first_token=starts_N[request] + skipped,
        tokens=np.minimum(cut.block_tokens, lengths - skipped),
        position=position,
        first_key=first_key - first_key % cut.tile_keys,
        table=table_starts_N[request],
        split_keys=SPLIT_KEYS[np.searchsorted(SPLIT_LENGTHS, lengths)],
    )


def _items_of_nobody(first: int, rows: int, block_tokens: int) -> np.ndarray:
    token = np.arange(first, rows, block_tokens)
    items = np.zeros((len(token), 8), dtype=np.int64)
    items[:, 0] = items[:, 7] = token
    items[:, 1] = np.minimum(block_tokens, rows - token)
    items[:, 6] = -1
    return items


def room_for(capacity: Capacity, cut: Cut, page_size: int) -> Room:
    """At least the work of every step within the capacity, whose rows are `capacity.tokens`."""
    if cut.short is False and capacity.length <= SHORT:
        return Room(0, 0, 0)
    size = int(SPLIT_KEYS[1 if cut.short is False else 0])
    splits = -(-capacity.context // size)  # of a request's block
    if cut.window is not None:
        seen = cut.window + cut.block_tokens + cut.tile_keys  # more than the keys of a block
        splits = min(splits, -(-seen // size) + 1)
    # no more than the pages hold: a request has at most one split that is not full
    total = min(capacity.requests * splits, capacity.pages * page_size // size + capacity.requests)
    length = min(capacity.length, SHORT) if cut.short else capacity.length
    # a request that is shorter leaves rows to nobody, in at most one block more
    more = capacity.requests if capacity.length > 1 and cut.short is not False else 0
    items = -(-capacity.length // cut.block_tokens) * total + more
    if splits == 1:
        return Room(items, 0, 0)
    return Room(items, capacity.requests * length, length * total)


def _repeat(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value as often as its count says, and which repetition each is."""
    starts = np.cumsum(counts) - counts
    return np.repeat(values, counts), np.arange(counts.sum()) - np.repeat(starts, counts)
