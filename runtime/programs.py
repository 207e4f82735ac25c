"""Steps as programs of a CPU's compiled kernels: one for each number of tokens, whatever requests they belong to.

Shapes: T tokens, C hidden.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from compress.kernels.cpu.program import Arena, Program, record
from compress.kernels.operations import Attention, LatentAttention
from compress.runtime.batch import Batch
from compress.runtime.cache import PagedCache
from compress.runtime.models.attend import paged_attend, plan_attention
from compress.runtime.models.model import Inputs, Model

MAX_TOKENS = 64  # of a step: for more of them, what Python costs is lost in the work


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
        return (batch.tokens, torch.get_num_threads()) if batch.tokens <= MAX_TOKENS else None

    def record(self, batch: Batch) -> tuple[RecordedProgram, torch.Tensor]:
        inputs = self._model.inputs(batch.ids_T, batch.positions_T)
        slots_T = batch.slots_T.clone()
        attention = plan_attention(self._model, batch.queries)
        attend = paged_attend(self._model, self._cache.layers, attention, slots_T)
        program = record(lambda: self._model.hidden(inputs, attend), self._arena)
        return RecordedProgram(inputs, slots_T, attention, program, self._model), program.output.clone()
