"""Quantized weights as a checkpoint stores them: what every path prepares its own form from.

Shapes: O out features, I in features, G groups along I, W words of 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class PackedWeight:
    """Rows of integer codes in compressed-tensors' `pack-quantized` layout (see packing.py).

    w[o, i] = (codes[o, i] − zero_point[o, g]) · scale[o, g], g = i // (I / G); codes and zero points are signed,
    `bits` wide; zero_point_OG is int8, or None for a symmetric scheme.
    """

    bits: int
    columns: int
    words_OW: torch.Tensor  # int32, may lie in a memory-mapped file
    scale_OG: torch.Tensor
    zero_point_OG: torch.Tensor | None


@dataclass(frozen=True)
class Float8Weight:
    """w[o, i] = e4m3(codes[o, i]) · scale[o // (O / A), i // (I / B)], A × B scales: per channel [O, 1], per tensor
    [1, 1], or one for each block of 128 × 128, the last row and column of blocks partly filled."""

    codes_OI: torch.Tensor  # torch.float8_e4m3fn
    scale_AB: torch.Tensor
    block: tuple[int, int] | None = None  # rows and columns of a block; None where they follow from the shapes


@dataclass(frozen=True)
class Float4Weight:
    """w[o, i] = e2m1(code[o, i]) · scale[o, g] / global_scale; the low nibble of a byte is the even column.

    nvfp4: groups of 16 with e4m3 scales and one float32 global scale. mxfp4: groups of 32 with e8m0 scales (powers of
    two), global scale 1.
    """

    kind: Literal["nvfp4", "mxfp4"]
    packed_OB: torch.Tensor  # uint8 [O, I / 2]
    scale_OG: torch.Tensor  # torch.float8_e4m3fn or torch.float8_e8m0fnu
    global_scale: float = 1.0
