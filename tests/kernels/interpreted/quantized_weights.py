"""Small weights of every form that the matmul kernels take, with scales and zero points at their limits."""

from __future__ import annotations

import torch

from compress.kernels import narrow
from compress.kernels.matmul import QuantizedWeight
from compress.kernels.packing import pack_int32
from compress.kernels.weights import PackedWeight


def packed_weight(
    bits: int, rows: int, columns: int, group: int | None, asymmetric: bool, scale_dtype: torch.dtype = torch.float32
) -> PackedWeight:
    """Codes, zero points and scales over their whole range; a row of scales a hundred times the others."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns + bits)
    limit, groups = 1 << (bits - 1), columns // (group or columns)
    codes = torch.randint(-limit, limit, (rows, columns), generator=generator, dtype=torch.int8)
    scale = (torch.rand(rows, groups, generator=generator) * 0.1 + 0.001) * 8 / limit
    scale[0] *= 100
    zero = torch.randint(-limit, limit, (rows, groups), generator=generator, dtype=torch.int8)
    zero[-1], zero[0] = -limit, limit - 1
    return PackedWeight(bits, columns, pack_int32(codes, bits), scale.to(scale_dtype), zero if asymmetric else None)


def float_weight(rows: int, columns: int) -> torch.Tensor:
    """Outliers, a zero row, a tiny row, −0."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight_OI = torch.randn(rows, columns, generator=generator)
    weight_OI[0, 0], weight_OI[-1], weight_OI[rows // 2] = 300.0, 0.0, weight_OI[rows // 2] * 1e-4
    weight_OI[1 % rows, ::3] = -0.0
    return weight_OI


def weight_of(name: str, rows: int, columns: int) -> QuantizedWeight:
    dense_OI = float_weight(rows, columns)
    if name == "fp8 channel":
        return narrow.quantize_float8(dense_OI)
    if name == "fp8 tensor":
        return narrow.quantize_float8(dense_OI, "tensor")
    if name == "fp8 block":
        return narrow.quantize_float8(dense_OI, (128, 128))
    if name == "nvfp4":
        return narrow.quantize_nvfp4(dense_OI)
    if name == "mxfp4":
        return narrow.quantize_mxfp4(dense_OI)
    kind, group, *zero = name.split()
    size = None if group == "channel" else int(group[1:])
    scale_dtype = torch.bfloat16 if group == "g32" else torch.float16 if group == "g64" else torch.float32
    return packed_weight(int(kind[3:]), rows, columns, size, bool(zero), scale_dtype)
