"""Calls of the compiled kernels: records of program.h, run at once, and noted where a program is being recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from compress.kernels.cpu.build import library
from compress.kernels.cpu.isa import ISAS, Isa

LINEAR, NORM, HEAD_NORM, GATE, ROTATE, STORE, ATTENTION = range(7)


class Call(ctypes.Structure):
    """The head of each record."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("operation", "isa", "threads", "variant"))


class Recorder(Protocol):
    """What notes the calls made while it is set."""

    def note(self, call: Call) -> None: ...

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor: ...


_recorder: ContextVar[Recorder | None] = ContextVar("recorder of calls", default=None)


@contextmanager
def noting(recorder: Recorder) -> Iterator[None]:
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def empty(*shape: int) -> torch.Tensor:
    """A float32 tensor for a kernel to write: where a program is recorded, in memory that the program keeps."""
    recorder = _recorder.get()
    return torch.empty(shape) if recorder is None else recorder.empty(shape)


def head(operation: int, isa: Isa, variant: int = 0) -> tuple[int, int, int, int]:
    return operation, ISAS.index(isa), torch.get_num_threads(), variant


def run(call: Call) -> None:
    """The caller holds what the record points to. Raises MemoryError where the kernel's own memory cannot be had."""
    kernels = library()
    assert kernels is not None, "prepared with the compiled kernels"
    if kernels.compress_call(ctypes.byref(call)):
        raise MemoryError("no memory for a compiled kernel")
    recorder = _recorder.get()
    if recorder is not None:
        recorder.note(call)


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor's first number, NULL for None."""
    return None if tensor is None else tensor.data_ptr()
