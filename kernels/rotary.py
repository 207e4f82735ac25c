"""Rotary position embedding: pairs (x[d], x[d + F]) as in Hugging Face's Llama, or (x[2f], x[2f + 1]).

Shapes: T tokens, P positions, H heads, D head dim, F pairs that rotate: D/2, or fewer for a partial rotation.
"""

from __future__ import annotations

import torch


def rotary_tables(
    inverse_F: torch.Tensor, positions_T: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, F] of position · frequency, times `scaling`; computed in float32."""
    angle_TF = positions_T.float()[:, None] * inverse_F[None, :]
    return (angle_TF.cos() * scaling).to(dtype), (angle_TF.sin() * scaling).to(dtype)


class Rotation:
    """cos and sin of one set of frequencies.

    On a CPU they are read from a table of all positions so far, twice as long whenever a position lies beyond it: that
    takes a sixth of the time of computing them, and memory of at most 16 F bytes a position.
    """

    def __init__(self, inverse_F: torch.Tensor, scaling: float, dtype: torch.dtype) -> None:
        self.inverse_F = inverse_F
        self.scaling = scaling
        self.dtype = dtype
        self._tables_PF = rotary_tables(inverse_F, torch.arange(0), scaling, dtype) if inverse_F.is_cpu else None

    def tables(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As rotary_tables."""
        if self._tables_PF is None or not len(positions_T):
            return rotary_tables(self.inverse_F, positions_T, self.scaling, self.dtype)
        last = int(positions_T.max())
        if last >= len(self._tables_PF[0]):
            positions_P = torch.arange(max(1024, 1 << last.bit_length()))
            self._tables_PF = rotary_tables(self.inverse_F, positions_P, self.scaling, self.dtype)
        cos_PF, sin_PF = self._tables_PF
        return cos_PF.index_select(0, positions_T), sin_PF.index_select(0, positions_T)


def rotate(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first 2F dimensions of every head by its position's angles; the rest stay (arXiv 2104.09864)."""
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    turning, still = x_THD.tensor_split((2 * cos_TF.shape[1],), dim=-1)
    low, high = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    first, second = low * cos - high * sin, high * cos + low * sin
    if interleaved:
        return torch.cat((torch.stack((first, second), dim=-1).flatten(-2), still), dim=-1)
    return torch.cat((first, second, still), dim=-1)
