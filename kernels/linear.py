"""Linear layers over weights prepared once: their references.

Shapes: T tokens, O out features, I in features, G groups along I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

FEW_ROWS = 32  # up to here W·xᵀ beats x·Wᵀ in a CPU's SGEMM, which would spread the few rows over its threads


@dataclass(frozen=True)
class IntegerWeight:
    """w[o, i] = (codes[o, i] − zero_point[o, g]) · scale[o, g], g = i // (I / G); codes are int8, `bits` wide."""

    bits: int
    codes_OI: torch.Tensor
    scale_OG: torch.Tensor
    zero_point_OG: torch.Tensor | None


class Linear(Protocol):
    """y[T, O] = x[T, I]·Wᵀ + b, for a weight in whatever form it is held."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor: ...


def _nbytes(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> int:
    return weight_OI.nbytes + (0 if bias_O is None else bias_O.nbytes)


@dataclass(frozen=True)
class DenseLinear:
    """The reference, and the fast path of a GPU: one GEMM."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight_OI, self.bias_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True)
class DenseLinearCPU:
    """A GEMV for one token, W·xᵀ for a few, x·Wᵀ for many: the same sums in the order a CPU likes."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight_OI, self.bias_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if not 1 < x_TI.shape[0] <= FEW_ROWS:
            return F.linear(x_TI, self.weight_OI, self.bias_O)
        y_TO = torch.mm(self.weight_OI, x_TI.t()).t().contiguous()
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)


def dequantize(weight: IntegerWeight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight [O, I]: float32 arithmetic, then one rounding to `dtype`."""
    rows, columns = weight.codes_OI.shape
    codes_OGg = weight.codes_OI.reshape(rows, weight.scale_OG.shape[1], -1).float()
    if weight.zero_point_OG is not None:
        codes_OGg = codes_OGg - weight.zero_point_OG.float()[..., None]
    return (codes_OGg * weight.scale_OG.float()[..., None]).reshape(rows, columns).to(dtype)
