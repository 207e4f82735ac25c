"""The two attentions that a model runs with: over the paged cache, and over whole sequences without one.

Shapes: T tokens, H query heads, K KV heads, D head dim, R latent rank, E rotated dimensions, X = R + E.
"""

from __future__ import annotations

from typing import cast

import torch

from compress.kernels.attention import FullAttention
from compress.kernels.kv import KVCache
from compress.kernels.mla import LatentPages
from compress.kernels.operations import Attention, LatentAttention
from compress.kernels.queries import Capacity, PagedQueries
from compress.runtime.models.model import Attend, Model


def plan_attention(
    model: Model, queries: PagedQueries, capacity: Capacity | None = None
) -> Attention | LatentAttention:
    """The paged attention of one step, for every layer; with a capacity, of one step after the other."""
    operations = model.operations
    plan = operations.latent_attention if model.cache_layout[0].latent else operations.attention
    return plan(queries, capacity=capacity)


def paged_attend(model: Model, cache: KVCache, attention: Attention | LatentAttention, slots_T: torch.Tensor) -> Attend:
    """What a layer calls in a step: stores what the new tokens leave in their slots, then attends."""
    store, options = model.operations.store, model.attention
    if not model.cache_layout[0].latent:
        paged = cast(Attention, attention)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            store(k, v, cache, layer, slots_T)
            return paged(q, cache.layer(layer), options[layer])

        return attend
    latent = cast(LatentAttention, attention)

    def attend_latents(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        store(k, v, cache, layer, slots_T)
        pages = cache.layer(layer)
        q_THR, q_THE = q.split((k.shape[2], v.shape[2]), dim=2)
        scale = options[layer].scale
        assert scale is not None
        return latent(q_THR, q_THE, LatentPages(pages.keys_PSKD[:, :, 0], pages.values_PSKD[:, :, 0]), scale)

    return attend_latents


def full_attend(model: Model, sequences: int, length: int, device: torch.device) -> Attend:
    """Attention of whole sequences, one after the other, each of `length` tokens."""
    full = FullAttention(sequences, length, device)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if model.cache_layout[layer].latent:
            k, v = torch.cat((k, v), dim=2), k
        return full(q, k, v, model.attention[layer])

    return attend
