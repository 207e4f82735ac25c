"""The memory of the paged cache: formats of keys and values, scales, sizes.

Shapes: P pages, S slots of a page, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from compress.arch import block_prefix
from compress.checkpoint import Checkpoint
from compress.errors import UserError, nearest
from compress.kernels.kv import LIMITS, KVCache, static_scales
from compress.runtime.models.model import CacheLayout

MEMORY_SHARE = 0.25  # of the free memory, at most, for the cache where its size is not given
DEFAULT_CONTEXTS = 8  # requests of full context length that it is meant to hold
FORMATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
Formats = tuple[torch.dtype, torch.dtype]  # of keys and of values


@dataclass(frozen=True)
class PagedCache:
    """Every layer's pages, and the tensors that hold them."""

    layers: KVCache
    written: tuple[torch.Tensor, ...]  # [P, ...], each page contiguous: what copying a page copies


def cache_formats(kv_dtype: str | None, config: Mapping[str, Any], dtype: torch.dtype) -> Formats:
    """The formats that `kv_dtype` names: one for both, or `keys:values`; else the checkpoint's; else `dtype`.

    Raises UserError for a name that is not known.
    """
    if kv_dtype is None:
        scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
        if not scheme:
            return dtype, dtype
        kv_dtype = _format_of(scheme)
    names = kv_dtype.split(":")
    for name in names:
        if name not in FORMATS or len(names) > 2:
            raise UserError(
                f"kv_dtype: {kv_dtype!r} is not a format; accepted: {', '.join(FORMATS)}, or two of them as "
                f"keys:values{nearest(name, FORMATS)}"
            )
    return FORMATS[names[0]], FORMATS[names[-1]]


def _format_of(scheme: Any) -> str:
    """The format that a checkpoint's kv_cache_scheme names (compressed-tensors)."""
    stated = dict(scheme) if isinstance(scheme, Mapping) else {}
    name = {"float8": "fp8", "int8": "int8"}.get(f"{stated.get('type')}{stated.get('num_bits')}")
    if name is None or not stated.get("symmetric", True):
        raise UserError(
            f"config.json: quantization_config.kv_cache_scheme {scheme!r} is not supported; supported: 8 bits, float "
            "or int, symmetric. kv_dtype chooses another format"
        )
    return name


def cache_bytes_per_token(layout: Sequence[CacheLayout], formats: Formats) -> int:
    keys, values = ((form.itemsize, 4 if form in LIMITS else 0) for form in formats)  # with a scale for each head
    return sum(
        layer.kv_heads * (layer.key_dim * keys[0] + keys[1] + layer.value_dim * values[0] + values[1])
        for layer in layout
    )


def default_cache_tokens(
    max_positions: int, layout: Sequence[CacheLayout], formats: Formats, device: torch.device
) -> int:
    """Some requests of full length, or what a share of the free memory holds if that is less."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    fitting = int(free * MEMORY_SHARE) // cache_bytes_per_token(layout, formats)
    return max(1, min(fitting, DEFAULT_CONTEXTS * max_positions))


def check_cache_fits(tokens: int, layout: Sequence[CacheLayout], formats: Formats, device: torch.device) -> None:
    """Raises UserError for a cache that the device could not hold: what is free of a GPU, all memory of a machine."""
    held = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().total
    need = tokens * cache_bytes_per_token(layout, formats)
    if need > held:
        raise UserError(
            f"a cache of {tokens} tokens needs {need / 2**30:.1f} GiB; the device has {held / 2**30:.1f} GiB, "
            f"for {held // cache_bytes_per_token(layout, formats)} tokens at most"
        )


def allocate_cache(
    layout: Sequence[CacheLayout],
    formats: Formats,
    pages: int,
    page_size: int,
    device: torch.device,
    checkpoint: Checkpoint,
) -> PagedCache:
    """Zeroed pages: masked slots are multiplied by 0, which a leftover NaN would survive.

    Quantized formats have the scales that the checkpoint gives (`k_scale`, `v_scale`), else one for each token and
    head. Raises UserError where latents would be quantized, or where a scale has a shape of its own.
    """
    if any(layer.latent for layer in layout):
        return _latent_cache(layout, formats, pages, page_size, device)
    sides = []
    for leaf, form in zip(("k_scale", "v_scale"), formats, strict=True):
        dims = [layer.key_dim if leaf == "k_scale" else layer.value_dim for layer in layout]
        tensors = tuple(
            _zeros((pages, page_size, layer.kv_heads, dim), form, device)
            for layer, dim in zip(layout, dims, strict=True)
        )
        scales = None
        if form in LIMITS:
            scales = tuple(
                _scales(checkpoint, f"{block_prefix(i)}self_attn.{leaf}", layer.kv_heads, pages, page_size, device)
                for i, layer in enumerate(layout)
            )
        sides.append((tensors, scales))
    (keys, key_scales), (values, value_scales) = sides
    cache = KVCache(keys, values, key_scales, value_scales)
    return PagedCache(cache, cache.written)


def _latent_cache(
    layout: Sequence[CacheLayout], formats: Formats, pages: int, page_size: int, device: torch.device
) -> PagedCache:
    """Latents and rotated keys of a token side by side, in one tensor for each layer."""
    form = formats[0]
    if form in LIMITS or formats[1] != form:
        raise UserError("kv_dtype: latents are kept in one floating-point format; accepted: float32, bfloat16, float16")
    joined = [_zeros((pages, page_size, 1, layer.key_dim + layer.value_dim), form, device) for layer in layout]
    split = [
        tensor.split((layer.key_dim, layer.value_dim), dim=3) for tensor, layer in zip(joined, layout, strict=True)
    ]
    return PagedCache(KVCache(tuple(s[0] for s in split), tuple(s[1] for s in split)), tuple(joined))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # numpy asks for zeroed memory that the system provides on first use, so unused pages cost nothing
    blank = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(blank).view(dtype).view(shape)


def _scales(
    checkpoint: Checkpoint, name: str, kv_heads: int, pages: int, page_size: int, device: torch.device
) -> torch.Tensor:
    """[P, S, K]: the checkpoint's, of a tensor or of each head, or zeros to be written with each token."""
    if name not in checkpoint:
        return _zeros((pages, page_size, kv_heads), torch.float32, device)
    scale = checkpoint.read(name).to(device).float().flatten()
    if len(scale) not in (1, kv_heads):
        raise UserError(f"{checkpoint.path}: {name} has {len(scale)} numbers; accepted: 1, or {kv_heads} (KV heads)")
    return static_scales(scale.expand(kv_heads), pages, page_size)
