"""AWQ: scale up the input channels that carry the output before rounding, and scale their producer down.

Shapes: O out features of a linear, I in features, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.quant.gptq import output_error
from compress.quant.ranges import RangeMethod, find_range
from compress.quant.rtn import round_to_nearest
from compress.quant.scheme import Scheme
from compress.statistics import Statistics


@dataclass(frozen=True)
class AwqResult:
    """`scale_I` multiplies the linears' columns; all ones where nothing was applied. Errors are relative, held out."""

    scale_I: torch.Tensor
    ratio: float
    error_before: float
    error_after: float
    applied: bool
    reason: str


def search_scale(
    weights: Sequence[torch.Tensor],
    statistics: Statistics,
    held_out: Statistics | None,
    scheme: Scheme,
    scale_dtype: torch.dtype = torch.float16,
    *,
    grid: int = 20,
    duo: bool = True,
    method: RangeMethod = "minmax",
    group_tied: tuple[int, int, int] | None = None,
    max_rows: int | None = None,
) -> AwqResult:
    """The scale s of input channels for which rounding costs the linears' outputs least (arXiv 2306.00978, eq. 4–5).

    s = x̄^r / w̄^(1−r), r = 0 … 1 in `grid` steps, x̄ = E|x| and w̄ the mean of |w| / max|w of its group|; without `duo`,
    s = x̄^r. The output error under ΔW = Q(W·s)/s − W is tr(ΔW H ΔWᵀ), so no activations are needed. No scale at all is
    always a candidate, and a scale that does not lower the error on `held_out` is not applied.

    `weights` [O, I] share the input of `statistics`. `group_tied` = (heads, kv_heads, head_dim) for o_proj: one scale
    per KV channel, tied over the query heads that read it, so that v_proj can absorb it exactly.
    """
    weight_OI = torch.cat([weight.float() for weight in weights])
    gram_II, held_out_II = statistics.gram(), (held_out or statistics).gram()
    identity_I = torch.ones_like(statistics.mean_abs())
    sample_OI = weight_OI
    if max_rows and len(weight_OI) > max_rows:
        sample_OI = weight_OI[torch.linspace(0, len(weight_OI) - 1, max_rows).long()]
    total = output_error(weight_OI, held_out_II)

    def error(rows_OI: torch.Tensor, scale_I: torch.Tensor, gram_II: torch.Tensor) -> float:
        return output_error(_rounding_error(rows_OI, scale_I, scheme, method, scale_dtype, gram_II), gram_II)

    best = (error(sample_OI, identity_I, gram_II), 0.0, identity_I)
    channel_x, channel_w = _channel_sizes(weight_OI, statistics, scheme, group_tied)
    for step in range(1, grid + 1):
        ratio = step / grid
        scale_I = _scale(channel_x, channel_w, ratio, duo, group_tied)
        if not torch.isfinite(scale_I).all():
            continue
        loss = error(sample_OI, scale_I, gram_II)
        if loss < best[0]:
            best = (loss, ratio, scale_I)
    _, ratio, scale_I = best
    before = error(weight_OI, identity_I, held_out_II) / max(total, 1e-30)
    if ratio == 0.0:
        return AwqResult(identity_I, 0.0, before, before, False, "no scale lowers the calibration error")
    after = error(weight_OI, scale_I, held_out_II) / max(total, 1e-30)
    if not after < before:
        return AwqResult(identity_I, ratio, before, after, False, "the scale raises the held-out error")
    return AwqResult(scale_I, ratio, before, after, True, "applied")


def _rounding_error(rows_OI, scale_I, scheme, method, scale_dtype, gram_II):
    scaled_OI = rows_OI * scale_I
    importance = gram_II / scale_I[:, None] / scale_I[None, :] if method in ("imatrix", "gram") else None
    scale_OG, zero_OG = find_range(scaled_OI, scheme, method, importance, scale_dtype)
    return round_to_nearest(scaled_OI, scheme, scale_OG, zero_OG).dequantize() / scale_I - rows_OI


def _channel_sizes(weight_OI, statistics, scheme, group_tied):
    """x̄ and w̄."""
    groups = scheme.groups(weight_OI.shape[1])
    magnitude_OGg = weight_OI.abs().unflatten(1, (groups, -1))
    relative_OGg = magnitude_OGg / magnitude_OGg.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    mean_w = relative_OGg.mean(0).flatten()
    mean_x = statistics.mean_abs()
    if group_tied:
        heads, kv_heads, head_dim = group_tied
        mean_w, mean_x = (v.view(kv_heads, heads // kv_heads, head_dim).mean(1).flatten() for v in (mean_w, mean_x))
    return mean_x, mean_w


def _scale(mean_x, mean_w, ratio, duo, group_tied):
    scale = mean_x**ratio
    if duo:
        scale = scale / (mean_w ** (1 - ratio) + 1e-4)
    alive = (mean_x > 0) & (mean_w > 0)
    scale = scale.clamp(min=1e-4)
    scale = scale / (scale[alive].max() * scale[alive].min()).sqrt() if alive.any() else scale
    scale = torch.where(alive, scale, 1.0)
    return expand_tied(scale, group_tied) if group_tied else scale


def expand_tied(scale: torch.Tensor, group_tied: tuple[int, int, int]) -> torch.Tensor:
    """One scale per KV channel [K·D] → one per input channel of o_proj [H·D], the same for the heads of a group."""
    heads, kv_heads, head_dim = group_tied
    return scale.view(kv_heads, 1, head_dim).expand(-1, heads // kv_heads, -1).reshape(-1)
