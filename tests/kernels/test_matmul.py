"""The reference product over stored weights, and what a plan depends on."""

from __future__ import annotations

import pytest
import torch

from compress.kernels.matmul import dequantized, group_scales, group_size, matmul
from compress.kernels.narrow import pack_nibbles
from compress.kernels.packing import pack_int32
from compress.kernels.weights import Float4Weight, Float8Weight, PackedWeight


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_packed_weights(bits: int, asymmetric: bool):
    torch.manual_seed(0)
    limit = 1 << (bits - 1)
    codes = torch.randint(-limit, limit, (6, 96), dtype=torch.int8)
    scale, zero = torch.rand(6, 3).bfloat16(), torch.randint(-limit, limit, (6, 3), dtype=torch.int8)
    zero = zero if asymmetric else None
    packed = PackedWeight(bits, 96, pack_int32(codes, bits), scale, zero)
    centred = codes.float() if zero is None else codes - zero.float().repeat_interleave(32, 1)
    expected = centred * scale.float().repeat_interleave(32, 1)
    assert torch.equal(dequantized(packed, torch.float32), expected)
    x, bias = torch.randn(5, 96), torch.randn(6)
    torch.testing.assert_close(matmul(x, packed, bias), x @ expected.t() + bias)
    assert matmul(x, packed, bias, torch.float64).dtype == torch.float64


def test_blocks_by_hand():
    """3 × 5 in blocks of 2 × 4: the last row and column of blocks are partly filled."""
    values = torch.arange(15.0).reshape(3, 5)
    scale_AB = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    weight = Float8Weight(values.to(torch.float8_e4m3fn), scale_AB, (2, 4))
    factor = torch.tensor([[1.0, 1, 1, 1, 2], [1, 1, 1, 1, 2], [4, 4, 4, 4, 8]])
    assert torch.equal(dequantized(weight, torch.float32), values * factor)
    assert group_size(weight) == 4
    assert group_scales(weight).shape == (3, 2)


def test_four_bit_floats_by_hand():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)[None]
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    row = torch.cat([values, -values])
    scale = torch.tensor([[1.5, 0.25]]).to(torch.float8_e4m3fn)
    nvfp4 = Float4Weight("nvfp4", pack_nibbles(codes), scale, global_scale=2.0)
    assert torch.equal(dequantized(nvfp4, torch.float32), torch.cat([row * 0.75, row * 0.125])[None])
    scale = torch.tensor([[130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    mxfp4 = Float4Weight("mxfp4", pack_nibbles(codes), scale)
    assert torch.equal(dequantized(mxfp4, torch.float32), torch.cat([row * 8, row * 8])[None])


def test_a_plan_depends_on_the_number_of_tokens_by_path_alone():
    """Splits for 2 to 64 tokens: as many for all of them, of whole blocks, none too many; and one launch elsewhere."""
    pytest.importorskip("triton")
    from compress.kernels.gate_cases.matmul import FORMS, meta_linear, plan
    from compress.kernels.launch import TARGETS

    for name, form in FORMS.items():
        for rows, columns, splits in ((14336, 4096, 2), (4096, 14336, 8), (4096, 4096, 8), (128256, 4096, 1)):
            linear = meta_linear(form, rows, columns, torch.bfloat16)
            assert {linear.splits(tokens) for tokens in range(2, 65)} == {splits}, name
            assert {linear.splits(tokens) for tokens in (0, 1, 65, 4096)} == {1}
        for target in TARGETS:
            counts = [len(plan(form, tokens, 4096, 4096, torch.bfloat16, target)) for tokens in (1, 2, 64, 65, 5000)]
            assert counts == [1, 2, 2, 1, 3]
