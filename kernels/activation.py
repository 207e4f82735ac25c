"""Gated activations (arXiv 2002.05202).

Shapes: T tokens, I channels of the gate and of the other half.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Gate = Literal["silu", "gelu", "gelu_tanh"]


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up."""
    return F.silu(gate).mul_(up)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up, with the exact Φ(x) = (1 + erf(x / √2)) / 2 (arXiv 1606.08415)."""
    return F.gelu(gate).mul_(up)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up, with Φ(x) ≈ (1 + tanh(√(2/π)·(x + 0.044715·x³))) / 2, as Gemma's."""
    return F.gelu(gate, approximate="tanh").mul_(up)


def gated(x_T2I: torch.Tensor, gate: Gate) -> torch.Tensor:
    """activation(x[:, :I]) · x[:, I:], from one projection of both: [T, I]."""
    return {"silu": silu_mul, "gelu": gelu_mul, "gelu_tanh": gelu_tanh_mul}[gate](*x_T2I.chunk(2, dim=-1))
