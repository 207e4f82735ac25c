"""Activations to 8 bits with a scale for each token, or for each group of its columns.

Shapes: T tokens, I columns, G = ceil(I / group) groups, the last partly filled; G = 1 for one scale per token.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Kind = Literal["int8", "e4m3"]
LARGEST: dict[Kind, float] = {"int8": 127.0, "e4m3": 448.0}
CODE_DTYPE: dict[Kind, torch.dtype] = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
TINY = torch.finfo(torch.float32).tiny  # least scale: a smaller one would be subnormal and lose the quotient's bits


def quantize_tokens(x_TI: torch.Tensor, kind: Kind, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, I] (int8 or float8_e4m3fn) and float32 scales [T, G]: x ≈ code · scale.

    scale = max(max|x| / 127 or 448, 2^-126); code = x / scale rounded to nearest, ties to even. int8 codes are
    symmetric (never −128); e4m3 keeps the sign of −0. Zeros give codes 0 and the scale 2^-126. A NaN or an infinity
    makes the scale of its group NaN and the group's codes 0, so that what is computed from them is NaN too.
    """
    tokens, columns = x_TI.shape
    width = group or max(columns, 1)
    groups = -(-columns // width) if group else 1
    x_TGg = F.pad(x_TI.float(), (0, groups * width - columns)).reshape(tokens, groups, width)
    largest_TG = x_TGg.abs().amax(-1)
    scale_TG = (largest_TG / LARGEST[kind]).clamp_min(TINY)
    finite_TG = largest_TG.isfinite()
    value_TGg = torch.where(finite_TG[..., None], x_TGg / scale_TG[..., None], 0.0)
    if kind == "int8":
        value_TGg = value_TGg.round()
    codes_TI = value_TGg.clamp(-LARGEST[kind], LARGEST[kind]).flatten(1)[:, :columns].to(CODE_DTYPE[kind])
    return codes_TI, torch.where(finite_TG, scale_TG, torch.nan)
