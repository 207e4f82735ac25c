"""Latent attention by the compiled attention kernel: one KV head whose keys and values are [latent, rotated key].

What the kernel sums over the rotated keys is left out of the result. The results are the same bits in any batch, as
those of CompiledAttention; widths that it does not take (above 576, or no multiple of 16) go to the reference, which
depends on the batch by rounding.

Shapes: as mla.py; X = R + E.
"""

from __future__ import annotations

import torch

from compress.kernels.cpu.attention import LANES, MAX_DIM, CompiledAttention
from compress.kernels.cpu.isa import Isa
from compress.kernels.kv import Pages
from compress.kernels.mla import LatentPages, PagedLatentAttention
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries


class CompiledLatentAttention:
    """Latent attention of one step."""

    def __init__(self, queries: PagedQueries, isa: Isa, capacity: Capacity | None = None) -> None:
        self._compiled = CompiledAttention(queries, isa, capacity)
        self._queries = queries

    def update(self, queries: PagedQueries) -> bool:
        """As CompiledAttention."""
        if not self._compiled.update(queries):
            return False
        self._queries = queries
        return True

    def __call__(self, q_THR: torch.Tensor, q_THE: torch.Tensor, pages: LatentPages, scale: float) -> torch.Tensor:
        """[T, H, R], as PagedLatentAttention."""
        rank = q_THR.shape[2]
        width = rank + q_THE.shape[2]
        joined_PS1X = _joined(pages, width)
        if joined_PS1X is None or width % LANES or width > MAX_DIM or q_THR.dtype != torch.float32:
            return PagedLatentAttention(self._queries)(q_THR, q_THE, pages, scale)
        q_THX = torch.cat((q_THR, q_THE), dim=2)
        out_THX = self._compiled(q_THX, Pages(joined_PS1X, joined_PS1X), AttentionOptions(scale=scale))
        return out_THX[..., :rank]


def _joined(pages: LatentPages, width: int) -> torch.Tensor | None:
    """[P, S, 1, X], where latents and rotated keys are neighbours in one tensor."""
    latents, keys = pages.latents_PSR, pages.keys_PSE
    adjacent = keys.data_ptr() == latents.data_ptr() + latents.shape[2] * latents.itemsize
    if not adjacent or latents.stride() != keys.stride() or latents.stride(2) != 1 or latents.dtype != keys.dtype:
        return None
    strides = (*latents.stride()[:2], width, 1)
    return latents.as_strided((*latents.shape[:2], 1, width), strides)
