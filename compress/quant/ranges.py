"""Where a group's grid lies: the scale and zero point of each group of weights.

Shapes: O out features, I in features, G groups, g columns of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from compress.quant.scheme import Scheme

RangeMethod = Literal["minmax", "mse", "imatrix", "gram"]

_STEPS = 20  # shrink factors tried
_SMALLEST = 0.55  # the strongest shrink
_CHUNK = 1 << 21  # weights searched at once: bounds memory


def find_range(
    weight_OI: torch.Tensor,
    scheme: Scheme,
    method: RangeMethod = "minmax",
    importance: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """scale [O, G] in `scale_dtype` and zero_point [O, G] int8 (None if symmetric) of each group.

    minmax   symmetric: max|w| / ((2^b − 1) / 2); asymmetric: (max − min) / (2^b − 1) with 0 in the range.
    mse      of shrunken and sign-flipped ranges, the least Σ (w − Q(w))².
    imatrix  the least Σ E[x_i²] (w_i − Q(w_i))²; `importance` [I] is E[x²] (or a Gram matrix, of which the diagonal).
    gram     the least Δ·H_gg·Δᵀ, the group's own output error; `importance` [I, I] is the Gram matrix E[xᵀx], of which
             the diagonal blocks are used. It is AWQ's clip search (arXiv 2306.00978) without its data.

    A negative scale gives the side with the larger weights the code −2^(b−1) that has no positive partner. Ranges are
    judged with the scale as it is stored; none is zero or infinite.
    """
    columns = weight_OI.shape[1]
    groups = scheme.groups(columns)
    width = columns // groups
    importance = _importance_by_group(method, importance, groups, width)
    rows = max(1, _CHUNK // columns)
    parts = [
        _search(chunk.float().unflatten(1, (groups, width)), scheme, method, importance, scale_dtype)
        for chunk in weight_OI.split(rows)
    ]
    scale_OG = torch.cat([scale for scale, _ in parts])
    return scale_OG, None if scheme.symmetric else torch.cat([zero for _, zero in parts]).to(torch.int8)


def storable_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to `dtype` without a zero or an infinity: a scale that underflows becomes the smallest number it holds."""
    limits = torch.finfo(dtype)
    magnitude = scale.abs().clamp(limits.smallest_normal * limits.eps, limits.max)
    return torch.where(scale < 0, -magnitude, magnitude).to(dtype)


def _importance_by_group(
    method: RangeMethod, importance: torch.Tensor | None, groups: int, width: int
) -> torch.Tensor | None:
    """[G, g] for imatrix, [G, g, g] for gram, else None."""
    if method in ("minmax", "mse"):
        return None
    assert importance is not None, f"{method} needs the input's statistics"
    if method == "imatrix":
        diagonal_I = importance.diagonal() if importance.ndim == 2 else importance
        return diagonal_I.float().unflatten(0, (groups, width))
    starts = range(0, groups * width, width)
    return torch.stack([importance[at : at + width, at : at + width] for at in starts]).float()


def _search(
    weight_OGg: torch.Tensor,
    scheme: Scheme,
    method: RangeMethod,
    importance: torch.Tensor | None,
    scale_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    best_scale_OG, best_zero_OG, best_loss_OG = None, None, None
    for stored_OG, zero_OG in _candidates(weight_OGg, scheme, scale_dtype):
        if method == "minmax":
            return stored_OG, zero_OG
        loss_OG = _loss(weight_OGg, stored_OG, zero_OG, scheme, importance)
        if best_loss_OG is None:
            best_scale_OG, best_zero_OG, best_loss_OG = stored_OG, zero_OG.clone(), loss_OG
            continue
        better_OG = loss_OG < best_loss_OG
        best_scale_OG = torch.where(better_OG, stored_OG, best_scale_OG)
        best_zero_OG = torch.where(better_OG, zero_OG, best_zero_OG)
        best_loss_OG = torch.where(better_OG, loss_OG, best_loss_OG)
    assert best_scale_OG is not None and best_zero_OG is not None
    return best_scale_OG, best_zero_OG


def _candidates(
    weight_OGg: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(stored scale, zero point) pairs [O, G], the min-max range first."""
    steps = scheme.qmax - scheme.qmin
    shrinks = [1 - (1 - _SMALLEST) * i / (_STEPS - 1) for i in range(_STEPS)]
    if scheme.symmetric:
        peak_OG = weight_OGg.abs().amax(-1)
        zero_OG = torch.zeros_like(peak_OG)
        unit_OG = torch.where(peak_OG > 0, peak_OG, 1.0) * (2 / steps)
        yield storable_scale(unit_OG, scale_dtype), zero_OG
        # Up to max|w| / qmax, where nothing is clipped.
        widest = steps / 2 / max(scheme.qmax, 1)
        for shrink in shrinks:
            for sign in (1, -1):
                yield storable_scale(unit_OG * (sign * widest * shrink), scale_dtype), zero_OG
        return
    low_OG = weight_OGg.amin(-1).clamp(max=0)
    high_OG = weight_OGg.amax(-1).clamp(min=0)
    width_OG = torch.where(high_OG > low_OG, high_OG - low_OG, float(steps))
    for shrink in shrinks:
        stored_OG = storable_scale(width_OG * (shrink / steps), scale_dtype)
        middle_OG = scheme.qmin - (shrink * low_OG / stored_OG.float()).round()
        for shift in (0, -1, 1):
            yield stored_OG, (middle_OG + shift).clamp(scheme.qmin, scheme.qmax)


def _loss(
    weight_OGg: torch.Tensor,
    scale_OG: torch.Tensor,
    zero_OG: torch.Tensor,
    scheme: Scheme,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    scale_OG1, zero_OG1 = scale_OG.float()[..., None], zero_OG[..., None]
    codes_OGg = (weight_OGg / scale_OG1).round_().add_(zero_OG1).clamp_(scheme.qmin, scheme.qmax)
    delta_OGg = codes_OGg.sub_(zero_OG1).mul_(scale_OG1).sub_(weight_OGg)
    if importance is None:
        return delta_OGg.square_().sum(-1)
    if importance.ndim == 2:
        return (delta_OGg.square_() * importance).sum(-1)
    delta_GOg = delta_OGg.transpose(0, 1)
    return (torch.bmm(delta_GOg, importance) * delta_GOg).sum(-1).T
