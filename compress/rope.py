"""Rotary position embedding: what a config asks for, and the frequencies that follow.

Shapes: D head dim, F = D/2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Rope:
    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: the context length before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None means 0.1·ln(factor) + 1
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angular frequencies per position, float32 [F].

    Llama-3 keeps short wavelengths, divides long ones by `factor` and blends between (arXiv 2407.21783, section 3.2);
    YaRN blends by the number of rotations within the original context (arXiv 2309.00071, eq. 17 to 22).
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse_F = 1.0 / (rope.theta**exponent_F)
    if rope.kind == "default":
        return inverse_F
    if rope.kind == "linear":
        return inverse_F / rope.factor
    if rope.kind == "llama3":
        wavelength_F = 2 * math.pi / inverse_F
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        turns_F = rope.original_max_position / wavelength_F
        blend_F = (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blended_F = (1 - blend_F) * inverse_F / rope.factor + blend_F * inverse_F
        scaled_F = torch.where(wavelength_F > low, inverse_F / rope.factor, inverse_F)
        return torch.where((wavelength_F <= low) & (wavelength_F >= high), blended_F, scaled_F)

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = max(last - first, 0.001)
    ramp_F = ((torch.arange(head_dim // 2).float() - first) / width).clamp(0, 1)
    return inverse_F / rope.factor * ramp_F + inverse_F * (1 - ramp_F)


def attention_scaling(rope: Rope) -> float:
    """The factor on cos and sin: 1, but for YaRN (arXiv 2309.00071, section 3.4)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
