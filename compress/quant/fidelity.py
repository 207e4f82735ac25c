"""What rounding did to the outputs of linears, beside what plain round-to-nearest would have done.

Shapes: O out features (of linears that share an input, stacked), I in features.
"""

from __future__ import annotations

import torch

from compress.quant.gptq import row_errors
from compress.quant.ranges import find_range
from compress.quant.rtn import round_to_nearest
from compress.quant.scheme import Scheme

_ROWS = 1024  # at once: bounds memory


def relative_errors(
    original_OI: torch.Tensor,
    restored_OI: torch.Tensor,
    gram_II: torch.Tensor | None,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    sizes: list[int],
) -> list[dict[str, float | str]]:
    """For each linear: tr(ΔHΔᵀ) / tr(WHWᵀ) of the restored weight and of RTN, H = E[xᵀx] of the unscaled input.

    `restored_OI` is what the stored codes stand for in the original model, any scaling undone. Without a Gram matrix
    the errors are those of the weights, ‖Δ‖² / ‖W‖². `sizes` are the rows of each linear.
    """
    parts = []
    for start in range(0, len(original_OI), _ROWS):
        weight_OI = original_OI[start : start + _ROWS]
        scale_OG, zero_OG = find_range(weight_OI, scheme, "minmax", None, scale_dtype)
        plain_OI = round_to_nearest(weight_OI, scheme, scale_OG, zero_OG).dequantize() - weight_OI
        delta_OI = restored_OI[start : start + _ROWS] - weight_OI
        parts.append(torch.stack([_squares(rows, gram_II) for rows in (delta_OI, plain_OI, weight_OI)]))
    sums = [part.double().sum(1).tolist() for part in torch.cat(parts, dim=1).split(sizes, dim=1)]
    kind = "weights" if gram_II is None else "outputs"
    return [
        {"error": error / (norm or 1.0), "rtn_error": plain / (norm or 1.0), "error_of": kind}
        for error, plain, norm in sums
    ]


def _squares(rows_OI: torch.Tensor, gram_II: torch.Tensor | None) -> torch.Tensor:
    return rows_OI.square().sum(1) if gram_II is None else row_errors(rows_OI, gram_II)
