"""Steps of few tokens, recorded once and replayed with new inputs in the same memory.

What such a step costs beside its kernels is the launching of them. A recording is a program of the compiled kernels on
a CPU, a CUDA graph on a GPU. Steps that no recording fits are computed as they come.

Shapes: T tokens, C hidden.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Protocol

import torch

from compress.kernels.cpu.program import NotRecordable
from compress.kernels.dispatch import path_of
from compress.runtime.batch import Batch
from compress.runtime.cache import PagedCache
from compress.runtime.cuda_graphs import CudaRecorder
from compress.runtime.models.model import Model
from compress.runtime.programs import ProgramRecorder

KEPT = 64  # recordings
REPEATS = 2  # the step of a kind that is recorded: many a kind comes once. What the kernels need exists by then

log = logging.getLogger(__name__)


class Recorded(Protocol):
    def replay(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, C] of the batch, before the final norm; its tokens are in the cache."""
        ...


class Recorder(Protocol):
    def kind(self, batch: Batch) -> Hashable | None:
        """What batches have in common that one recording is good for; None for a batch that cannot be recorded."""
        ...

    def record(self, batch: Batch) -> tuple[Recorded, torch.Tensor]:
        """A recording, and what it gave for this batch. Raises NotRecordable."""
        ...


class Replays:
    """The recordings of one model and cache, the least recently used ones dropped."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.steps = 0  # that were replayed
        self._recorder = recorder
        self._seen: Counter[Hashable] = Counter()
        self._kept: OrderedDict[Hashable, Recorded] = OrderedDict()

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Hidden states [T, C] before the final norm; None for a step that is to be computed without a recording."""
        kind = self._recorder.kind(batch) if self._recorder is not None else None
        if self._recorder is None or kind is None:
            return None
        recorded = self._kept.get(kind)
        if recorded is not None:
            self._kept.move_to_end(kind)
            self.steps += 1
            return recorded.replay(batch)
        self._seen[kind] += 1
        if self._seen[kind] < REPEATS:
            return None
        try:
            recorded, hidden_TC = self._recorder.record(batch)
        except NotRecordable as reason:
            log.debug("steps are not replayed: %s", reason)
            self._recorder = None
            return None
        self._kept[kind] = recorded
        if len(self._kept) > KEPT:
            dropped, _ = self._kept.popitem(last=False)
            del self._seen[dropped]
        return hidden_TC


def recorder_for(model: Model, cache: PagedCache, page_size: int, device: torch.device) -> Recorder | None:
    """What records on a device; None for a model whose steps are not alike, and for kernels that plan on the host."""
    if not model.replayable:
        return None
    if device.type == "cpu":
        return ProgramRecorder(model, cache)
    return CudaRecorder(model, cache, page_size) if path_of(device).kind == "triton" else None
