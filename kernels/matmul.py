"""x·Wᵀ + b over a weight as a checkpoint stores it: the reference of the matmul kernels.

Shapes: T tokens, O out features, I in features, G groups along I.
"""

from __future__ import annotations

import torch

from compress.kernels.narrow import decode_e2m1, decode_e4m3, decode_e8m0, unpack_nibbles
from compress.kernels.packing import unpack_int32
from compress.kernels.weights import Float4Weight, Float8Weight, PackedWeight

QuantizedWeight = PackedWeight | Float8Weight | Float4Weight


def group_scales(weight: QuantizedWeight) -> torch.Tensor:
    """Float32 scales of the groups of each row, [O, G]: blocks and tensors repeated, e4m3 and e8m0 decoded."""
    if isinstance(weight, PackedWeight):
        return weight.scale_OG.float()
    if isinstance(weight, Float4Weight):
        decode = decode_e4m3 if weight.kind == "nvfp4" else decode_e8m0
        return decode(weight.scale_OG.view(torch.uint8))
    rows = weight.codes_OI.shape[0]
    height = weight.block[0] if weight.block else rows // weight.scale_AB.shape[0]
    return weight.scale_AB.float().repeat_interleave(height, dim=0)[:rows]


def group_size(weight: QuantizedWeight) -> int:
    """Columns that share a scale; the last group of a row of blocks may hold fewer."""
    if isinstance(weight, PackedWeight):
        return weight.columns // weight.scale_OG.shape[1]
    if isinstance(weight, Float4Weight):
        return 16 if weight.kind == "nvfp4" else 32
    return weight.block[1] if weight.block else weight.codes_OI.shape[1] // weight.scale_AB.shape[1]


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight [O, I], computed in `dtype` (float32 or float64)."""
    scale_OG = group_scales(weight).to(dtype)
    if isinstance(weight, PackedWeight):
        value_OI = unpack_int32(weight.words_OW, weight.bits, weight.columns).to(dtype)
        if weight.zero_point_OG is not None:
            value_OI -= weight.zero_point_OG.to(dtype).repeat_interleave(group_size(weight), dim=1)
    elif isinstance(weight, Float8Weight):
        value_OI = decode_e4m3(weight.codes_OI.view(torch.uint8)).to(dtype)
    else:
        value_OI = decode_e2m1(unpack_nibbles(weight.packed_OB)).to(dtype)
        scale_OG = scale_OG / weight.global_scale
    return value_OI * scale_OG.repeat_interleave(group_size(weight), dim=1)[:, : value_OI.shape[1]]


def matmul(
    x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """y[T, O] = x·Wᵀ + b with every step in `dtype`, not rounded to that of x."""
    y_TO = x_TI.to(dtype) @ dequantized(weight, dtype).t()
    return y_TO if bias_O is None else y_TO + bias_O.to(dtype)
