"""Packing is bit-exact to compressed-tensors, the layout's own implementation."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from compress.kernels import packing


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    limit = 1 << (bits - 1)
    return torch.randint(-limit, limit, (rows, columns), generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [1, 31, 32, 72, 576])
def test_equals_compressed_tensors(bits: int, columns: int):
    codes = random_codes(5, columns, bits)
    packed = packing.pack_int32(codes, bits)
    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert torch.equal(packing.unpack_int32(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("rows", [1, 12, 192])
def test_rows_equal_compressed_tensors(bits: int, rows: int):
    codes = random_codes(rows, 9, bits)
    packed = packing.pack_rows(codes, bits)
    assert torch.equal(packed, pack_to_int32(codes, bits, packed_dim=0))
    assert torch.equal(packing.unpack_rows(packed, bits, rows), codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_slabs_join_seamlessly(bits: int, monkeypatch: pytest.MonkeyPatch):
    codes = random_codes(50, 96, bits)
    whole = packing.pack_int32(codes, bits)
    monkeypatch.setattr(packing, "SLAB", 96 * 7)
    assert torch.equal(packing.pack_int32(codes, bits), whole)
    assert torch.equal(packing.unpack_int32(whole, bits, 96), codes)


def test_four_bit_codes_are_nibbles_in_place():
    """A kernel reads the rows from the file as they are: byte j holds code 2j low and 2j + 1 high, each plus 8."""
    codes = random_codes(3, 64, 4)
    packed = packing.pack_int32(codes, 4).view(torch.uint8)
    assert torch.equal((packed & 15).to(torch.int8) - 8, codes[:, 0::2])
    assert torch.equal((packed >> 4).to(torch.int8) - 8, codes[:, 1::2])
