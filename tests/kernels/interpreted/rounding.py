"""Rows that are hard to round, and bounds.

Bounds are sums of what is rounded: U is the unit roundoff of the dtype that is written, U32 that of float32, in which
the kernels compute. A value below a dtype's normals has an absolute error instead: TINY.
"""

from __future__ import annotations

import math

import torch

from compress.kernels.launch import Target

SM90 = Target("cuda", 90)
U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
U32 = 2.0**-24
DTYPES = list(U)
BOTH = [torch.float32, torch.float16]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def assert_within(actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """No element further from the exact one than its bound; NaN is as far as can be."""
    error = (actual.double() - exact).abs()
    assert actual.shape == exact.shape
    assert (error <= bound).all(), f"{float((error / bound).nan_to_num(math.inf).max()):.3g} times the bound"


def hard_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, then an outlier in one row, a row of zeros, one of −0 and one of subnormals."""
    x = randn(rows, columns, dtype=dtype)
    x[0, columns // 2] = 3e4
    x[1], x[2] = 0.0, -0.0
    x[3] = TINY[dtype] * torch.arange(columns).fmod(7).to(torch.float64)
    return x
