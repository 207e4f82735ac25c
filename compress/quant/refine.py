"""After GPTQ: better scales for the codes it chose, then better codes for those scales.

Shapes: O out features, I in features, G groups, g columns of a group, B columns of a block.
"""

from __future__ import annotations

import torch

from compress.quant.ranges import storable_scale
from compress.quant.scheme import QuantizedWeight

_RIDGE = 1e-4  # of each diagonal element: holds the scale of a group whose codes are almost all zero


def refit_scales(weight_OI: torch.Tensor, gram_II: torch.Tensor, quantized: QuantizedWeight) -> QuantizedWeight:
    """The scales of each row that cost its output least, given its codes: G × G normal equations.

    With c_g the codes of group g less their zero point, (c_g H c_hᵀ) δ = (w − ŵ) H c_hᵀ gives the change δ of the
    scales; ŵ is the present dequantized row. Scales are rounded to the dtype in which they are stored.
    """
    groups = quantized.scale_OG.shape[1]
    codes_OGg = quantized.codes_OI.float().unflatten(1, (groups, -1))
    if quantized.zero_point_OG is not None:
        codes_OGg = codes_OGg - quantized.zero_point_OG.float()[..., None]
    panels = gram_II.unflatten(0, (groups, -1))  # [G, g, I]
    normal_OGG = torch.stack(
        [((codes_OGg[:, i] @ panels[i]).unflatten(1, (groups, -1)) * codes_OGg).sum(-1) for i in range(groups)], dim=1
    )
    residual_OI = (weight_OI.float() - quantized.dequantize()) @ gram_II
    target_OG = (residual_OI.unflatten(1, (groups, -1)) * codes_OGg).sum(-1)
    # A group without codes has an empty row and column: 1 on the diagonal leaves its scale as it is.
    diagonal_OG = normal_OGG.diagonal(dim1=1, dim2=2)
    normal_OGG += torch.diag_embed(torch.where(diagonal_OG > 0, _RIDGE * diagonal_OG, 1.0))
    # float64: rows whose groups are nearly collinear
    change_OG = torch.linalg.solve(normal_OGG.double(), target_OG.double()).float()
    scale_OG = quantized.scale_OG.float()
    changed_OG = scale_OG + torch.where(torch.isfinite(change_OG), change_OG, 0.0)
    stored_OG = storable_scale(changed_OG, quantized.scale_OG.dtype)
    return QuantizedWeight(quantized.scheme, quantized.codes_OI, stored_OG, quantized.zero_point_OG)


def descend_codes(
    weight_OI: torch.Tensor, gram_II: torch.Tensor, quantized: QuantizedWeight, *, block_size: int = 64
) -> QuantizedWeight:
    """One sweep of coordinate descent on Δ H Δᵀ over the codes (QuantEase, arXiv 2309.01885): it never rises.

    Column after column, in falling order of H_jj, goes to the grid point nearest ŵ_j − (Δ H)_j / H_jj, the best value
    while all others stay. `gram_II` needs a positive diagonal (dampened).
    """
    scheme, features = quantized.scheme, weight_OI.shape[1]
    width = features // quantized.scale_OG.shape[1]
    order_I = torch.argsort(gram_II.diagonal(), descending=True, stable=True)
    gram_II = gram_II[order_I][:, order_I].contiguous()
    groups, diagonal = (order_I // width).tolist(), gram_II.diagonal().tolist()
    # Columns as rows: each step then reads and writes contiguous memory.
    scale_GO = quantized.scale_OG.float().T.contiguous()
    zero_GO = torch.zeros_like(scale_GO)
    if quantized.zero_point_OG is not None:
        zero_GO = quantized.zero_point_OG.float().T.contiguous()
    codes_IO = quantized.codes_OI.T[order_I]
    value_IO = quantized.dequantize().T[order_I].contiguous()
    slope_IO = gram_II @ (value_IO - weight_OI.float().T[order_I])  # Δ H, as columns
    for start in range(0, features, block_size):
        stop = min(start + block_size, features)
        change_BO = torch.empty_like(value_IO[start:stop])
        for row, column in enumerate(range(start, stop)):
            scale_O, zero_O = scale_GO[groups[column]], zero_GO[groups[column]]
            best_O = torch.add(value_IO[column], slope_IO[column], alpha=-1 / diagonal[column])
            codes_O = best_O.div_(scale_O).round_().add_(zero_O).clamp_(scheme.qmin, scheme.qmax)
            codes_IO[column] = codes_O
            torch.sub(codes_O.sub_(zero_O).mul_(scale_O), value_IO[column], out=change_BO[row])
            slope_IO[column + 1 : stop].addr_(gram_II[column + 1 : stop, column], change_BO[row])
        slope_IO[stop:].addmm_(gram_II[stop:, start:stop], change_BO)
    codes_OI = torch.empty_like(quantized.codes_OI)
    codes_OI[:, order_I] = codes_IO.T
    return QuantizedWeight(scheme, codes_OI, quantized.scale_OG, quantized.zero_point_OG)
