"""Gated activations against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from compress.kernels.activation import Gate, gated, gelu_mul, gelu_tanh_mul, silu_mul

FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("gate", list(FORMULAS))
def test_gated(gate: Gate, dtype: torch.dtype) -> None:
    """Two roundings to dtype, and for x < 0 the cancellation of 1 + erf or 1 + tanh in float32: 4 of its roundings."""
    x_T2I = (torch.randn(7, 60, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    x_T2I[0, :4] = torch.tensor([-0.0, -60.0, 60.0, 1e-7]).to(dtype)
    gates, ups = x_T2I[:, :30].double(), x_T2I[:, 30:].double()
    exact = FORMULAS[gate](gates) * ups
    bound = 2.1 * UNIT[dtype] * exact.abs() + (4 * 2.0**-24 * gates.abs() + 2.0**-24) * ups.abs() + 2.0**-24
    y_TI = gated(x_T2I, gate)
    assert ((y_TI.double() - exact).abs() <= bound).all()
    assert y_TI[0, 0] == 0
    assert y_TI[0, 0].signbit() != x_T2I[0, 30].signbit()


def test_gates_by_name() -> None:
    gate, up = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    named: dict[Gate, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "silu": silu_mul,
        "gelu": gelu_mul,
        "gelu_tanh": gelu_tanh_mul,
    }
    for name, function in named.items():
        torch.testing.assert_close(gated(torch.cat((gate, up), 1), name), function(gate.clone(), up))


def test_no_rows() -> None:
    assert gated(torch.empty(0, 6), "silu").shape == (0, 3)
