"""The model, its cache, and one forward pass over a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import torch

from compress.arch import ModelSpec, read_spec
from compress.checkpoint import Checkpoint, check_tensors
from compress.errors import UserError
from compress.kernels.attention import AttentionOptions, FullAttention
from compress.kernels.dispatch import path_of
from compress.kernels.kv import KVCache
from compress.runtime.batch import Batch
from compress.runtime.models.llama import Llama, load_llama

MEMORY_SHARE = 0.25  # of the free memory, at most, for the cache where its size is not given
DEFAULT_CONTEXTS = 8  # requests of full context length that it is meant to hold


class Executor:
    """Runs batches of paged requests, and whole sequences without a cache."""

    def __init__(self, model: Llama, cache: KVCache, page_size: int, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.page_size = page_size
        self.device = device

    def run(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's tokens into the cache; float32 logits [N, V] of `batch.logit_rows`."""
        operations = self.model.operations
        paged = operations.attention(batch.queries)

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            operations.store(k_TKD, v_TKD, self.cache, layer, batch.slots_T)
            return paged(q_THD, self.cache.layer(layer), AttentionOptions(window=self.model.spec.windows[layer]))

        hidden_TC = self.model.hidden(batch.ids_T, batch.positions_T, attend)
        rows = batch.logit_rows
        if len(rows) < len(hidden_TC):
            hidden_TC = hidden_TC[torch.tensor(rows, dtype=torch.long, device=self.device)]
        return self.model.logits(self.model.final_norm(hidden_TC))

    def hidden_states(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, C] after the final norm, in one causal pass."""
        sequences, length = ids_BS.shape
        full = FullAttention(sequences, length, self.device)

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            return full(q_THD, k_TKD, v_TKD, AttentionOptions(window=self.model.spec.windows[layer]))

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
    model = load_llama(checkpoint, spec, device, dtype, exact)
    tokens = max_tokens_in_cache or default_cache_tokens(spec, device, dtype)
    return Executor(model, allocate_cache(spec, -(-tokens // page_size), page_size, device, dtype), page_size, device)


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


def cache_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * dtype.itemsize


def default_cache_tokens(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> int:
    """Some requests of full length, or what a share of the free memory holds if that is less."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    fitting = int(free * MEMORY_SHARE) // cache_bytes_per_token(spec, dtype)
    return max(1, min(fitting, DEFAULT_CONTEXTS * spec.max_positions))


def allocate_cache(spec: ModelSpec, pages: int, page_size: int, device: torch.device, dtype: torch.dtype) -> KVCache:
    """Zeroed pages: masked slots are multiplied by 0, which a leftover NaN would survive."""
    shape = (pages, page_size, spec.kv_heads, spec.head_dim)

    def zeros() -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, device=device, dtype=dtype)
        # numpy asks for zeroed memory that the system provides on first use, so unused pages cost nothing
        blank = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(blank).view(dtype).view(shape)

    return KVCache(tuple(zeros() for _ in range(spec.layers)), tuple(zeros() for _ in range(spec.layers)))
