"""GPTQ: rounding that pays for each column's error with the columns still to come.

Shapes: O out features, I in features, G groups, B columns of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.quant.refine import descend_codes, refit_scales
from compress.quant.rtn import round_to_nearest
from compress.quant.scheme import QuantizedWeight, Scheme

_DAMPENING_STEP = 10.0  # from 0.01 this is 0.01, 0.1, 1
_DAMPENING_LIMIT = 1.0
_ROWS = 2048  # rounded at once: bounds memory


@dataclass(frozen=True)
class GptqReport:
    """`dampening` is the fraction of mean(diag H) that worked; None with `fallback`, where the result is plain RTN."""

    dampening: float | None
    fallback: bool
    dead_columns: int  # never nonzero in calibration: they keep their rounded values


def row_errors(delta_OI: torch.Tensor, gram_II: torch.Tensor) -> torch.Tensor:
    """Each row's mean squared output error [O] under a weight change: the diagonal of Δ H Δᵀ, H = E[xᵀx]."""
    return ((delta_OI @ gram_II) * delta_OI).sum(1).clamp_(min=0)


def output_error(delta_OI: torch.Tensor, gram_II: torch.Tensor) -> float:
    """tr(Δ H Δᵀ): the mean over tokens of the squared change of the output, summed over output features."""
    return float(row_errors(delta_OI, gram_II).double().sum())


def dampening_for(features: int, tokens: int) -> float:
    """The dampening that the noise of a Gram matrix from so few tokens asks for: 1.5 · features / tokens, in [0.01, 1].

    GPTQ's 0.01 fits few tokens too closely. On SmolLM2-135M with 8,192 tokens (int4 symmetric g64, mse ranges), the
    held-out output error is 3 to 9 % lower at 0.1; with 1,536 features it goes on falling, to 14 % lower at 0.3.
    """
    return min(max(1.5 * features / max(tokens, 1), 0.01), _DAMPENING_LIMIT)


def gptq(
    weight_OI: torch.Tensor,
    gram_II: torch.Tensor,
    scheme: Scheme,
    scale_OG: torch.Tensor,
    zero_point_OG: torch.Tensor | None,
    *,
    dampening: float = 0.01,
    block_size: int = 64,
    act_order: bool = True,
    refine: int = 0,
) -> tuple[QuantizedWeight, GptqReport]:
    """Round `weight_OI` so that its output, not its weights, changes least (arXiv 2210.17323).

    In turn each column is rounded, and e = (w_i − q_i) / U_ii is spread over the columns to come, w −= e·U_i, with
    H⁻¹ = UᵀU. With `act_order` the columns of largest E[x²] come first, while there is most room to pay; groups stay on
    the original columns ("static groups"), so that the stored layout does not change. Then `refine` times the scales
    are fitted to the codes and the codes to the scales (see refine.py): 3 % less held-out layer error, but no lower KL,
    so none by default (docs/log.md). A row that fares worse than its RTN on `gram_II` is rounded to nearest instead.

    gram_II is E[xᵀx] [I, I]. Rows are independent: linears that share an input may be stacked. Where the Gram matrix is
    not finite, is zero, or cannot be factored at any dampening, the result is RTN and the report says so.
    """
    weight_OI, gram_II = weight_OI.float(), gram_II.float()
    rounded = round_to_nearest(weight_OI, scheme, scale_OG, zero_point_OG)
    diagonal_I = gram_II.diagonal()
    dead_I = diagonal_I <= 0
    dead_columns = int(dead_I.sum())
    order_I = torch.arange(len(dead_I), device=gram_II.device)
    if act_order:
        order_I = torch.argsort(diagonal_I, descending=True, stable=True)
    factor = _inverse_factor(gram_II, order_I, dampening) if torch.isfinite(diagonal_I).all() else None
    if factor is None:
        return rounded, GptqReport(None, True, dead_columns)
    upper_II, used = factor
    dampened_II = gram_II
    if refine:
        dampened_II = gram_II + torch.diag(torch.full_like(diagonal_I, used * float(diagonal_I.mean())))

    def round_rows(rows_OI: torch.Tensor, plain: QuantizedWeight) -> QuantizedWeight:
        codes_OI = _round_in_order(rows_OI, upper_II, order_I, plain, block_size)
        found = QuantizedWeight(scheme, codes_OI, plain.scale_OG, plain.zero_point_OG)
        for _ in range(refine):
            found = descend_codes(rows_OI, dampened_II, refit_scales(rows_OI, dampened_II, found))
        nearest = round_to_nearest(rows_OI, scheme, found.scale_OG, found.zero_point_OG)
        found.codes_OI[:, dead_I] = nearest.codes_OI[:, dead_I]
        return _better_rows(rows_OI, gram_II, found, plain)

    parts = [
        round_rows(weight_OI[at : at + _ROWS], _rows(rounded, at, at + _ROWS)) for at in range(0, len(weight_OI), _ROWS)
    ]
    return _stack(parts), GptqReport(used, False, dead_columns)


def _rows(whole: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    zero_OG = None if whole.zero_point_OG is None else whole.zero_point_OG[start:stop]
    return QuantizedWeight(whole.scheme, whole.codes_OI[start:stop], whole.scale_OG[start:stop], zero_OG)


def _stack(parts: list[QuantizedWeight]) -> QuantizedWeight:
    zeros = [part.zero_point_OG for part in parts if part.zero_point_OG is not None]
    return QuantizedWeight(
        parts[0].scheme,
        torch.cat([part.codes_OI for part in parts]),
        torch.cat([part.scale_OG for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _better_rows(
    weight_OI: torch.Tensor, gram_II: torch.Tensor, found: QuantizedWeight, rounded: QuantizedWeight
) -> QuantizedWeight:
    worse_O1 = (
        row_errors(found.dequantize() - weight_OI, gram_II) > row_errors(rounded.dequantize() - weight_OI, gram_II)
    )[:, None]
    codes_OI = torch.where(worse_O1, rounded.codes_OI, found.codes_OI)
    scale_OG = torch.where(worse_O1, rounded.scale_OG, found.scale_OG)
    return QuantizedWeight(found.scheme, codes_OI, scale_OG, found.zero_point_OG)


def _inverse_factor(
    gram_II: torch.Tensor, order_I: torch.Tensor, dampening: float
) -> tuple[torch.Tensor, float] | None:
    """Upper U with H⁻¹ = UᵀU for the ordered H = gram + d·mean(diag)·1, and the d that worked; None if none will do.

    With J the reversal, JHJ = LLᵀ gives U = (JLJ)⁻¹: one Cholesky and one triangular inverse, and H⁻¹ is never formed.
    """
    mean = float(gram_II.diagonal().mean())
    if mean <= 0:
        return None
    reversed_I = order_I.flip(0)
    while dampening <= _DAMPENING_LIMIT:
        for dtype in (torch.float32, torch.float64):
            upper_II = _reversed_inverse(gram_II, reversed_I, dampening * mean, dtype)
            if upper_II is not None and torch.isfinite(upper_II).all() and (upper_II.diagonal() > 0).all():
                return upper_II, dampening
        dampening = max(dampening, 1e-3) * _DAMPENING_STEP
    return None


def _reversed_inverse(
    gram_II: torch.Tensor, reversed_I: torch.Tensor, added: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """(JLJ)⁻¹ in float32, or None where the Cholesky fails. Matrices are dropped as soon as the next one stands."""
    work_II = gram_II.index_select(0, reversed_I).index_select(1, reversed_I).to(dtype)
    work_II.diagonal().add_(added)
    lower_II, failed = torch.linalg.cholesky_ex(work_II)
    if failed:
        return None
    inverse_II = work_II.zero_()
    inverse_II.fill_diagonal_(1)
    inverse_II = torch.linalg.solve_triangular(lower_II, inverse_II, upper=False)
    del lower_II, work_II
    return inverse_II.flip(0, 1).float().contiguous()


def _round_in_order(
    weight_OI: torch.Tensor, upper_II: torch.Tensor, order_I: torch.Tensor, rounded: QuantizedWeight, block_size: int
) -> torch.Tensor:
    """GPTQ's column loop; returns codes [O, I] in the original order of columns."""
    scheme = rounded.scheme
    width = weight_OI.shape[1] // rounded.scale_OG.shape[1]
    # Columns as rows: each step then reads and writes contiguous memory.
    remaining_IO = weight_OI.T[order_I].contiguous()
    scale_GO = rounded.scale_OG.float().T.contiguous()
    zero_GO = torch.zeros_like(scale_GO) if rounded.zero_point_OG is None else rounded.zero_point_OG.float().T
    codes_IO = torch.empty_like(remaining_IO)
    groups = (order_I // width).tolist()
    diagonal = upper_II.diagonal().tolist()
    for start in range(0, len(groups), block_size):
        stop = min(start + block_size, len(groups))
        block_BO = remaining_IO[start:stop]
        error_BO = torch.empty_like(block_BO)
        for row, column in enumerate(range(start, stop)):
            scale_O, zero_O = scale_GO[groups[column]], zero_GO[groups[column]]
            codes_O = (block_BO[row] / scale_O).round_().add_(zero_O).clamp_(scheme.qmin, scheme.qmax)
            codes_IO[column] = codes_O
            error_O = (codes_O - zero_O).mul_(scale_O).sub_(block_BO[row]).div_(-diagonal[column])
            error_BO[row] = error_O
            block_BO[row + 1 :].addr_(upper_II[column, column + 1 : stop], error_O, alpha=-1)
        remaining_IO[stop:].addmm_(upper_II[start:stop, stop:].T, error_BO, alpha=-1)
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device)
    codes_OI[:, order_I] = codes_IO.T.to(torch.int8)
    return codes_OI
