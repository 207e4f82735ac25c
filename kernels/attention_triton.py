"""Paged attention on a GPU: prefill, decode and verification of drafts in one kernel, and the reduction of its splits.

Shapes: T tokens, H query heads, K KV heads, D head dim, P pages, S slots of a page, B partial rows.
"""

from __future__ import annotations

import math

import torch
import triton

from compress.kernels.attention_kernel_triton import attend_kernel, reduce_kernel
from compress.kernels.attention_plan import DeviceWork, Partials, StepPlan
from compress.kernels.attention_work import REDUCED, Cut, Tile
from compress.kernels.kv import Pages
from compress.kernels.launch import Launch, Target, run, strides, target_of, unit_stride
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries

LOG2E = math.log2(math.e)


def choose_tile(q_THD: torch.Tensor, pages: Pages, target: Target, short: bool) -> Tile:
    """By head dim, formats and target alone: what the requests are like must not change it, beyond being short."""
    dims = triton.next_power_of_2(q_THD.shape[2])
    width = max(pages.keys_PSKD.itemsize, pages.values_PSKD.itemsize)
    group_rows = int(triton.next_power_of_2(q_THD.shape[1] // pages.keys_PSKD.shape[2]))
    if q_THD.dtype == torch.float32:
        rows = max(16, group_rows)
        return Tile(rows, keys=16 if dims > 64 else 32, warps=8 if rows * dims > 16 * 64 else 4, stages=2)
    if short:
        rows = max(16, group_rows)
        # a tile of bytes in flight is as large as one of 16 bits; float16 takes more registers to scale values
        wide = dims <= 64 or (dims <= 128 and width == 1 and q_THD.dtype == torch.bfloat16)
        keys = 64 if wide and target.backend == "cuda" else 32
        return Tile(rows, keys, warps=4 if rows * dims <= 64 * 128 else 8, stages=3)
    rows = max(64, group_rows)
    # the matrix units of sm_90 and sm_100 read their operands from shared memory: registers are left for 64 keys
    keys = 64 if dims <= 64 or (dims <= 128 and target.arch in (90, 100)) else 32
    return Tile(rows, keys, warps=4 if rows * dims <= 64 * 128 and width > 1 else 8, stages=2)


def plan_attention(
    q_THD: torch.Tensor,
    pages: Pages,
    options: AttentionOptions,
    work: DeviceWork,
    table: torch.Tensor,
    tile: Tile,
    out_THD: torch.Tensor,
    partials: Partials,
    target: Target,
) -> list[Launch]:
    """The attention of the requests of one kind, and the reduction where any of them is split.

    Rows of `out_THD` that belong to no request are left as they are.
    """
    kv_heads, head_dim = pages.keys_PSKD.shape[2:]
    scale = head_dim**-0.5 if options.scale is None else options.scale
    cap = options.soft_cap
    key_scales, value_scales = pages.key_scales_PSK, pages.value_scales_PSK
    attend = Launch(
        attend_kernel,
        (len(work.items_X8) * kv_heads,),
        {
            "items": work.items_X8,
            "table": table,
            "queries": q_THD,
            "keys": readable(pages.keys_PSKD, target),
            "values": readable(pages.values_PSKD, target),
            "key_scales": key_scales,
            "value_scales": value_scales,
            "sinks": options.sinks_H,
            "out": out_THD,
            "partial_sums": partials.sums_BHD,
            "partial_norms": partials.norms_BH2,
            # tanh(x) = 1 − 2 / (2^(2x·log₂e) + 1)
            "score_scale": scale * LOG2E if cap is None else 2 * LOG2E * scale / cap,
            "cap": 0.0 if cap is None else cap * LOG2E,
            "window": options.window or 0,
            "kv_heads": kv_heads,
            **strides("query", q_THD, "th"),
            **strides("key", pages.keys_PSKD, "psh"),
            **strides("value", pages.values_PSKD, "psh"),
            **strides("key_scale", key_scales, "psh"),
            **strides("value_scale", value_scales, "psh"),
            **strides("out", out_THD, "th"),
            "GROUP": q_THD.shape[1] // kv_heads,
            "HEAD_DIM": head_dim,
            "DIMS": triton.next_power_of_2(head_dim),
            "PAGE_BITS": pages.keys_PSKD.shape[1].bit_length() - 1,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "KEY_SCALED": key_scales is not None,
            "VALUE_SCALED": value_scales is not None,
            "WINDOWED": options.window is not None,
            "CAPPED": cap is not None,
            "SINKS": options.sinks_H is not None,
            # NVIDIA's float32 units would need all of D in registers; three TF32 products keep 22 bits
            "PRECISION": "tf32x3" if target.backend == "cuda" else "ieee",
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not work.partial_rows:
        return [attend]
    return [attend, plan_reduction(work, partials, options.sinks_H, out_THD)]


def plan_reduction(work: DeviceWork, partials: Partials, sinks_H: torch.Tensor | None, out_THD: torch.Tensor) -> Launch:
    _, heads, head_dim = out_THD.shape
    return Launch(
        reduce_kernel,
        (len(work.reductions_Y5) * heads,),
        {
            "reductions": work.reductions_Y5,
            "partial_sums": partials.sums_BHD,
            "partial_norms": partials.norms_BH2,
            "sinks": sinks_H,
            "out": out_THD,
            "heads": heads,
            **strides("out", out_THD, "th"),
            "HEAD_DIM": head_dim,
            "DIMS": triton.next_power_of_2(head_dim),
            "SPLITS": REDUCED,
            "SINKS": sinks_H is not None,
        },
    )


def readable(pages: torch.Tensor, target: Target) -> torch.Tensor:
    """Pages in a dtype that the target's compiler knows."""
    if pages.dtype == torch.float8_e4m3fn and not target.native_e4m3:
        return pages.view(torch.uint8)
    return pages


class PagedAttentionTriton:
    """Attention of one step: what is to be done goes to the device once, and is used by every layer."""

    def __init__(self, queries: PagedQueries, device: torch.device, capacity: Capacity | None = None) -> None:
        self._target = target_of(device)
        self._step = StepPlan(queries, device, capacity)

    def update(self, queries: PagedQueries) -> bool:
        """As `operations.Attention`."""
        return self._step.update(queries)

    def __call__(self, q_THD: torch.Tensor, pages: Pages, options: AttentionOptions) -> torch.Tensor:
        """[T, H, D] in the dtype of q. With a capacity, T is its tokens and the window one of its windows."""
        self._step.check_rows(len(q_THD))
        q_THD = unit_stride(q_THD)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        group = q_THD.shape[1] // pages.keys_PSKD.shape[2]
        tiles = {short: choose_tile(q_THD, pages, self._target, short) for short in self._step.kinds}
        cuts = {
            window: {short: Cut(window, tile.rows // group, tile.keys, short) for short, tile in tiles.items()}
            for window in self._step.windows(options.window)
        }
        packed = self._step.packed([cut for of_window in cuts.values() for cut in of_window.values()])
        partials = packed.partials(*q_THD.shape[1:])
        for short, cut in cuts[options.window].items():
            arguments = (packed.works[cut], packed.table, tiles[short], out_THD, partials, self._target)
            run(plan_attention(q_THD, pages, options, *arguments))
        return out_THD
