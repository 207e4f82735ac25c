"""What is stored for a quantized linear.

Shapes: O out features, I in features, G groups along I.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scheme:
    """Integer weights of `bits`, one scale (and zero point) for each `group_size` input features of a row.

    `group_size` None means one group as wide as the row (per channel).
    """

    bits: int
    group_size: int | None
    symmetric: bool

    @property
    def qmin(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def groups(self, in_features: int) -> int:
        return in_features // self.group_size if self.group_size else 1

    def bits_per_weight(self, in_features: int, scale_bits: int = 16) -> float:
        """Bits per weight with scales and zero points, before packing pads a row to whole words."""
        per_group = scale_bits + (0 if self.symmetric else self.bits)
        return self.bits + per_group * self.groups(in_features) / in_features

    def __str__(self) -> str:
        group = f"g{self.group_size}" if self.group_size else "channel"
        return f"int{self.bits} {'sym' if self.symmetric else 'asym'} {group}"


@dataclass(frozen=True)
class QuantizedWeight:
    """w[o, i] = (codes[o, i] − zero_point[o, g]) · scale[o, g], with g = i // group_size.

    codes_OI is int8 in [qmin, qmax]; scale_OG has the dtype that is stored; zero_point_OG is int8 in [qmin, qmax], or
    None for a symmetric scheme.
    """

    scheme: Scheme
    codes_OI: torch.Tensor
    scale_OG: torch.Tensor
    zero_point_OG: torch.Tensor | None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight [O, I]: float32 arithmetic, then one rounding to `dtype`."""
        rows, columns = self.codes_OI.shape
        codes_OGg = self.codes_OI.reshape(rows, self.scale_OG.shape[1], -1).float()
        if self.zero_point_OG is not None:
            codes_OGg = codes_OGg - self.zero_point_OG.float()[..., None]
        return (codes_OGg * self.scale_OG.float()[..., None]).reshape(rows, columns).to(dtype)
