"""The page tables and the work of a step where the GPU kernels read them: in one buffer, filled by one copy.

With a capacity the buffer has room for any step within it. Its addresses and the shapes of what lies in it, and so the
grids of all launches, stay the same when it is filled for another step: a CUDA graph that was captured with one step
runs the next.

Shapes: X items, Y reduced tokens, H heads, D head dim, B partial rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compress.kernels.attention_work import SHORT, Cut, PageTables, Room, plan_work, room_for, table_padding
from compress.kernels.queries import Capacity, PagedQueries

ALIGNMENT = 64  # numbers: Triton compiles a kernel anew for a pointer that is aligned otherwise


@dataclass(frozen=True)
class DeviceWork:
    """A Work on the device. Behind the step's own items and reductions there may be some of zeros, which do nothing."""

    items_X8: torch.Tensor
    reductions_Y5: torch.Tensor
    partial_rows: int


@dataclass(frozen=True)
class Partials:
    """Workspace of the splits, float32: weighted sums of values [B, H, D]; maximum and sum of the weights [B, H, 2]."""

    sums_BHD: torch.Tensor
    norms_BH2: torch.Tensor


def allocate_partials(rows: int, heads: int, head_dim: int, device: torch.device) -> Partials:
    return Partials(
        torch.empty((rows, heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((rows, heads, 2), dtype=torch.float32, device=device),
    )


class PackedWork:
    """The page tables and the work of some cuts. `device` may be meta."""

    def __init__(
        self, queries: PagedQueries, cuts: Sequence[Cut], device: torch.device, capacity: Capacity | None = None
    ) -> None:
        self._cuts = cuts
        self._rows = capacity.tokens if capacity else 0
        self._tables = PageTables()
        arrays, rooms = self._plan(queries)
        entries = len(arrays[0])
        if capacity is not None:
            entries = capacity.pages + capacity.requests * table_padding(queries.page_size)
            rooms = [room_for(capacity, cut, queries.page_size) for cut in cuts]
        shapes = [(entries,), *(shape for room in rooms for shape in ((room.items, 8), (room.reductions, 5)))]
        sizes = [-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes]
        self._staging = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sections = np.split(self._staging.numpy(), np.cumsum(sizes)[:-1])
        self._copied: torch.cuda.Event | None = None
        self.buffer = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        parts = [
            part[: math.prod(shape)].view(shape) for part, shape in zip(self.buffer.split(sizes), shapes, strict=True)
        ]
        self.table = parts[0]
        self.works = {
            cut: DeviceWork(parts[1 + 2 * i], parts[2 + 2 * i], room.partial_rows)
            for i, (cut, room) in enumerate(zip(cuts, rooms, strict=True))
        }
        self._fill(arrays)

    def update(self, queries: PagedQueries) -> None:
        """Another step, which is within the capacity."""
        self._fill(self._plan(queries)[0])

    def partials(self, heads: int, head_dim: int) -> Partials:
        """Workspace for the largest of the cuts: the launches of a layer take turns with it.

        Of each call: in a capture it is of the graphs' pool, which all layers and all graphs share.
        """
        rows = max((work.partial_rows for work in self.works.values()), default=0)
        return allocate_partials(rows, heads, head_dim, self.buffer.device)

    def _plan(self, queries: PagedQueries) -> tuple[list[np.ndarray], list[Room]]:
        table, starts_N = self._tables.flatten(queries)
        works = [plan_work(queries, starts_N, cut, self._rows) for cut in self._cuts]
        arrays = [array for work in works for array in (work.items_X8, work.reductions_Y5)]
        return [table, *arrays], [Room.of(work) for work in works]

    def _fill(self, arrays: Sequence[np.ndarray]) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the staging memory is still being read
        for section, array in zip(self._sections, arrays, strict=True):
            section[: array.size] = array.reshape(-1)
            section[array.size :] = 0
        self.buffer.copy_(self._staging, non_blocking=True)
        if self.buffer.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.buffer.device))


class StepPlan:
    """What is to be done in a step, for layers of one shape or several: planned when the first of a shape asks for it.

    With a capacity, that is the work of all its windows: one call before the capture of a graph makes all that the
    calls in it need.
    """

    def __init__(self, queries: PagedQueries, device: torch.device, capacity: Capacity | None) -> None:
        self.queries = queries
        self.capacity = capacity
        self._device = device
        self._packed: dict[tuple[Cut, ...], PackedWork] = {}
        lengths = (0, capacity.length) if capacity else queries.lengths
        self.kinds = tuple(sorted({length <= SHORT for length in lengths}, reverse=True))  # Cut.short of what may come

    def update(self, queries: PagedQueries) -> bool:
        if self.capacity is None or not self.capacity.fits(queries):
            return False
        for packed in self._packed.values():
            packed.update(queries)
        self.queries = queries
        return True

    def windows(self, window: int | None) -> tuple[int | None, ...]:
        """Those to plan with that of a layer. Raises ValueError for one that the capacity does not have."""
        if self.capacity is None:
            return (window,)
        if window not in self.capacity.windows:
            raise ValueError(f"window {window} is not among those of the capacity: {self.capacity.windows}")
        return self.capacity.windows

    def check_rows(self, rows: int) -> None:
        """Raises ValueError for another number of rows than the capacity's."""
        if self.capacity is not None and rows != self.capacity.tokens:
            raise ValueError(f"{rows} rows of queries; the capacity is of {self.capacity.tokens}")

    def packed(self, cuts: Sequence[Cut]) -> PackedWork:
        key = tuple(cuts)
        if key not in self._packed:
            self._packed[key] = PackedWork(self.queries, key, self._device, self.capacity)
        return self._packed[key]
