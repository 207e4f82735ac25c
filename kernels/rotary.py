"""Rotary position embedding in the half-split layout of Hugging Face's Llama.

Shapes: T tokens, H heads, D head dim, F = D/2.
"""

from __future__ import annotations

import torch


def rotary_tables(
    inverse_F: torch.Tensor, positions_T: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, F] of position · frequency, times `scaling`; computed in float32."""
    angle_TF = positions_T.float()[:, None] * inverse_F[None, :]
    return (angle_TF.cos() * scaling).to(dtype), (angle_TF.sin() * scaling).to(dtype)


def rotate(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Rotate the pair (x[d], x[d + D/2]) of every head by its position's angle."""
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    low, high = x_THD.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
