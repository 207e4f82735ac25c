"""Linear layers over dense weights prepared once, by torch.

Shapes: T tokens, O out features, I in features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

FEW_ROWS = 32  # up to here W·xᵀ beats x·Wᵀ in a CPU's SGEMM, which would spread the few rows over its threads


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


@dataclass(frozen=True)
class SideBySide:
    """Linears of one input whose outputs are joined: parts that no one kernel computes together."""

    parts: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x_TI) for part in self.parts], dim=1)
