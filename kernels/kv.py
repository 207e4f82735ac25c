"""The paged cache of keys and values, in the model's format or quantized to a byte a number.

Quantized pages hold codes, and a scale for every slot and head: value = code · scale. A scale tensor is [P, S, K]
always. Where a checkpoint gives the scale of a tensor or of a head it is expanded over pages and slots with strides of
0 (`static_scales`) and never written; else each token and head gets its own as it is stored. The formats of keys and of
values are chosen apart.

Shapes: P pages, S slots of a page, K KV heads, D head dim, T tokens. Slot n of the cache is slot n % S of page n // S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code of each quantized format, both signs
TINY = torch.finfo(torch.float32).tiny  # the least dynamic scale: what divides a token of zeros


@dataclass(frozen=True, eq=False)
class Pages:
    """Keys and values of one layer [P, S, K, D], and float32 scales [P, S, K] of those that are quantized."""

    keys_PSKD: torch.Tensor
    values_PSKD: torch.Tensor
    key_scales_PSK: torch.Tensor | None = None
    value_scales_PSK: torch.Tensor | None = None


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, each [P, S, K, D]; scales [P, S, K] of every layer where they are quantized."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    key_scales: tuple[torch.Tensor, ...] | None = None
    value_scales: tuple[torch.Tensor, ...] | None = None

    def layer(self, index: int) -> Pages:
        return Pages(
            self.keys[index],
            self.values[index],
            self.key_scales[index] if self.key_scales else None,
            self.value_scales[index] if self.value_scales else None,
        )

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that storing a token writes: all but static scales."""
        scales = (*(self.key_scales or ()), *(self.value_scales or ()))
        return self.keys + self.values + tuple(scale for scale in scales if not is_static(scale))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.written)


def static_scales(scale_K: torch.Tensor, pages: int, page_size: int) -> torch.Tensor:
    """One scale per head for every slot, [P, S, K] without memory of its own."""
    scale_K = scale_K.float()
    return scale_K.as_strided((pages, page_size, len(scale_K)), (0, 0, scale_K.stride(0)))


def is_static(scales_PSK: torch.Tensor) -> bool:
    return scales_PSK.stride()[:2] == (0, 0)


def dynamic_scales(x_TKD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale [T, K] that maps the largest magnitude of each token and head to the largest code.

    NaN where a number is not finite, so that what broke stays visible.
    """
    largest_TK = x_TKD.float().abs().amax(dim=-1)
    scale_TK = (largest_TK / LIMITS[dtype]).clamp_min(TINY)
    return torch.where(largest_TK.isfinite(), scale_TK, torch.nan)


def quantize(x_TKD: torch.Tensor, scale_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of x / scale: the nearest, ties to even; beyond the largest code, the largest; 0 for NaN."""
    scaled = (x_TKD.float() / scale_TK[..., None]).nan_to_num(0.0).clamp(-LIMITS[dtype], LIMITS[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def dequantize(codes_PSKD: torch.Tensor, scales_PSK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (codes_PSKD.float() * scales_PSK[..., None]).to(dtype)


def store(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: KVCache, layer: int, slots_T: torch.Tensor) -> None:
    """Write the keys and values of T tokens to their slots of one layer. Tokens whose slot is −1 are left out."""
    padding_T = slots_T < 0
    if padding_T.any():
        k_TKD, v_TKD, slots_T = k_TKD[~padding_T], v_TKD[~padding_T], slots_T[~padding_T]
    pages = cache.layer(layer)
    _store(k_TKD, pages.keys_PSKD, pages.key_scales_PSK, slots_T)
    _store(v_TKD, pages.values_PSKD, pages.value_scales_PSK, slots_T)


def _store(
    x_TKD: torch.Tensor, pages_PSKD: torch.Tensor, scales_PSK: torch.Tensor | None, slots_T: torch.Tensor
) -> None:
    if scales_PSK is None:
        pages_PSKD.flatten(0, 1).index_copy_(0, slots_T, narrowed(x_TKD, pages_PSKD.dtype))
        return
    if is_static(scales_PSK):
        scale_TK = scales_PSK[0, 0].expand(len(x_TKD), -1)
    else:
        scale_TK = dynamic_scales(x_TKD, pages_PSKD.dtype)
        scales_PSK.flatten(0, 1).index_copy_(0, slots_T, scale_TK)
    codes_TKD = quantize(x_TKD, scale_TK, pages_PSKD.dtype)
    # as bytes: torch cannot index_copy_ float8 on a CPU
    pages_PSKD.view(torch.uint8).flatten(0, 1).index_copy_(0, slots_T, codes_TKD.view(torch.uint8))


def narrowed(x_TKD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite numbers beyond a float16's largest become the largest: an infinity would be a NaN in later answers."""
    if dtype == torch.float16 and x_TKD.dtype != torch.float16:
        largest = torch.finfo(torch.float16).max
        x_TKD = torch.where(x_TKD.isfinite(), x_TKD.clamp(-largest, largest), x_TKD)
    return x_TKD.to(dtype)


class Cache(Protocol):
    """Anything in pages: a KVCache, or the latents of MLA."""

    @property
    def written(self) -> tuple[torch.Tensor, ...]: ...


def copy_pages(cache: Cache, copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages (source, destination) in every layer: what a writer of a shared page needs first."""
    source, destination = (torch.tensor(side, device=cache.written[0].device) for side in zip(*copies, strict=True))
    for tensor in cache.written:
        plain = tensor.view(torch.uint8) if tensor.dtype in LIMITS else tensor
        plain.index_copy_(0, destination, plain.index_select(0, source))
