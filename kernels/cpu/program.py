"""A forward pass of the compiled kernels as a list of records, replayed by one call from Python.

What a step costs beside its kernels is Python: several calls a layer, each with its checks and its output's memory. A
program has been through all of it once. It holds for the tensors that it was recorded with: new inputs are written into
them. This is to a CPU what a CUDA graph is to a GPU.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compress.kernels.cpu.build import library
from compress.kernels.cpu.call import Call, noting

ALIGNMENT = 64  # bytes: a vector of the widest registers lies in one line of the cache
# what torch may do between the kernels: look at the same numbers in another shape
_ATEN = torch.ops.aten
VIEWS = frozenset(
    (
        _ATEN.alias, _ATEN.as_strided, _ATEN.detach, _ATEN.expand, _ATEN.permute, _ATEN.select, _ATEN.slice,
        _ATEN.split, _ATEN.split_with_sizes, _ATEN.squeeze, _ATEN.t, _ATEN.transpose, _ATEN.unbind, _ATEN.unsqueeze,
        _ATEN.view,
    )
)  # fmt: skip


class NotRecordable(Exception):
    """torch computes something between the compiled kernels, which a replay would leave out."""


@dataclass(frozen=True)
class Program:
    output: torch.Tensor
    calls: tuple[Call, ...]
    addresses: ctypes.Array[ctypes.c_void_p]
    memory: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.memory)

    def replay(self) -> torch.Tensor:
        """The output, in the same memory each time. Raises MemoryError as the kernels."""
        kernels = library()
        assert kernels is not None
        if kernels.compress_replay(self.addresses, ctypes.c_int64(len(self.calls))):
            raise MemoryError("no memory for a compiled kernel")
        return self.output


def record(function: Callable[[], torch.Tensor]) -> Program:
    """Run a function and note the kernels that it calls. Raises NotRecordable.

    The caller keeps what the function reads: weights, inputs, the records that calls point to.
    """
    recording = _Recording()
    with noting(recording), _NothingElse():
        output = function()
    calls = tuple(recording.calls)
    addresses = (ctypes.c_void_p * len(calls))(*(ctypes.addressof(call) for call in calls))
    return Program(output, calls, addresses, tuple(recording.blocks))


class _Recording:
    """The calls, and memory for their outputs: a block is used again when no tensor lies in it any more."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.blocks: list[np.ndarray] = []
        self._free: list[tuple[int, int]] = []  # bytes and index of blocks, smallest first

    def note(self, call: Call) -> None:
        self.calls.append(call)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = 4 * math.prod(shape)
        at = next((i for i, (held, _) in enumerate(self._free) if held >= size), None)
        if at is None:
            index = len(self.blocks)
            self.blocks.append(_aligned(size))
        else:
            index = self._free.pop(at)[1]
        numbers = self.blocks[index][:size].view(np.float32).reshape(shape)
        # torch holds this array for as long as a tensor, or a view of one, lies in it
        weakref.finalize(numbers, insort, self._free, (self.blocks[index].nbytes, index))
        return torch.from_numpy(numbers)


def _aligned(size: int) -> np.ndarray:
    block = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size]


class _NothingElse(TorchDispatchMode):
    """Refuses every computation by torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in VIEWS:
            raise NotRecordable(str(func))
        return func(*args, **(kwargs or {}))
