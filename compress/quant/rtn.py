"""Round to nearest: each weight goes to the nearest point of its group's grid."""

from __future__ import annotations

import torch

from compress.quant.scheme import QuantizedWeight, Scheme


def round_to_nearest(
    weight_OI: torch.Tensor, scheme: Scheme, scale_OG: torch.Tensor, zero_point_OG: torch.Tensor | None
) -> QuantizedWeight:
    """codes = clamp(round(w / scale) + zero_point, −2^(b−1), 2^(b−1) − 1), with the scale as it is stored.

    weight_OI [O, I]; scale_OG [O, G] nonzero; zero_point_OG [O, G] int8, or None if symmetric.
    """
    groups = scale_OG.shape[1]
    codes_OGg = (weight_OI.float().unflatten(1, (groups, -1)) / scale_OG.float()[..., None]).round_()
    if zero_point_OG is not None:
        codes_OGg += zero_point_OG.float()[..., None]
    codes_OI = codes_OGg.clamp_(scheme.qmin, scheme.qmax).flatten(1).to(torch.int8)
    return QuantizedWeight(scheme, codes_OI, scale_OG, zero_point_OG)
