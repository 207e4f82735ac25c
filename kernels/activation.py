"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up (arXiv 2002.05202)."""
    return F.silu(gate).mul_(up)
