"""Paged attention by the compiled kernel (attention.h).

Float32 arithmetic over pages of any format. A token's result depends on its own keys alone, in their order: not on the
batch, on how its prompt was cut into chunks, on the number of threads or the instruction set.

Shapes: as attention.py.
"""

from __future__ import annotations

import ctypes
import math
from itertools import chain

import numpy as np
import torch

from compress.kernels.attention import PagedAttention
from compress.kernels.cpu.call import ATTENTION, Call, empty, head, pointer, run
from compress.kernels.cpu.isa import Isa
from compress.kernels.cpu.pages import CompiledPages, page_record, readable
from compress.kernels.kv import Pages
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries

MAX_DIM = 576
LANES = 16


class _Request(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("token", "length", "context", "table"))


class _Batch(ctypes.Structure):
    _fields_ = (("requests", ctypes.c_void_p), ("pages", ctypes.c_void_p), ("count", ctypes.c_int64))


class _Problem(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_token", ctypes.c_int64),
        ("q_head", ctypes.c_int64),
        ("keys", CompiledPages),
        ("values", CompiledPages),
        ("batch", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "page_size", "window")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class _AttentionCall(Call):
    _fields_ = (("problem", _Problem),)


class CompiledAttention:
    """Attention of one step: the batch's tables are laid out once, and serve every layer."""

    def __init__(self, queries: PagedQueries, isa: Isa, capacity: Capacity | None = None) -> None:
        self._isa: Isa = isa
        self._capacity = capacity
        self._batch = _Batch()  # what each layer's call points to: a replay of the call sees the next step's tables
        self.update(queries)

    def update(self, queries: PagedQueries) -> bool:
        """Plan another step for the calls that are already recorded. Without a capacity, any."""
        if self._capacity is not None and not self._capacity.fits(queries):
            return False
        requests, token, table = [], 0, 0
        for length, context, pages in zip(queries.lengths, queries.contexts, queries.tables, strict=True):
            requests.append((token, length, context, table))
            token += length
            table += len(pages)
        self._queries = queries
        self._rows = token
        self._requests = np.array(requests, dtype=np.int64).reshape(-1, len(_Request._fields_))
        self._pages = np.fromiter(chain.from_iterable(queries.tables), dtype=np.int32, count=table)
        self._batch.requests, self._batch.pages = self._requests.ctypes.data, self._pages.ctypes.data
        self._batch.count = len(requests)
        return True

    def __call__(self, q_THD: torch.Tensor, pages: Pages, options: AttentionOptions) -> torch.Tensor:
        """[T, H, D], as PagedAttention; what the kernel does not take goes there."""
        heads, dim = q_THD.shape[1:]
        plain = q_THD.dtype == torch.float32 and q_THD.stride(2) == 1
        alike = pages.keys_PSKD.shape[2:] == pages.values_PSKD.shape[2:] and pages.keys_PSKD.shape[3] == dim
        known = readable(pages.keys_PSKD) and readable(pages.values_PSKD)
        if not (plain and alike and known) or dim > MAX_DIM or dim % LANES:
            return PagedAttention(self._queries)(q_THD, pages, options)
        out_THD = empty(*q_THD.shape)
        sinks_H = None if options.sinks_H is None else options.sinks_H.float().contiguous()
        problem = _Problem(
            q=q_THD.data_ptr(),
            out=out_THD.data_ptr(),
            q_token=q_THD.stride(0),
            q_head=q_THD.stride(1),
            keys=page_record(pages.keys_PSKD, pages.key_scales_PSK),
            values=page_record(pages.values_PSKD, pages.value_scales_PSK),
            batch=ctypes.addressof(self._batch),
            sinks=pointer(sinks_H),
            heads=heads,
            kv_heads=pages.keys_PSKD.shape[2],
            dim=dim,
            page_size=self._queries.page_size,
            window=options.window or 0,
            scale=1 / math.sqrt(dim) if options.scale is None else options.scale,
            soft_cap=options.soft_cap or 0.0,
        )
        run(_AttentionCall(*head(ATTENTION, self._isa), problem))
        if self._rows < len(out_THD):
            out_THD[self._rows :] = 0  # rows of no request
        return out_THD
