"""AWQ: before rounding, scale up the input channels that carry the output, and scale their producer down.

Shapes: O out features, I in features, G groups, g columns of a group, H query heads, K KV heads, D head dim.
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

GroupTied = tuple[int, int, int]  # heads, kv_heads, head_dim

_SMALLEST = 1e-4  # keeps the denominators of channels without weight or input from vanishing


@dataclass(frozen=True)
class AwqResult:
    """`scale_I` multiplies the linears' columns; all ones unless `applied`.

    The errors are relative output errors tr(ΔW H ΔWᵀ) / tr(W H Wᵀ) on the held-out statistics, without and with the
    best scale of the calibration part, rounded with plain ranges.
    """

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
    group_tied: GroupTied | None = None,
    max_rows: int | None = 768,
) -> AwqResult:
    """The scale s of the input channels with which rounding costs the outputs least (arXiv 2306.00978, eq. 4 and 5).

    s = x̄^r / w̄^(1−r) for r in 0 … 1 in steps of 1/grid, with x̄ = E|x| and w̄ the mean over rows of |w| / max|w| of its
    group; without `duo`, s = x̄^r. The mean squared output error under ΔW = Q(W·s)/s − W is tr(ΔW H ΔWᵀ), so that no
    activations are needed. Every other step is tried first, then the best one's neighbours. No scale is always a
    candidate, and one that does not lower the error on `held_out` (or, without it, on `statistics`) is not applied.

    `weights` [O, I] share the input of `statistics`; at most `max_rows` of their rows judge the candidates, but all
    of them the final choice. For o_proj under grouped-query attention, `group_tied` ties the scale over the query heads
    that read one KV head, so that v_proj can absorb it exactly.
    """
    weight_OI = torch.cat([weight.float() for weight in weights])
    gram_II = statistics.gram()
    held_out_II = gram_II if held_out is None else held_out.gram()
    mean_x, mean_w = _channel_sizes(weight_OI, statistics, scheme, group_tied)
    identity_I = torch.ones_like(gram_II[0])
    rows_OI = weight_OI
    if max_rows and len(weight_OI) > max_rows:
        rows_OI = weight_OI[torch.linspace(0, len(weight_OI) - 1, max_rows).round().long()]

    def scale_of(step: int) -> torch.Tensor:
        scale = _scale(mean_x, mean_w, step / grid, duo)
        return expand_tied(scale, group_tied) if group_tied else scale

    def error(rows_OI: torch.Tensor, scale_I: torch.Tensor, gram_II: torch.Tensor) -> float:
        delta_OI = _rounding_error(rows_OI, scale_I, scheme, method, scale_dtype, gram_II)
        return output_error(delta_OI, gram_II)

    losses = {0: error(rows_OI, identity_I, gram_II)}  # step 0 stands for no scale

    def attempt(steps: Sequence[int]) -> int:
        for step in steps:
            if 0 < step <= grid and step not in losses:
                losses[step] = error(rows_OI, scale_of(step), gram_II)
        return min(losses, key=lambda step: (losses[step] if losses[step] == losses[step] else float("inf"), step))

    best = attempt(range(2, grid + 1, 2))
    best = attempt([best - 1, best + 1])
    ratio, total = best / grid, output_error(weight_OI, held_out_II) or 1.0
    before = error(weight_OI, identity_I, held_out_II) / total
    if best == 0:
        return AwqResult(identity_I, 0.0, before, before, False, "no scale lowers the calibration error")
    after = error(weight_OI, scale_of(best), held_out_II) / total
    if not after < before:
        return AwqResult(identity_I, ratio, before, after, False, "the best scale raises the held-out error")
    return AwqResult(scale_of(best), ratio, before, after, True, "lowers the held-out error")


def expand_tied(scale: torch.Tensor, group_tied: GroupTied) -> torch.Tensor:
    """One scale per KV channel [K·D] → one per input channel of o_proj [H·D], equal for the query heads of a group."""
    heads, kv_heads, head_dim = group_tied
    return scale.view(kv_heads, 1, head_dim).expand(-1, heads // kv_heads, -1).reshape(-1)


def _rounding_error(
    rows_OI: torch.Tensor,
    scale_I: torch.Tensor,
    scheme: Scheme,
    method: RangeMethod,
    scale_dtype: torch.dtype,
    gram_II: torch.Tensor,
) -> torch.Tensor:
    """ΔW = Q(W·s)/s − W."""
    scaled_OI = rows_OI * scale_I
    importance = gram_II / (scale_I[:, None] * scale_I) if method in ("imatrix", "gram") else None
    scale_OG, zero_OG = find_range(scaled_OI, scheme, method, importance, scale_dtype)
    return round_to_nearest(scaled_OI, scheme, scale_OG, zero_OG).dequantize() / scale_I - rows_OI


def _channel_sizes(
    weight_OI: torch.Tensor, statistics: Statistics, scheme: Scheme, group_tied: GroupTied | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x̄ and w̄ of each channel that has a scale of its own: [I], or [K·D] where tied."""
    magnitude_OGg = weight_OI.abs().unflatten(1, (scheme.groups(weight_OI.shape[1]), -1))
    peak_OG1 = magnitude_OGg.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    mean_w, mean_x = (magnitude_OGg / peak_OG1).mean(0).flatten(), statistics.mean_abs()
    if group_tied:
        heads, kv_heads, head_dim = group_tied
        per_group = (kv_heads, heads // kv_heads, head_dim)
        mean_w, mean_x = (mean.view(per_group).mean(1).flatten() for mean in (mean_w, mean_x))
    return mean_x, mean_w


def _scale(mean_x: torch.Tensor, mean_w: torch.Tensor, ratio: float, duo: bool) -> torch.Tensor:
    """x̄^r / w̄^(1−r), centred on 1; exactly 1 for channels that never carry anything."""
    alive = (mean_x > 0) & (mean_w > 0)
    if not alive.any():
        return torch.ones_like(mean_x)
    scale = mean_x**ratio
    if duo:
        scale = scale / (mean_w ** (1 - ratio) + _SMALLEST)
    scale = scale.clamp(min=_SMALLEST)
    scale = scale / (scale[alive].max() * scale[alive].min()).sqrt()
    return torch.where(alive, scale, 1.0)
