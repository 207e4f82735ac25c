"""Where a group's grid lies: the scale and zero point of each group of weights.

Shapes: O out features, I in features, G groups, g columns of a group.
"""

from __future__ import annotations

from typing import Literal

import torch

from compress.quant.scheme import Scheme

RangeMethod = Literal["minmax", "mse", "imatrix", "gram"]

_STEP = 0.05  # between the shrink factors tried first
_STRONGEST = 0.55  # the smallest of them
_CHUNK = 1 << 18  # weights searched at once: they and their rounding stay in the cache


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

    Held-out output error beside minmax = 1, int4 symmetric g64, eight taps of SmolLM2-135M: rounded to nearest
    mse .77, imatrix .61, gram .57; under GPTQ minmax .57, mse .45, imatrix .45, gram .46 (GPTQ already pays for what
    gram weighs). So imatrix suits GPTQ, and gram round-to-nearest.

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


class _Search:
    """The best grid so far of each group of `weight_OGg`, by the loss of its rounding."""

    def __init__(
        self, weight_OGg: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None, scale_dtype: torch.dtype
    ) -> None:
        self.weight_OGg, self.scheme, self.importance, self.scale_dtype = weight_OGg, scheme, importance, scale_dtype
        self.low_OG = weight_OGg.amin(-1).clamp(max=0)
        self.high_OG = weight_OGg.amax(-1).clamp(min=0)
        span_OG = 2 * torch.maximum(-self.low_OG, self.high_OG) if scheme.symmetric else self.high_OG - self.low_OG
        steps = scheme.qmax - scheme.qmin
        self.unit_OG = torch.where(span_OG > 0, span_OG, float(steps)) / steps
        self.shrink_OG = torch.ones_like(self.unit_OG)
        self.turn_OG = torch.ones_like(self.unit_OG) if scheme.symmetric else torch.zeros_like(self.unit_OG)
        self.loss_OG = torch.full_like(self.unit_OG, torch.inf)

    def grid(self, shrink_OG: torch.Tensor, turn_OG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored scale and zero point of a shrunken range; `turn` is the scale's sign, or shifts the zero point."""
        if self.scheme.symmetric:
            return storable_scale(self.unit_OG * shrink_OG * turn_OG, self.scale_dtype), torch.zeros_like(turn_OG)
        stored_OG = storable_scale(self.unit_OG * shrink_OG, self.scale_dtype)
        zero_OG = self.scheme.qmin - (shrink_OG * self.low_OG / stored_OG.float()).round() + turn_OG
        return stored_OG, zero_OG.clamp_(self.scheme.qmin, self.scheme.qmax)

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.grid(self.shrink_OG, self.turn_OG)

    def attempt(self, shrink_OG: torch.Tensor, turn_OG: torch.Tensor) -> None:
        """Keep the candidate in the groups where it loses less."""
        scale_OG, zero_OG = self.grid(shrink_OG, turn_OG)
        loss_OG = _loss(self.weight_OGg, scale_OG, zero_OG, self.scheme, self.importance)
        better_OG = loss_OG < self.loss_OG
        self.shrink_OG = torch.where(better_OG, shrink_OG, self.shrink_OG)
        self.turn_OG = torch.where(better_OG, turn_OG, self.turn_OG)
        self.loss_OG = torch.where(better_OG, loss_OG, self.loss_OG)


def _search(
    weight_OGg: torch.Tensor,
    scheme: Scheme,
    method: RangeMethod,
    importance: torch.Tensor | None,
    scale_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A coarse line of shrinks for both signs (symmetric), then half steps, and zero points one off (asymmetric)."""
    search = _Search(weight_OGg, scheme, importance, scale_dtype)
    if method == "minmax":
        return search.best()
    turns = (1.0, -1.0) if scheme.symmetric else (0.0,)
    # A symmetric range may widen to max|w| / qmax, where nothing is clipped on either side.
    widest = (scheme.qmax - scheme.qmin) / 2 / max(scheme.qmax, 1) if scheme.symmetric else 1.0
    for shrink in [1.0, *(widest - _STEP * i for i in range(int((widest - _STRONGEST) / _STEP) + 1))]:
        for turn in turns:
            ones_OG = torch.ones_like(search.shrink_OG)
            search.attempt(shrink * ones_OG, turn * ones_OG)
    for step in (_STEP / 2, _STEP / 4):
        centre_OG, turn_OG = search.shrink_OG, search.turn_OG
        for offset in (-step, step):
            search.attempt(centre_OG + offset, turn_OG)
    if not scheme.symmetric:
        centre_OG = search.shrink_OG
        for turn in (-1.0, 1.0):
            for offset in (0.0, -_STEP, _STEP):
                search.attempt(centre_OG + offset, torch.full_like(centre_OG, turn))
    return search.best()


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
