"""The model, its cache, and one forward pass over a batch.

Shapes: T tokens, N rows, C hidden, V vocabulary, B sequences, S length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from compress.arch import read_spec
from compress.checkpoint import Checkpoint, check_tensors
from compress.errors import UserError
from compress.kernels.dispatch import path_of
from compress.runtime.batch import Batch
from compress.runtime.cache import PagedCache, allocate_cache, cache_formats, check_cache_fits, default_cache_tokens
from compress.runtime.graphs import Replays, recorder_for
from compress.runtime.models.attend import full_attend, paged_attend, plan_attention
from compress.runtime.models.load import load_model
from compress.runtime.models.model import Model

LOGITS = 2**24  # numbers of a [N, V] tensor: what prompt log-probabilities are computed in at a time


class Executor:
    """Runs batches of paged requests, and whole sequences without a cache."""

    def __init__(self, model: Model, cache: PagedCache, page_size: int, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.page_size = page_size
        self.device = device
        self.replays = Replays(recorder_for(model, cache, page_size, device))

    def run(self, batch: Batch, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """Copy pages, then compute the batch's tokens into the cache; their hidden states [T, C] before the norm."""
        if copies:
            self.model.operations.copy_pages(self.cache, copies)
        replayed = self.replays.run(batch)
        if replayed is not None:
            return replayed
        attention = plan_attention(self.model, batch.queries)
        attend = paged_attend(self.model, self.cache.layers, attention, batch.slots_T)
        return self.model.hidden(self.model.inputs(batch.ids_T, batch.positions_T), attend)

    def logits(self, hidden_TC: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """float32 logits [N, V] of some of the tokens of `run`."""
        if len(rows) < len(hidden_TC):
            hidden_TC = hidden_TC[torch.tensor(rows, dtype=torch.long, device=self.device)]
        return self.model.logits(self.model.final_norm(hidden_TC))

    def logits_in_parts(self, hidden_TC: torch.Tensor, rows: Sequence[int]) -> Iterator[torch.Tensor]:
        """`logits`, of so few rows at a time that memory does not grow with their number."""
        size = max(1, LOGITS // self.model.spec.vocab)
        for first in range(0, len(rows), size):
            yield self.logits(hidden_TC, rows[first : first + size])

    def hidden_states(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, C] after the final norm, in one causal pass."""
        sequences, length = ids_BS.shape
        attend = full_attend(self.model, sequences, length, self.device)
        positions_T = torch.arange(length, device=self.device).repeat(sequences)
        hidden_TC = self.model.hidden(self.model.inputs(ids_BS.to(self.device).flatten(), positions_T), attend)
        return self.model.final_norm(hidden_TC).unflatten(0, (sequences, length))


def load_executor(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens_in_cache: int | None,
    page_size: int,
    exact: bool = False,
    kv_dtype: str | None = None,
) -> Executor:
    """Open, check and load a checkpoint. Raises UserError for one that is damaged or not supported."""
    check_kernels(device)
    checkpoint = Checkpoint.open(path)
    spec = read_spec(checkpoint.config, str(path / "config.json"))
    check_tensors(checkpoint, spec)
    formats = cache_formats(kv_dtype, checkpoint.config, dtype)
    model = load_model(checkpoint, spec, device, dtype, exact)
    tokens = max_tokens_in_cache or default_cache_tokens(spec.max_positions, model.cache_layout, formats, device)
    pages = -(-tokens // page_size)
    check_cache_fits(pages * page_size, model.cache_layout, formats, device)
    cache = allocate_cache(model.cache_layout, formats, pages, page_size, device, checkpoint)
    return Executor(model, cache, page_size, device)


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
