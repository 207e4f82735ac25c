"""Steps as CUDA graphs: decoding and verification, for so many requests, new tokens of each, and so long a past.

A graph is captured for numbers a little larger than the batch's. The rows behind the batch's own belong to nobody:
their keys go nowhere, and what is computed for them is not looked at.

Shapes: T tokens of the batch, M rows of the graph, C hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from compress.kernels.operations import Attention, LatentAttention
from compress.kernels.queries import Capacity, count_pages
from compress.runtime.batch import Batch
from compress.runtime.cache import PagedCache
from compress.runtime.models.attend import paged_attend, plan_attention
from compress.runtime.models.model import Model

MAX_LENGTH = 8  # new tokens of a request: as many as attention takes for decoding, not for a prompt
MAX_REQUESTS = 256
LEAST_CONTEXT = 512  # the keys of a split: up to here there is nothing to reduce
NOWHERE = -1  # the slot of a row that belongs to nobody

Captured = tuple[Callable[[], None], torch.Tensor]  # how to run again, and where the output is


@dataclass(frozen=True)
class CudaGraph:
    rows_3M: torch.Tensor
    attention: Attention | LatentAttention
    run: Callable[[], None]
    output_MC: torch.Tensor

    def replay(self, batch: Batch) -> torch.Tensor:
        _fill(self.rows_3M, batch)
        if not self.attention.update(batch.queries):
            raise AssertionError("a graph is chosen by its capacity")
        self.run()
        return self.output_MC[: batch.tokens].clone()


class CudaRecorder:
    """Captures a model's steps. `capture` runs a function so that it can be run again on the same memory."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        page_size: int,
        capture: Callable[[Callable[[], torch.Tensor]], Captured] | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._page_size = page_size
        self._capture = capture or CudaCapture()
        self._windows = tuple(dict.fromkeys(options.window for options in model.attention))

    def kind(self, batch: Batch) -> Hashable | None:
        return self.capacity(batch)

    def capacity(self, batch: Batch) -> Capacity | None:
        """What a graph for the batch is captured for; None for one with a prompt, or with too many requests."""
        queries = batch.queries
        length, requests = max(queries.lengths), len(queries.lengths)
        if length > MAX_LENGTH or requests > MAX_REQUESTS:
            return None
        requests = requests if requests <= 2 else 4 if requests <= 4 else -(-requests // 8) * 8
        context = max(LEAST_CONTEXT, 1 << (max(queries.contexts) - 1).bit_length())
        return Capacity(requests, length, context, requests * count_pages(context, self._page_size), self._windows)

    def record(self, batch: Batch) -> tuple[CudaGraph, torch.Tensor]:
        capacity = self.capacity(batch)
        assert capacity is not None
        rows_3M = torch.zeros((3, capacity.tokens), dtype=torch.int64, device=batch.rows_3T.device)
        _fill(rows_3M, batch)
        ids_M, positions_M, slots_M = rows_3M
        attention = plan_attention(self._model, batch.queries, capacity)
        attend = paged_attend(self._model, self._cache.layers, attention, slots_M)

        def forward() -> torch.Tensor:
            return self._model.hidden(self._model.inputs(ids_M, positions_M), attend)

        forward()  # what a capture cannot do is done: kernels are compiled, workspaces exist
        run, output_MC = self._capture(forward)
        graph = CudaGraph(rows_3M, attention, run, output_MC)
        return graph, graph.replay(batch)


def _fill(rows_3M: torch.Tensor, batch: Batch) -> None:
    rows_3M[:, : batch.tokens] = batch.rows_3T
    rows_3M[2, batch.tokens :] = NOWHERE


class CudaCapture:
    """Graphs that share one pool of memory: they run one after the other, and their outputs are copied away at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function()
        return graph.replay, output
