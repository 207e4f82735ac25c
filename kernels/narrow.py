"""Floats of eight and four bits, bit by bit, and the reference quantizers to them.

name   sign, exponent, mantissa   bias   largest   other
e4m3   1 4 3                      7      448       no infinity; 0x7F and 0xFF are NaN (torch.float8_e4m3fn)
e5m2   1 5 2                      15     57344     infinity and NaN as in IEEE 754 (torch.float8_e5m2)
e2m1   1 2 1                      1      6         neither; four bits in the low half of a byte
e8m0   0 8 0                      127    2^127     powers of two; 0xFF is NaN (torch.float8_e8m0fnu)

Encoders round to nearest, ties to even, and saturate: a finite value beyond the largest becomes the largest.
Formats: arXiv 2209.05433 (e4m3, e5m2); OCP Microscaling Formats v1.0 (e2m1, e8m0).

Shapes: O out features, I in features, G groups along I.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from compress.kernels.weights import Float4Weight, Float8Weight

LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0


def _magnitude(bits: torch.Tensor, mantissa: int, bias: int, largest: int) -> torch.Tensor:
    """Codes (int32) of the float32 magnitudes whose bits these are; at most `largest`."""
    dropped = 23 - mantissa
    bits = bits.clamp(max=0x7F800000)  # a NaN would wrap around
    odd = (bits >> dropped) & 1
    normal = ((bits + (1 << (dropped - 1)) - 1 + odd) >> dropped) - ((127 - bias) << mantissa)
    # Below the least normal number the step is constant: a float32 that large as to have this step rounds the sum.
    magic = torch.tensor(2.0 ** (24 - bias - mantissa), device=bits.device)
    small = (bits.view(torch.float32) + magic).view(torch.int32) - magic.view(torch.int32)
    least_normal = (128 - bias) << 23
    return torch.where(bits < least_normal, small, normal).clamp(max=largest)


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sign (0 or 1) and bits of the magnitude, int32. TypeError for float64, which would be rounded twice."""
    if x.dtype == torch.float64:
        raise TypeError("float64 would be rounded twice: give float32 or narrower")
    bits = x.float().view(torch.int32)
    return (bits >> 31) & 1, bits & 0x7FFFFFFF


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 codes, uint8; beyond 448 and infinite become ±448, NaN becomes NaN (0x7F or 0xFF)."""
    sign, bits = _split(x)
    code = torch.where(bits > 0x7F800000, 0x7F, _magnitude(bits, 3, 7, 0x7E))
    return (sign << 7 | code).to(torch.uint8)


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """Nearest e5m2 codes, uint8; finite beyond 57344 become ±57344, infinities stay, NaN becomes NaN (0x7F or 0xFF)."""
    sign, bits = _split(x)
    code = torch.where(bits == 0x7F800000, 0x7C, _magnitude(bits, 2, 15, 0x7B))
    return (sign << 7 | torch.where(bits > 0x7F800000, 0x7F, code)).to(torch.uint8)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 codes in the low four bits, uint8; beyond 6, infinite and NaN become ±6."""
    sign, bits = _split(x)
    return (sign << 3 | _magnitude(bits, 1, 1, 0x7)).to(torch.uint8)


def encode_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Nearest power of two of the magnitude, uint8; 1.5 · 2^e goes up, zero is 2^−127, infinity and NaN are NaN."""
    _, bits = _split(x)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = mantissa >= torch.where(exponent == 0, 0x600000, 0x400000)  # 2^−127 is subnormal: half as far above zero
    return torch.where(exponent == 255, 255, exponent + up).to(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of e4m3 codes (uint8)."""
    bits = codes.to(torch.int32)
    # The exponent keeps its bias of 7: the product with 2^120 is exact, also where both are subnormal.
    value = ((bits & 0x7F) << 20).view(torch.float32) * 2.0**120
    value = torch.where((bits & 0x7F) == 0x7F, torch.nan, value)
    return torch.where(bits >> 7 == 1, -value, value)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of e5m2 codes (uint8), which are the upper bytes of float16."""
    return (codes.to(torch.int16) << 8).view(torch.float16).float()


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of e2m1 codes (uint8, the low four bits)."""
    bits = codes.to(torch.int32)
    value = ((bits & 7) << 22).view(torch.float32) * 2.0**126
    return torch.where((bits >> 3) & 1 == 1, -value, value)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of e8m0 codes (uint8)."""
    bits = codes.to(torch.int32)
    value = torch.where(bits == 0, 0x00400000, bits << 23).view(torch.float32)  # 2^−127 is subnormal
    return torch.where(bits == 255, torch.nan, value)


def pack_nibbles(codes_OI: torch.Tensor) -> torch.Tensor:
    """uint8 [O, I / 2]: the low nibble of a byte is the even column."""
    return codes_OI[:, 0::2] | (codes_OI[:, 1::2] << 4)


def unpack_nibbles(packed_OB: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 [O, I]."""
    return torch.stack((packed_OB & 15, packed_OB >> 4), dim=2).flatten(1)


def _quotient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, x / scale)


def quantize_float8(
    weight_OI: torch.Tensor, scheme: Literal["tensor", "channel"] | tuple[int, int] = "channel"
) -> Float8Weight:
    """The largest magnitude of each tensor, channel (row) or block (rows, columns) becomes 448; scales are float32."""
    weight_OI = weight_OI.float()
    rows, columns = weight_OI.shape
    block = scheme if isinstance(scheme, tuple) else (rows if scheme == "tensor" else 1, columns)
    padded = F.pad(weight_OI, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.reshape(padded.shape[0] // block[0], block[0], -1, block[1])
    scale_AB = tiles.abs().amax(dim=(1, 3)) / LARGEST_E4M3
    codes = encode_e4m3(_quotient(tiles, scale_AB[:, None, :, None])).reshape(padded.shape)[:rows, :columns]
    return Float8Weight(
        codes.contiguous().view(torch.float8_e4m3fn), scale_AB, scheme if isinstance(scheme, tuple) else None
    )


def quantize_nvfp4(weight_OI: torch.Tensor) -> Float4Weight:
    """Two levels: e4m3 scales of 16 columns that put the group's largest magnitude at 6, under one global scale that
    puts the largest of those scales at 448. ValueError where 16 does not divide the columns."""
    groups_OGg = _groups(weight_OI, 16)
    amax = groups_OGg.abs().amax()
    global_scale = float(LARGEST_E4M3 * LARGEST_E2M1 / amax) if amax > 0 else 1.0
    scale_OG = encode_e4m3(groups_OGg.abs().amax(dim=2) / LARGEST_E2M1 * global_scale)
    codes = encode_e2m1(_quotient(groups_OGg * global_scale, decode_e4m3(scale_OG)[..., None])).flatten(1)
    return Float4Weight("nvfp4", pack_nibbles(codes), scale_OG.view(torch.float8_e4m3fn), global_scale)


def quantize_mxfp4(weight_OI: torch.Tensor) -> Float4Weight:
    """Scale 2^(floor(log2 of the group's largest magnitude) − 2), so that it lies in [4, 8) and saturates at 6 (OCP
    Microscaling Formats v1.0, 6.3). ValueError where 32 does not divide the columns."""
    groups_OGg = _groups(weight_OI, 32)
    exponent_OG = groups_OGg.abs().amax(dim=2).view(torch.int32) >> 23
    scale_OG = (exponent_OG - 2).clamp(min=0).to(torch.uint8)
    codes = encode_e2m1(groups_OGg / decode_e8m0(scale_OG)[..., None]).flatten(1)
    return Float4Weight("mxfp4", pack_nibbles(codes), scale_OG.view(torch.float8_e8m0fnu))


def _groups(weight_OI: torch.Tensor, size: int) -> torch.Tensor:
    rows, columns = weight_OI.shape
    if columns % size:
        raise ValueError(f"{columns} columns are not whole groups of {size}")
    return weight_OI.float().reshape(rows, -1, size)
