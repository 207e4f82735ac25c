"""The paged cache of keys and values.

Shapes: P pages, S slots of a page, K KV heads, D head dim, T tokens. Slot n of the cache is slot n % S of page n // S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, each [P, S, K, D]."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.keys + self.values)


def store(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: KVCache, layer: int, slots_T: torch.Tensor) -> None:
    """Write the keys and values of T tokens to their slots of one layer."""
    cache.keys[layer].flatten(0, 1).index_copy_(0, slots_T, k_TKD)
    cache.values[layer].flatten(0, 1).index_copy_(0, slots_T, v_TKD)


def copy_pages(cache: KVCache, copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages (source, destination) in every layer: what a writer of a shared page needs first."""
    source, destination = (torch.tensor(side, device=cache.keys[0].device) for side in zip(*copies, strict=True))
    for tensor in cache.keys + cache.values:
        tensor.index_copy_(0, destination, tensor.index_select(0, source))
