"""Integer codes ↔ int32 words, in the dense layout of compressed-tensors.

Code i of a row (plus 2^(bits−1), so that it is unsigned) occupies bits [i·bits, (i+1)·bits) of the row's little-endian
bit stream; 32 codes fill exactly `bits` words, and 3, 5, 6 and 7 bit codes may straddle two words.

Shapes: R rows, C columns, W = ceil(C·bits / 32) words; G groups of 32 codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SLAB = 1 << 20  # codes worked on at a time: the int32 intermediates stay at 4 MiB


def packed_words(columns: int, bits: int) -> int:
    """int32 words of one row."""
    return -(-columns * bits // 32)


def pack_int32(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 codes in [−2^(bits−1), 2^(bits−1)) to int32 [R, W]."""
    rows, columns = codes_RC.shape
    words = packed_words(columns, bits)
    out = torch.empty(rows, words, dtype=torch.int32, device=codes_RC.device)
    step = max(1, SLAB // max(columns, 1))
    for first in range(0, rows, step):
        slab = codes_RC[first : first + step]
        out[first : first + step] = _pack_slab(slab, bits)[:, :words]
    return out


def unpack_int32(packed_RW: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The int8 codes [R, columns] that `pack_int32` packed."""
    rows = packed_RW.shape[0]
    out = torch.empty(rows, columns, dtype=torch.int8, device=packed_RW.device)
    step = max(1, SLAB // max(columns, 1))
    for first in range(0, rows, step):
        out[first : first + step] = _unpack_slab(packed_RW[first : first + step], bits)[:, :columns]
    return out


def pack_rows(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """As `pack_int32` along the first dimension: int32 [ceil(R·bits / 32), C]; how zero points are stored."""
    return pack_int32(codes_RC.t(), bits).t().contiguous()


def unpack_rows(packed: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """The int8 codes [rows, C] that `pack_rows` packed."""
    return unpack_int32(packed.t(), bits, rows).t().contiguous()


def _pack_slab(codes: torch.Tensor, bits: int) -> torch.Tensor:
    unsigned = codes.to(torch.int32) + (1 << (bits - 1))
    unsigned = F.pad(unsigned, (0, -codes.shape[1] % 32)).reshape(codes.shape[0], -1, 32)
    words_RGb = unsigned.new_zeros(*unsigned.shape[:2], bits)
    for i in range(32):
        word, offset = divmod(i * bits, 32)
        words_RGb[..., word] |= unsigned[..., i] << offset
        if offset + bits > 32:
            words_RGb[..., word + 1] |= unsigned[..., i] >> (32 - offset)
    return words_RGb.reshape(codes.shape[0], -1)


def _unpack_slab(packed: torch.Tensor, bits: int) -> torch.Tensor:
    words_RGb = F.pad(packed, (0, -packed.shape[1] % bits)).reshape(packed.shape[0], -1, bits)
    codes_RG32 = torch.empty(*words_RGb.shape[:2], 32, dtype=torch.int8, device=packed.device)
    for i in range(32):
        word, offset = divmod(i * bits, 32)
        low = min(bits, 32 - offset)
        # The shift is arithmetic; the mask removes the sign bits it brings in.
        code = (words_RGb[..., word] >> offset) & ((1 << low) - 1)
        if low < bits:
            code |= (words_RGb[..., word + 1] & ((1 << (bits - low)) - 1)) << low
        codes_RG32[..., i] = code - (1 << (bits - 1))
    return codes_RG32.reshape(packed.shape[0], -1)
