"""W8A8: exact where the codes are exact, near the dense product elsewhere, and what is refused."""

from __future__ import annotations

import pytest
import torch

from compress.kernels.linear import Linear
from compress.kernels.narrow_matmul import W8A8, Weight, join, prepare_w8a8
from compress.kernels.packing import pack_int32
from compress.kernels.weights import Float8Weight, PackedWeight

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(outs: int, ins: int, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """A weight of every int8 code, and the dense one it stands for."""
    codes = torch.randint(-128, 128, (outs, ins), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    scale = torch.exp2(torch.randint(-9, -5, (outs, 1), generator=torch.Generator().manual_seed(seed)).float())
    return PackedWeight(8, ins, pack_int32(codes, 8), scale, None), codes.float() * scale


def float8(outs: int, ins: int, kind: str, seed: int = 0) -> tuple[Float8Weight, torch.Tensor]:
    codes = (randn(outs, ins, seed=seed) * 50).to(torch.float8_e4m3fn)
    if kind == "blocks":
        scale = torch.exp2(randn(-(-outs // 128), -(-ins // 128), seed=1).round() - 5)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outs, :ins]
        return Float8Weight(codes, scale, (128, 128)), codes.float() * wide
    scale = torch.exp2(randn(1 if kind == "tensor" else outs, 1, seed=1).round() - 5)
    return Float8Weight(codes, scale), codes.float() * scale


def weight_of(kind: str, outs: int, ins: int, seed: int = 0) -> tuple[Weight, torch.Tensor]:
    return packed(outs, ins, seed) if kind == "int8" else float8(outs, ins, kind, seed)


@pytest.mark.parametrize("kind", ["int8", "tensor", "channels", "blocks"])
def test_exact_codes_give_exact_products(kind: str) -> None:
    """Activations that are codes times a power of two, the largest code in each group: nothing is lost but in sums of
    float32, which are exact here or off by 2e-7 of Σ|x·w|."""
    weight, dense = weight_of(kind, 130, 300)
    largest = 127.0 if kind == "int8" else 448.0
    x = (randn(4, 300, seed=2) * largest / 4).clamp(-largest, largest)
    x = x.round() if kind == "int8" else x.to(torch.float8_e4m3fn).float()
    x[:, [0, 128, 299]] = largest
    x *= torch.tensor([1.0, 2.0, 0.25, 2.0**-20])[:, None]
    bias = randn(130, seed=3)
    y = prepare_w8a8([weight], [bias], CPU, torch.float32)(x)
    exact = x.double() @ dense.double().t() + bias.double()
    magnitude = x.double().abs() @ dense.double().abs().t() + bias.double().abs()
    assert ((y.double() - exact).abs() <= 2e-7 * magnitude).all()


@pytest.mark.parametrize("kind", ["int8", "tensor", "channels", "blocks"])
def test_near_the_dense_product(kind: str) -> None:
    """Each x is off by at most half a step: of its row's largest / 127; or 2^-4 of x itself in e4m3, or 2^-10 of the
    scale below its normals."""
    weight, dense = weight_of(kind, 130, 300)
    x = randn(5, 300, seed=2)
    x[0, 7] = 60.0
    y = prepare_w8a8([weight], [None], CPU, torch.float32)(x)
    largest = x.abs().amax(1, keepdim=True)
    off = largest / 254 * torch.ones_like(x) if kind == "int8" else x.abs() / 16 + largest / 448 / 1024
    bound = off.double() @ dense.double().abs().t() * (1 + 1e-4) + 1e-4
    error = (y.double() - x.double() @ dense.double().t()).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-3  # it is quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "tensor", "channels", "blocks"])
def test_weights_side_by_side(kind: str, dtype: torch.dtype) -> None:
    """Outputs are those of each weight alone, to the bit; a weight without a bias beside one with it has zeros."""
    first, second = weight_of(kind, 256, 200, seed=0)[0], weight_of(kind, 70, 200, seed=1)[0]
    x, bias = randn(3, 200, seed=2).to(dtype), randn(70, seed=3)
    both: Linear = prepare_w8a8([first, second], [None, bias], CPU, dtype)
    apart = [prepare_w8a8([first], [None], CPU, dtype)(x), prepare_w8a8([second], [bias], CPU, dtype)(x)]
    y = both(x)
    assert y.dtype == dtype
    assert torch.equal(y, torch.cat(apart, 1))
    scales = 2 * 2 + 2 if kind == "blocks" else 326
    assert both.nbytes == 326 * 200 + 4 * scales + 326 * dtype.itemsize


def test_no_rows() -> None:
    weight, _ = packed(10, 40)
    assert prepare_w8a8([weight], [None], CPU, torch.float32)(torch.empty(0, 40)).shape == (0, 10)


def test_a_token_that_is_not_finite_spoils_its_row() -> None:
    weight, _ = float8(10, 300, "blocks")
    x = randn(2, 300)
    x[1, 150] = torch.inf
    y = W8A8(join([weight], [None], CPU, torch.float32))(x)
    assert y[1].isnan().all()
    assert y[0].isfinite().all()


def refused(*weights: Weight) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller compares the text
        join(weights, [None] * len(weights), CPU, torch.float32)
    return str(caught.value)


def test_what_is_refused() -> None:
    codes = torch.zeros(130, 256, dtype=torch.float8_e4m3fn)
    words, scale = pack_int32(torch.zeros(4, 256, dtype=torch.int8), 8), torch.ones(4, 1)
    zero = torch.zeros(4, 1, dtype=torch.int8)
    assert "symmetric" in refused(PackedWeight(8, 256, words, scale, zero))
    assert "8 bits" in refused(PackedWeight(4, 512, words, scale, None))
    assert "one scale per channel" in refused(PackedWeight(8, 256, words, torch.ones(4, 2), None))
    assert "131072" in refused(PackedWeight(8, 131076, words, scale, None))
    assert "130 × 256" in refused(Float8Weight(codes, torch.ones(130, 2)))
    assert "130 × 256" in refused(Float8Weight(codes, torch.ones(3, 4), (64, 64)))
    blocks = Float8Weight(codes, torch.ones(2, 2), (128, 128))
    assert "do not fill blocks" in refused(blocks, blocks)
    assert "differ" in refused(blocks, Float8Weight(codes, torch.ones(130, 1)))
    assert "differ" in refused(packed(4, 256)[0], Float8Weight(codes, torch.ones(1, 1)))
    spoilt = codes.clone()
    spoilt.view(torch.uint8)[5, 5] = 0xFF
    assert "NaN" in refused(Float8Weight(spoilt, torch.ones(1, 1)))


def test_blocks_that_follow_from_the_shapes() -> None:
    codes = (randn(256, 384) * 50).to(torch.float8_e4m3fn)
    scale = randn(2, 3, seed=1).abs()
    told, found = (
        join([Float8Weight(codes, scale, block)], [None], CPU, torch.float32) for block in ((128, 128), None)
    )
    assert torch.equal(told.scale, found.scale)
    assert found.blocks
