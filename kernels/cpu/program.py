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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from compress.kernels.cpu.build import library
from compress.kernels.cpu.call import Call, noting

ALIGNMENT = 64  # bytes: a vector of the widest registers lies in one line of the cache


class NotRecordable(Exception):
    """torch computes something between the compiled kernels, which a replay would leave out."""


@dataclass(frozen=True)
class Program:
    output: torch.Tensor
    calls: tuple[Call, ...]
    addresses: ctypes.Array[ctypes.c_void_p]
    arena: Arena  # held for what the calls write

    def replay(self) -> torch.Tensor:
        """The output, in the same memory each time. Raises MemoryError as the kernels."""
        kernels = library()
        assert kernels is not None
        if kernels.compress_replay(self.addresses, ctypes.c_int64(len(self.calls))):
            raise MemoryError("no memory for a compiled kernel")
        return self.output


def record(function: Callable[[], torch.Tensor], arena: Arena) -> Program:
    """Run a function and note the kernels that it calls. Raises NotRecordable.

    The caller keeps what the function reads: weights, inputs, what calls point to. Programs of one arena lie in the
    same memory: an output is read before the next program is replayed.
    """
    recording = _Recording(arena, [])
    with noting(recording), _NothingElse():
        output = function()
    calls = tuple(recording.calls)
    addresses = (ctypes.c_void_p * len(calls))(*(ctypes.addressof(call) for call in calls))
    return Program(output, calls, addresses, arena)


class Arena:
    """Memory for what kernels write: a block is used again when no tensor lies in it any more."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._free: list[tuple[int, int]] = []  # bytes and index of blocks, smallest first
        self._returned: deque[int] = deque()  # blocks that are free since: a collection may add some at any moment

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = 4 * math.prod(shape)
        while self._returned:
            index = self._returned.popleft()
            insort(self._free, (self._blocks[index].nbytes, index))
        at = next((i for i, (held, _) in enumerate(self._free) if held >= size), None)
        if at is None:
            index = len(self._blocks)
            self._blocks.append(_aligned(size))
        else:
            index = self._free.pop(at)[1]
        numbers = self._blocks[index][:size].view(np.float32).reshape(shape)
        # torch holds this array for as long as a tensor, or a view of one, lies in it
        weakref.finalize(numbers, self._returned.append, index)
        return torch.from_numpy(numbers)


@dataclass(frozen=True)
class _Recording:
    arena: Arena
    calls: list[Call]

    def note(self, call: Call) -> None:
        self.calls.append(call)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        with _disable_current_modes():
            return self.arena.empty(shape)


def _aligned(size: int) -> np.ndarray:
    block = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size]


class _NothingElse(TorchDispatchMode):
    """Refuses what torch computes: all but looking at the same numbers in another shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        if not made or func._schema.is_mutable or any(leaf.untyped_storage().data_ptr() not in known for leaf in made):
            raise NotRecordable(str(func))
        return results
