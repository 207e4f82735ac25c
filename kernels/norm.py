"""RMSNorm.

Shapes: T tokens, C channels, H heads, D head dim.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, the mean in float32 (arXiv 1910.07467).

    A weight [H, D] serves x [T, H, D]: a norm for each head. Hugging Face's Llama rounds the normalized x to its dtype
    before it multiplies by the weight; Gemma (`unit_offset`) multiplies by 1 + weight in float32 and rounds once.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (scaled * (1 + weight.float())).to(x.dtype)
    return weight * scaled.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and x + residual, which is rounded to its dtype before it is normalized."""
    total = x + residual
    return rms_norm(total, weight, eps, unit_offset), total
