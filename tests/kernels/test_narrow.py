"""Narrow floats: every code, every tie and its neighbours, and torch's own dtypes where it has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from compress.kernels import narrow
from compress.kernels.matmul import dequantized

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Format:
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None  # torch's
    sign: int  # the bit
    finite: int  # finite codes of either sign


FORMATS = {
    "e4m3": Format(narrow.encode_e4m3, narrow.decode_e4m3, torch.float8_e4m3fn, 0x80, 0x7F),
    "e5m2": Format(narrow.encode_e5m2, narrow.decode_e5m2, torch.float8_e5m2, 0x80, 0x7C),
    "e2m1": Format(narrow.encode_e2m1, narrow.decode_e2m1, None, 0x8, 0x8),
}
EVERY = pytest.mark.parametrize("name", FORMATS)


def all_codes() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bit for bit, but for the bits of NaNs."""
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.view(torch.int32)[~ours.isnan()], theirs.view(torch.int32)[~theirs.isnan()])


@pytest.mark.parametrize(
    ("decode", "dtype"),
    [
        (narrow.decode_e4m3, torch.float8_e4m3fn),
        (narrow.decode_e5m2, torch.float8_e5m2),
        (narrow.decode_e8m0, torch.float8_e8m0fnu),
    ],
)
def test_all_codes_decode_as_torch_does(decode: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype):
    assert_same(decode(all_codes()), all_codes().view(dtype).float())


def test_all_codes_of_e2m1():
    """From the specification's table."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert_same(narrow.decode_e2m1(torch.arange(16, dtype=torch.uint8)), torch.cat([values, -values]))


@EVERY
def test_every_finite_code_comes_back(name: str):
    form = FORMATS[name]
    for sign in (0, form.sign):
        codes = torch.arange(form.finite, dtype=torch.uint8) | sign
        assert torch.equal(form.encode(form.decode(codes)), codes)


@EVERY
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_even_and_their_neighbours_do_not(name: str, sign: float):
    form = FORMATS[name]
    codes = torch.arange(form.finite, dtype=torch.uint8)
    values = form.decode(codes)
    middle = (values[:-1].double() + values[1:].double()).div(2).float()
    bit = form.sign if sign < 0 else 0
    even = codes[:-1] + (codes[:-1] & 1)
    assert torch.equal(form.encode(sign * middle), even | bit)
    assert torch.equal(form.encode(sign * middle.nextafter(torch.tensor(0.0))), codes[:-1] | bit)
    assert torch.equal(form.encode(sign * middle.nextafter(torch.tensor(INF))), codes[1:] | bit)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_any_number_in_range_is_encoded_as_torch_does(name: str):
    """Two million random bit patterns and the float neighbours of every code: subnormal, tiny, huge, of both signs."""
    form = FORMATS[name]
    bits = torch.randint(-(2**31), 2**31, (2_000_000,), generator=torch.Generator().manual_seed(0))
    values = form.decode(all_codes())
    near = torch.cat([values.nextafter(torch.tensor(INF)), values.nextafter(torch.tensor(-INF))])
    x = torch.cat([bits.to(torch.int32).view(torch.float32), near])
    x = x[x.abs() <= values[form.finite - 1]]
    assert form.dtype is not None
    assert torch.equal(form.encode(x), x.to(form.dtype).view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "x", "code"),
    [
        ("e4m3", [0.0, -0.0, 448.0, 464.0, 1e30, INF, -INF], [0, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE]),
        ("e4m3", [2.0**-9, 2.0**-10, 2.0**-10 * 1.0001, 1e-45, -1e-45], [1, 0, 1, 0, 0x80]),
        ("e5m2", [0.0, -0.0, 57344.0, 65536.0, -1e30, INF, -INF], [0, 0x80, 0x7B, 0x7B, 0xFB, 0x7C, 0xFC]),
        ("e5m2", [2.0**-16, 2.0**-17, 2.0**-17 * 1.0001, 1e-45, -1e-45], [1, 0, 1, 0, 0x80]),
        ("e2m1", [0.0, -0.0, 0.25, 0.2500001, 5.0, 5.0000005, 1e30, -INF], [0, 8, 0, 1, 6, 7, 7, 15]),
    ],
)
def test_ends(name: str, x: list[float], code: list[int]):
    assert FORMATS[name].encode(torch.tensor(x)).tolist() == code


def test_not_a_number():
    x = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    assert narrow.encode_e4m3(x).tolist() == [0x7F, 0x7F, 0x7F, 0xFF]
    assert narrow.encode_e5m2(x).tolist() == [0x7F, 0x7F, 0x7F, 0xFF]
    assert narrow.encode_e2m1(x).tolist() == [7, 7, 7, 15]
    assert narrow.encode_e8m0(x).tolist() == [255] * 4


def test_powers_of_two():
    """As torch does for normal numbers; of subnormal ones torch makes 2^−126 of all above 2^−127."""
    exact = narrow.decode_e8m0(all_codes()[:255])
    assert torch.equal(narrow.encode_e8m0(exact), all_codes()[:255])
    half = (exact[1:254].double() * 1.5).float()
    x = torch.cat([half, half.nextafter(torch.tensor(0.0)), half.nextafter(torch.tensor(INF)), -half])
    assert torch.equal(narrow.encode_e8m0(x), x.to(torch.float8_e8m0fnu).view(torch.uint8))
    least = torch.tensor([0.0, 1e-45, 2.0**-127 * 1.4, 2.0**-127 * 1.5, 2.0**-127 * 1.6, INF, 3.4e38])
    assert narrow.encode_e8m0(least).tolist() == [0, 0, 0, 1, 1, 255, 255]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EVERY
def test_half_formats_are_rounded_once(name: str, dtype: torch.dtype):
    x = torch.linspace(-9, 9, 4001).to(dtype)
    assert torch.equal(FORMATS[name].encode(x), FORMATS[name].encode(x.float()))


@EVERY
def test_float64_is_refused(name: str):
    with pytest.raises(TypeError, match="rounded twice"):
        FORMATS[name].encode(torch.zeros(1, dtype=torch.float64))


def test_nibbles():
    codes = torch.randint(0, 16, (3, 10), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = narrow.pack_nibbles(codes)
    assert packed.shape == (3, 5)
    assert torch.equal(packed & 15, codes[:, 0::2])
    assert torch.equal(narrow.unpack_nibbles(packed), codes)


def outlying(rows: int, columns: int) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    weight[0, 0], weight[1] = 90.0, 0.0
    weight[2] *= 1e-6
    return weight


@pytest.mark.parametrize("scheme", ["tensor", "channel", (128, 128), (16, 32)])
def test_float8_reaches_448_and_errs_by_half_a_step(scheme):
    """Half a step is 2^−4 of a number, or 2^−10 of the scale below the least normal one."""
    weight_OI = outlying(200, 288)
    quantized = narrow.quantize_float8(weight_OI, scheme)
    assert narrow.decode_e4m3(quantized.codes_OI.view(torch.uint8)).abs().max() == 448
    shapes = {"tensor": (1, 1), "channel": (200, 1), (128, 128): (2, 3), (16, 32): (13, 9)}
    assert quantized.scale_AB.shape == shapes[scheme]
    scale_OI = quantized.scale_AB.double()
    if isinstance(scheme, tuple):
        scale_OI = scale_OI.repeat_interleave(scheme[0], 0).repeat_interleave(scheme[1], 1)[:200, :288]
    error = (dequantized(quantized, torch.float64) - weight_OI).abs()
    assert bool((error <= 1.0001 * torch.maximum(weight_OI.abs() * 2**-4, scale_OI * 2**-10)).all())


def test_mxfp4_scales_by_the_specification():
    """Largest magnitude 2^e · m has the scale 2^(e − 2); a row of zeros stays zero; 7 saturates at 6."""
    weight_OI = torch.zeros(3, 64)
    weight_OI[0, :32], weight_OI[0, 32:] = 7.0, -0.11
    weight_OI[2, 5] = 2.0**-140
    quantized = narrow.quantize_mxfp4(weight_OI)
    exponents = quantized.scale_OG.view(torch.uint8).int()
    assert exponents[0].tolist() == [127, 127 - 6]
    assert exponents[2].tolist() == [0, 0]
    dense = dequantized(quantized, torch.float64)
    assert dense[0, 0] == 6.0
    assert dense[0, 32] == -0.09375  # 7.04 · 2^−6 is nearest to 6
    assert bool((dense[1:] == 0).all())


def test_nvfp4_scales_on_two_levels():
    weight_OI = outlying(40, 96)
    quantized = narrow.quantize_nvfp4(weight_OI)
    assert quantized.global_scale == pytest.approx(448 * 6 / 90.0)
    scales = quantized.scale_OG.float()
    assert scales.max() == 448
    assert bool((scales[1] == 0).all())
    dense = dequantized(quantized, torch.float64)
    assert dense[0, 0] == pytest.approx(90.0, rel=1e-6)
    assert bool((dense[1] == 0).all())
    # Half a step of e2m1 is at most 1 of 6; the scale itself errs by 2^−4, or by 2^−10 where it is tiny.
    largest = weight_OI.reshape(40, 6, 16).abs().amax(2).double()
    bound = (largest / 6 * (1 + 2**-4) + 7 * 2**-10 / quantized.global_scale).repeat_interleave(16, 1)
    assert bool(((dense - weight_OI).abs() <= bound).all())


@pytest.mark.parametrize(("quantize", "size"), [(narrow.quantize_nvfp4, 16), (narrow.quantize_mxfp4, 32)])
def test_what_is_representable_is_kept(quantize, size: int):
    """Codes times powers of two, the largest code in every group: nothing is lost."""
    codes = torch.randint(0, 16, (8, 4 * size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    codes[:, ::size] = 7
    scale = 2.0 ** torch.randint(-3, 4, (8, 4), generator=torch.Generator().manual_seed(2)).float()
    scale[0, 0] = 8.0
    weight_OI = narrow.decode_e2m1(codes) * scale.repeat_interleave(size, 1)
    dense = dequantized(quantize(weight_OI), torch.float64)
    torch.testing.assert_close(dense, weight_OI.double(), rtol=2e-7, atol=0)  # 1 / global scale is rounded


@pytest.mark.parametrize("quantize", [narrow.quantize_nvfp4, narrow.quantize_mxfp4])
def test_parts_of_groups_are_refused(quantize):
    with pytest.raises(ValueError, match="40 columns are not whole groups"):
        quantize(torch.zeros(2, 40))
