"""The model, its cache, and one forward pass over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch

from compress.arch import ModelSpec, read_spec
from compress.checkpoint import Checkpoint, check_tensors
from compress.errors import UserError
from compress.kernels.dispatch import path_of
from compress.kernels.kv import KVCache
from compress.runtime.batch import Batch
from compress.runtime.models.attend import full_attend, paged_attend
from compress.runtime.models.load import load_model
from compress.runtime.models.model import CacheLayout, Model

MEMORY_SHARE = 0.25  # of the free memory, at most, for the cache where its size is not given
DEFAULT_CONTEXTS = 8  # requests of full context length that it is meant to hold


class Executor:
    """Runs batches of paged requests, and whole sequences without a cache."""

    def __init__(self, model: Model, cache: KVCache, page_size: int, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.page_size = page_size
        self.device = device

    def run(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's tokens into the cache; float32 logits [N, V] of `batch.logit_rows`."""
        attend = paged_attend(self.model, self.cache, batch.queries, batch.slots_T)
        hidden_TC = self.model.hidden(batch.ids_T, batch.positions_T, attend)
        rows = batch.logit_rows
        if len(rows) < len(hidden_TC):
            hidden_TC = hidden_TC[torch.tensor(rows, dtype=torch.long, device=self.device)]
        return self.model.logits(self.model.final_norm(hidden_TC))

    def hidden_states(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, C] after the final norm, in one causal pass."""
        sequences, length = ids_BS.shape
        attend = full_attend(self.model, sequences, length, self.device)
        positions_T = torch.arange(length, device=self.device).repeat(sequences)
        hidden_TC = self.model.hidden(ids_BS.to(self.device).flatten(), positions_T, attend)
        return self.model.final_norm(hidden_TC).unflatten(0, (sequences, length))


def load_executor(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens_in_cache: int | None,
    page_size: int,
    exact: bool = False,
) -> Executor:
    """Open, check and load a checkpoint. Raises UserError for one that is damaged or not supported."""
    check_kernels(device)
    checkpoint = Checkpoint.open(path)
    spec = read_spec(checkpoint.config, str(path / "config.json"))
    check_tensors(checkpoint, spec)
    model = load_model(checkpoint, spec, device, dtype, exact)
    layout = model.cache_layout
    tokens = max_tokens_in_cache or default_cache_tokens(spec, layout, device, dtype)
    return Executor(model, allocate_cache(layout, -(-tokens // page_size), page_size, device, dtype), page_size, device)


def check_kernels(device: torch.device) -> None:
    """Raises UserError for kernels that are asked for by COMPRESS_KERNELS and cannot run here."""
    try:
        path_of(device)
    except ValueError as error:
        raise UserError(str(error)) from None


def find_device(name: str) -> torch.device:
    """Raises UserError for a device that torch does not know or this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device: {name!r} is not a device; accepted: cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device: {name!r} is not supported; accepted: cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {name!r} is not available; this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def cache_bytes_per_token(layout: Sequence[CacheLayout], dtype: torch.dtype) -> int:
    return sum(layer.numbers for layer in layout) * dtype.itemsize


def default_cache_tokens(
    spec: ModelSpec, layout: Sequence[CacheLayout], device: torch.device, dtype: torch.dtype
) -> int:
    """Some requests of full length, or what a share of the free memory holds if that is less."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    fitting = int(free * MEMORY_SHARE) // cache_bytes_per_token(layout, dtype)
    return max(1, min(fitting, DEFAULT_CONTEXTS * spec.max_positions))


def allocate_cache(
    layout: Sequence[CacheLayout], pages: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> KVCache:
    """Zeroed pages: masked slots are multiplied by 0, which a leftover NaN would survive."""

    def zeros(heads: int, dim: int) -> torch.Tensor:
        shape = (pages, page_size, heads, dim)
        if device.type != "cpu":
            return torch.zeros(shape, device=device, dtype=dtype)
        # numpy asks for zeroed memory that the system provides on first use, so unused pages cost nothing
        blank = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(blank).view(dtype).view(shape)

    def layer_pages(layer: CacheLayout) -> tuple[torch.Tensor, torch.Tensor]:
        if not layer.latent:
            return zeros(layer.kv_heads, layer.key_dim), zeros(layer.kv_heads, layer.value_dim)
        latents, keys = zeros(1, layer.key_dim + layer.value_dim).split((layer.key_dim, layer.value_dim), dim=3)
        return latents, keys

    keys, values = zip(*map(layer_pages, layout), strict=True)
    return KVCache(keys, values)
