"""The order in which the GPU's matmul kernels read a weight's codes.

A row is cut into blocks of P·W codes, P = 4 for codes of four bits and 2 for codes of eight, W the width. Word j of a
block (16 bits) holds the codes of columns j, j + W, j + 2W, ... in its bits, low first: with four bits and W = 32,
word j of a block of 128 holds j, j + 32, j + 64 and j + 96. One shift and one mask of two neighbouring words then
give two neighbouring columns of one part, which is what a matrix instruction wants side by side: nothing is
interleaved or moved between threads.

Shapes: O rows, I columns, B blocks of a row, P parts of a block, W width of a part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PADDING = 128  # columns of a row are padded to a multiple of this, whatever the block
SLAB = 1 << 22  # codes worked on at a time


def word_count(columns: int, bits: int) -> int:
    """16-bit words of one row."""
    return -(-columns // PADDING) * PADDING * bits // 16


def pack_words(codes_OI: torch.Tensor, bits: int, width: int, padding: int = 0) -> torch.Tensor:
    """Unsigned codes (uint8, `bits` = 4 or 8 wide) to int16 words [O, word_count]; `padding` is the code of no column.

    ValueError for a width whose blocks do not fill the padded row.
    """
    _check(bits, width)
    rows, columns = codes_OI.shape
    words_OW = torch.empty(rows, word_count(columns, bits), dtype=torch.int16, device=codes_OI.device)
    step = max(1, SLAB // max(columns, 1))
    for first in range(0, rows, step):
        slab = F.pad(codes_OI[first : first + step], (0, -columns % PADDING), value=padding)
        parts_OBPW = slab.reshape(slab.shape[0], -1, 16 // bits, width).to(torch.int32)
        word_OBW = parts_OBPW[:, :, 0]
        for part in range(1, 16 // bits):
            word_OBW = word_OBW | (parts_OBPW[:, :, part] << (bits * part))
        words_OW[first : first + step] = word_OBW.to(torch.int16).reshape(slab.shape[0], -1)
    return words_OW


def unpack_words(words_OW: torch.Tensor, bits: int, width: int, columns: int) -> torch.Tensor:
    """The codes (uint8 [O, columns]) that `pack_words` packed."""
    _check(bits, width)
    rows = words_OW.shape[0]
    codes_OI = torch.empty(rows, columns, dtype=torch.uint8, device=words_OW.device)
    step = max(1, SLAB // max(columns, 1))
    for first in range(0, rows, step):
        word_OBW = words_OW[first : first + step].to(torch.int32).reshape(-1, words_OW.shape[1] // width, width)
        shifts = [bits * part for part in range(16 // bits)]
        parts_OBPW = torch.stack([(word_OBW >> shift) & ((1 << bits) - 1) for shift in shifts], dim=2)
        codes_OI[first : first + step] = parts_OBPW.reshape(word_OBW.shape[0], -1)[:, :columns].to(torch.uint8)
    return codes_OI


def _check(bits: int, width: int) -> None:
    if bits not in (4, 8) or width < 1 or PADDING % (width * 16 // bits):
        raise ValueError(f"no layout of {bits}-bit codes has parts of {width} columns")
