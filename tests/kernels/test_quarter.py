"""The layout of the GPU's weights, word by word and there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels import quarter


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


def test_word_j_of_a_block_holds_j_and_every_32nd_after_it():
    codes = random_codes(3, 256, 4)
    words = quarter.pack_words(codes, 4, 32)
    assert words.shape == (3, 64)
    for row in range(3):
        for block in range(2):
            for j in range(32):
                nibbles = [int(codes[row, 128 * block + j + 32 * part]) for part in range(4)]
                expected = nibbles[0] | nibbles[1] << 4 | nibbles[2] << 8 | nibbles[3] << 12
                assert int(words[row, 32 * block + j]) & 0xFFFF == expected


def test_bytes_share_a_word_with_those_a_width_on():
    codes = random_codes(2, 128, 8)
    words = quarter.pack_words(codes, 8, 64).view(torch.uint8).reshape(2, 64, 2)  # low byte first
    assert torch.equal(words[..., 0], codes[:, :64])
    assert torch.equal(words[..., 1], codes[:, 64:])


@pytest.mark.parametrize(("bits", "width"), [(4, 16), (4, 32), (8, 32), (8, 64)])
@given(rows=st.integers(0, 9), columns=st.integers(1, 400))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_there_and_back(bits: int, width: int, rows: int, columns: int):
    codes = random_codes(rows, columns, bits)
    words = quarter.pack_words(codes, bits, width, padding=8)
    assert words.shape == (rows, quarter.word_count(columns, bits))
    assert torch.equal(quarter.unpack_words(words, bits, width, columns), codes)
    padded = quarter.unpack_words(words, bits, width, words.shape[1] * 16 // bits)
    assert bool((padded[:, columns:] == 8).all())


def test_every_code_in_every_place():
    codes = torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 128)
    words = quarter.pack_words(codes, 4, 32)
    assert torch.equal(words.to(torch.int32) & 0xFFFF, (torch.arange(16) * 0x1111)[:, None].expand(16, 32))
    assert torch.equal(quarter.unpack_words(words, 4, 32, 128), codes)


def test_slabs_join_seamlessly(monkeypatch: pytest.MonkeyPatch):
    codes = random_codes(50, 200, 4)
    whole = quarter.pack_words(codes, 4, 16)
    monkeypatch.setattr(quarter, "SLAB", 200 * 7)
    assert torch.equal(quarter.pack_words(codes, 4, 16), whole)
    assert torch.equal(quarter.unpack_words(whole, 4, 16, 200), codes)


@pytest.mark.parametrize(("bits", "width"), [(4, 24), (3, 32), (8, 128), (4, 0)])
def test_other_layouts_are_refused(bits: int, width: int):
    with pytest.raises(ValueError, match=f"no layout of {bits}-bit codes has parts of {width} columns"):
        quarter.pack_words(random_codes(2, 128, 3), bits, width)
