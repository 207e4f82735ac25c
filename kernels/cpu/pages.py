"""Pages of keys or of values as the compiled kernels read and write them.

Shapes: as kv.py.
"""

from __future__ import annotations

import ctypes

import torch

from compress.kernels.cpu.call import pointer

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


class CompiledPages(ctypes.Structure):
    """Cache of attention_problem.h: strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("page", "slot", "head", "scale_page", "scale_slot", "scale_head", "type")
        ),
    )


def readable(pages_PSKD: torch.Tensor) -> bool:
    return pages_PSKD.dtype in _TYPES and pages_PSKD.stride(3) == 1


def page_record(pages_PSKD: torch.Tensor, scales_PSK: torch.Tensor | None) -> CompiledPages:
    """The caller holds the tensors."""
    scale_strides = scales_PSK.stride() if scales_PSK is not None else (0, 0, 0)
    return CompiledPages(
        pages_PSKD.data_ptr(), pointer(scales_PSK), *pages_PSKD.stride()[:3], *scale_strides, _TYPES[pages_PSKD.dtype]
    )
