"""Gated activations, interpreted, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from compress.kernels import activation
from compress.kernels import activation_triton as gate_kernel
from compress.kernels.launch import run
from tests.kernels.interpreted.rounding import DTYPES, SM90, TINY, U32, U, assert_within, poisoned, randn

EXACT_SHARE = {
    "silu": lambda x: torch.sigmoid(x),
    "gelu": lambda x: torch.special.ndtr(x),
    "gelu_tanh": lambda x: torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + ∞) is the 0 that is wanted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", list(EXACT_SHARE))
@pytest.mark.parametrize("channels", [3, 1025])
def test_gated(channels: int, gate: activation.Gate, dtype: torch.dtype) -> None:
    x = randn(5, 2 * channels, dtype=dtype) * 3
    x[0, 0], x[1, 0], x[2, 0], x[3, 0], x[4, 0] = -0.0, -90.0, 90.0, TINY[dtype], -9.0
    x[:, channels] = 2.0
    room = poisoned(5, channels + 2, dtype=dtype)
    run(gate_kernel.plan_gated(x, gate, room[:, :channels], SM90))
    gates, ups = x[:, :channels].double(), x[:, channels:].double()
    share = EXACT_SHARE[gate](gates)
    exact = gates * share * ups
    # The roundings of exp's argument z count |z| times; the cubic has four of them more. From z = 88.7 on, e^z is
    # infinite and the share 0. erf cancels below 0: an absolute error.
    cubic = 5 * (1.6 * gates.abs() + 0.0714 * gates.abs() ** 3)
    argument = cubic if gate == "gelu_tanh" else 2 * gates.abs()
    bound = (U[dtype] + U32 * (6 + argument)) * exact.abs() + TINY[dtype] * (1 + ups.abs())
    bound = bound + (2 * U32 if gate == "gelu" else 2.0**-127) * (gates * ups).abs()
    assert_within(room[:, :channels], exact, bound)
    assert room[:, channels:].isnan().all()
    assert room[0, 0].signbit()
