"""Storing keys and values by the compiled kernel (store.c), in pages of any format.

Shapes: as kv.py.
"""

from __future__ import annotations

import ctypes

import torch

from compress.kernels import kv
from compress.kernels.cpu.call import STORE, Call, head, run
from compress.kernels.cpu.isa import Isa
from compress.kernels.cpu.pages import CompiledPages, page_record, readable
from compress.kernels.kv import KVCache, is_static


class _StoreCall(Call):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("pages", CompiledPages),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride", "page_size", "tokens", "heads", "dim")),
    )


def store(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: KVCache, layer: int, slots_T: torch.Tensor, isa: Isa
) -> None:
    """As kv.store."""
    pages = cache.layer(layer)
    pairs = ((k_TKD, pages.keys_PSKD, pages.key_scales_PSK), (v_TKD, pages.values_PSKD, pages.value_scales_PSK))
    plain = all(x.dtype == torch.float32 and x.stride(-1) == 1 and readable(stored) for x, stored, _ in pairs)
    fits = all(x.shape[0] == len(slots_T) and x.shape[1:] == stored.shape[2:] for x, stored, _ in pairs)
    if not (plain and fits and slots_T.dtype == torch.int64 and slots_T.is_contiguous()):
        kv.store(k_TKD, v_TKD, cache, layer, slots_T)
        return
    for x_TKD, pages_PSKD, scales_PSK in pairs:
        static = scales_PSK is not None and is_static(scales_PSK)
        run(_StoreCall(
            *head(STORE, isa, int(static)), x_TKD.data_ptr(), slots_T.data_ptr(), page_record(pages_PSKD, scales_PSK),
            *x_TKD.stride()[:2], pages_PSKD.shape[1], *x_TKD.shape,
        ))  # fmt: skip
