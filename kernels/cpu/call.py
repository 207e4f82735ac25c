"""Arguments of the compiled kernels as ctypes values."""

from __future__ import annotations

import ctypes

import torch

Pointer = ctypes.c_void_p
Size = ctypes.c_int64
Float = ctypes.c_float


def pointer(tensor: torch.Tensor | None) -> Pointer:
    """The address of a tensor's first number, NULL for None. The caller holds the tensor through the call."""
    return Pointer(None if tensor is None else tensor.data_ptr())
