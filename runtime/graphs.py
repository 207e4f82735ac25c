"""Steps of few tokens, recorded once and replayed with new inputs in the same memory.

What such a step costs beside its kernels is the launching of them. On a CPU a recording is a program of the compiled
kernels, for a number of tokens. Steps that no recording fits are computed as they come.

Shapes: T tokens, C hidden.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from compress.kernels.cpu.program import Arena, NotRecordable, Program, record
from compress.kernels.operations import Attention, LatentAttention
from compress.runtime.batch import Batch
from compress.runtime.cache import PagedCache
from compress.runtime.models.attend import paged_attend, plan_attention
from compress.runtime.models.model import Inputs, Model

MAX_TOKENS = 64  # of a step: for more of them, what launching costs is lost in the work
KEPT = 64  # recordings
REPEATS = 2  # the step of a kind that is recorded: many a number of tokens comes once

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


@dataclass(frozen=True)
class RecordedProgram:
    inputs: Inputs
    slots_T: torch.Tensor
    attention: Attention | LatentAttention
    program: Program
    model: Model

    def replay(self, batch: Batch) -> torch.Tensor:
        inputs = self.model.inputs(batch.ids_T, batch.positions_T)
        for held, new in zip(self.inputs.tensors, inputs.tensors, strict=True):
            held.copy_(new)
        self.slots_T.copy_(batch.slots_T)
        self.attention.update(batch.queries)
        return self.program.replay().clone()


class ProgramRecorder:
    """Programs of a CPU's compiled kernels: one for each number of tokens, whatever requests they belong to."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._arena = Arena()

    def kind(self, batch: Batch) -> Hashable | None:
        tokens = len(batch.ids_T)
        return (tokens, torch.get_num_threads()) if tokens <= MAX_TOKENS else None

    def record(self, batch: Batch) -> tuple[RecordedProgram, torch.Tensor]:
        inputs = self._model.inputs(batch.ids_T, batch.positions_T)
        slots_T = batch.slots_T.clone()
        attention = plan_attention(self._model, batch.queries)
        attend = paged_attend(self._model, self._cache.layers, attention, slots_T)
        program = record(lambda: self._model.hidden(inputs, attend), self._arena)
        return RecordedProgram(inputs, slots_T, attention, program, self._model), program.output.clone()


def recorder_for(model: Model, cache: PagedCache, device: torch.device) -> Recorder | None:
    """What records on a device; None where nothing does."""
    return ProgramRecorder(model, cache) if device.type == "cpu" and model.replayable else None
