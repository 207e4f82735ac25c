"""AWQ scaling of a block: which producer takes which scale, and folding it in so that the block's function stays.

Shapes: I input features of the linears of a tap, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compress.arch import ModelSpec, Tap
from compress.blockwise import Block
from compress.flow import Observation
from compress.quant.awq import search_scale
from compress.quant.scheme import Scheme


def scale_tap(
    block: Block, found: Observation, schemes: Mapping[str, Scheme], scale_dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Search the scale of one tap and fold it into the block's weights; returns it [I], and the record for the report.

    Ones are returned where no scale is applied: the search found none that helps on held-out tokens, or a linear that
    would have to change is to stay as it is.
    """
    tap, spec = found.tap, block.spec
    ones_I = torch.ones_like(found.statistics.abs_sum_I)
    record: dict[str, Any] = {"name": f"{block.prefix}{tap.producer} -> {', '.join(tap.linears)}"}
    touched = [*tap.linears, *([tap.producer] if _is_linear(block, tap.producer) else [])]
    kept = [name for name in touched if block.prefix + name not in schemes]
    if kept:
        return ones_I, record | {"applied": False, "reason": f"{kept[0]} is not quantized and stays as it is"}
    tied = (spec.heads, spec.kv_heads, spec.head_dim) if tap.name == "attention_output" else None
    weights = [block.weights[f"{linear}.weight"] for linear in tap.linears]
    scheme = schemes[block.prefix + tap.linears[0]]
    result = search_scale(weights, found.statistics, found.held_out, scheme, scale_dtype, group_tied=tied)
    record |= {
        "applied": result.applied,
        "reason": result.reason,
        "ratio": result.ratio,
        "error_before": result.error_before,
        "error_after": result.error_after,
    }
    return (fold(block, tap, result.scale_I) if result.applied else ones_I), record


def fold(block: Block, tap: Tap, scale_I: torch.Tensor) -> torch.Tensor:
    """Divide the producer's outputs by the scale, multiply the linears' columns; returns the scale that was used.

    It may differ from `scale_I` in the last bits: a norm is stored rounded, and the columns are multiplied by what its
    rounding made of the scale, so that the product is exact.
    """
    weights, name = block.weights, f"{tap.producer}.weight"
    if _is_linear(block, tap.producer):
        rows = producer_scale(tap, scale_I, block.spec)
        weights[name] = weights[name] / rows[:, None]
        if (bias := f"{tap.producer}.bias") in weights:
            weights[bias] = weights[bias] / rows
    else:
        norm = weights[name]
        stored = (norm / scale_I).to(block.dtypes[name]).float()
        usable = (stored != 0) & torch.isfinite(stored)
        stored = torch.where(usable, stored, norm)
        scale_I = torch.where(usable, norm / stored, 1.0)
        weights[name] = stored
    for linear in tap.linears:
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] * scale_I
    return scale_I


def producer_scale(tap: Tap, scale_I: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """The scale of each output channel of a tap's producer.

    Under grouped-query attention each KV channel feeds the same channel of all query heads of its group.
    """
    if tap.name != "attention_output":
        return scale_I
    return scale_I.view(spec.kv_heads, -1, spec.head_dim)[:, 0].reshape(-1)


def _is_linear(block: Block, name: str) -> bool:
    return block.weights[f"{name}.weight"].ndim == 2
