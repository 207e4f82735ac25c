"""Weights and inputs for tests of quantization."""

from __future__ import annotations

import torch

from compress.quant.scheme import Scheme
from compress.statistics import Statistics

SCHEMES = [
    Scheme(bits, group, symmetric) for bits in range(2, 9) for group in (8, 32, None) for symmetric in (True, False)
]


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed, and not centred on zero: so asymmetric and shrunken ranges have something to gain."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return 0.05 * (normal + 0.2 * normal**3 + 0.3)


def correlated_inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Inputs of unequal size, each feature correlated with the others."""
    generator = torch.Generator().manual_seed(seed)
    # One mixing for every seed: two seeds are two samples of one distribution.
    mixing = torch.randn(columns, columns, generator=torch.Generator().manual_seed(99)) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ (mixing + 0.5 * torch.eye(columns))
    return x * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(98))]


def statistics_of(x_TI: torch.Tensor) -> Statistics:
    statistics = Statistics.empty(x_TI.shape[-1])
    statistics.add(x_TI)
    return statistics
