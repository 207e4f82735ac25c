"""Products over quantized weights against float64 products of the weight that is stored.

Tolerance: with u half a unit in the last place of the activations' dtype, one rounding of the result, u·|y|; I + 8
float32 roundings of sums whose terms add up to S = |x|·|W|ᵀ + |b|; and where the kernel says that scales multiply the
weights in the activations' dtype, two roundings of every weight, 2u·S, or a step of the smallest half.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.launch import Target, run
from compress.kernels.matmul import QuantizedWeight, dequantized, matmul
from compress.kernels.matmul_triton import MatmulLinear, plan_matmul, prepare_matmul
from compress.kernels.weights import Float8Weight
from tests.kernels.interpreted.quantized_weights import packed_weight, weight_of

CPU = torch.device("cpu")
HOPPER, AMPERE, MI300 = Target("cuda", 90), Target("cuda", 80), Target("hip", "gfx942")
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
NAMES = (
    "int4 g128",
    "int4 g64 zero",
    "int4 g32 zero",
    "int4 g96",
    "int4 channel",
    "int4 channel zero",
    "int3 g64",
    "int8 channel",
    "int8 g32 zero",
    "int8 g128 zero",
    "int6 channel zero",
    "fp8 channel",
    "fp8 tensor",
    "fp8 block",
    "nvfp4",
    "mxfp4",
)


def activations(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """With outliers, −0 and numbers that are tiny or subnormal in fp16; NaN lies beyond the last column and token."""
    generator = torch.Generator().manual_seed(tokens * 7 + columns)
    x_TI = torch.full((tokens + 1, columns + 8), torch.nan, dtype=dtype)
    x_TI[:tokens, :columns] = torch.randn(tokens, columns, generator=generator).to(dtype)
    x_TI[0, 0], x_TI[tokens - 1, columns - 1], x_TI[0, 1], x_TI[0, 2] = 60.0, -40.0, -0.0, 3e-8
    return x_TI[:tokens, :columns]


def product(linear: MatmulLinear, x_TI: torch.Tensor, target: Target = HOPPER) -> torch.Tensor:
    """Into poisoned memory: what must be written holds NaN before, and what must not still does after."""
    tokens, rows = x_TI.shape[0], linear.words_OW.shape[0]
    held = torch.full((tokens + 1, rows + 5), torch.nan, dtype=x_TI.dtype)
    workspace_STO = torch.full((linear.splits(tokens), tokens, rows), torch.nan)
    run(plan_matmul(x_TI, linear, held[:tokens, :rows], workspace_STO, target))
    assert bool(held[tokens:].isnan().all())
    assert bool(held[:, rows:].isnan().all())
    return held[:tokens, :rows]


def check(weight: QuantizedWeight, bias_O: torch.Tensor | None, x_TI: torch.Tensor, target: Target = HOPPER) -> None:
    linear = prepare_matmul(weight, bias_O, CPU, x_TI.dtype)
    expected_TO = matmul(x_TI, weight, linear.bias_O, torch.float64)
    u, x = ROUNDING[x_TI.dtype], x_TI.double().abs()
    terms_TO = x @ dequantized(weight, torch.float64).abs().t()
    if linear.bias_O is not None:
        terms_TO = terms_TO + linear.bias_O.double().abs()
    bound_TO = u * expected_TO.abs() + (x_TI.shape[1] + 8) * 2.0**-24 * terms_TO + 2.0**-25
    group = linear.form.group
    if x_TI.shape[0] > 64 and group is not None and group < 128 and linear.form.scale != "e4m3":
        bound_TO = bound_TO + 2 * u * terms_TO + 2.0**-24 * x.sum(dim=1, keepdim=True)
    error_TO = (product(linear, x_TI, target).double() - expected_TO).abs()
    assert bool((error_TO <= bound_TO).all()), float((error_TO / bound_TO).nan_to_num(torch.inf).max())


def columns_of(name: str) -> int:
    """A last block that is not full, of whole groups where the form asks for that."""
    return {"channel": 437, "tensor": 437, "block": 437, "nvfp4": 432, "mxfp4": 416, "g32": 416, "g64": 448}.get(
        name.split()[1] if " " in name else name, 384
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 65])
@pytest.mark.parametrize("name", NAMES)
def test_every_form_on_every_path(name: str, tokens: int, dtype: torch.dtype):
    """72 rows: a whole tile and a part of one."""
    columns = columns_of(name)
    weight, bias_O = weight_of(name, 72, columns), torch.linspace(-9, 9, 72)
    check(weight, bias_O, activations(tokens, columns, dtype))


@pytest.mark.parametrize("tokens", [1, 5, 65])
@pytest.mark.parametrize(
    "name", ["int4 g128", "int4 g32 zero", "int8 channel", "int8 g32 zero", "fp8 channel", "nvfp4", "mxfp4"]
)
def test_bfloat16(name: str, tokens: int):
    columns = columns_of(name)
    check(weight_of(name, 40, columns), None, activations(tokens, columns, torch.bfloat16))


@pytest.mark.parametrize("tokens", [2, 16, 17, 64])
@pytest.mark.parametrize("name", ["int4 g64 zero", "int8 channel", "nvfp4"])
def test_splits(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch):
    """As many splits as units of 128 columns, the last of them not full."""
    monkeypatch.setattr("compress.kernels.matmul_triton.SPLIT_COLUMNS", 128)
    columns = columns_of(name)
    weight, bias_O = weight_of(name, 72, columns), torch.linspace(-9, 9, 72)
    assert prepare_matmul(weight, bias_O, CPU, torch.float16).splits(tokens) == 4
    check(weight, bias_O, activations(tokens, columns, torch.float16))


@pytest.mark.parametrize("target", [AMPERE, MI300], ids=str)
@pytest.mark.parametrize("tokens", [17, 64, 300])
def test_tiles_of_other_targets(target: Target, tokens: int):
    check(weight_of("int4 g64 zero", 40, 192), None, activations(tokens, 192, torch.float16), target)


def test_wide_tiles():
    """More than 256 tokens: tiles of 128 by 128."""
    check(weight_of("int4 g128", 136, 128), torch.linspace(-9, 9, 136), activations(300, 128, torch.float16))


def test_bands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("compress.kernels.matmul_triton.BAND", 100)
    check(weight_of("fp8 channel", 72, 160), torch.linspace(-9, 9, 72), activations(230, 160, torch.float16))


@given(
    rows=st.integers(1, 80),
    tokens=st.sampled_from([1, 2, 5, 16, 17, 64, 65]),
    group=st.sampled_from([32, 64, 96, 128, 160, 256, None]),
    groups=st.integers(1, 4),
    rest=st.integers(0, 40),
    bits=st.sampled_from([2, 4, 8]),
    asymmetric=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_shape(
    rows: int,
    tokens: int,
    group: int | None,
    groups: int,
    rest: int,
    bits: int,
    asymmetric: bool,
    biased: bool,
    dtype: torch.dtype,
):
    columns = group * groups if group else 64 * groups + rest
    weight = packed_weight(bits, rows, columns, group, asymmetric)
    check(weight, torch.linspace(-3, 3, rows) if biased else None, activations(tokens, columns, dtype))


@pytest.mark.parametrize("name", ["int4 g64 zero", "int8 channel", "mxfp4"])
@pytest.mark.parametrize("sizes", [(2, 5, 16, 17, 64), (65, 257)], ids=str)
def test_a_token_does_not_depend_on_its_batch(name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Bit for bit within a path, over tiles of all sizes."""
    monkeypatch.setattr("compress.kernels.matmul_triton.SPLIT_COLUMNS", 128)
    columns = {"int8 channel": 437}.get(name, 192)
    linear = prepare_matmul(weight_of(name, 40, columns), torch.linspace(-9, 9, 40), CPU, torch.float16)
    x_TI = activations(sizes[-1], columns, torch.float16)
    whole_TO = product(linear, x_TI)
    for tokens in sizes[:-1]:
        assert torch.equal(product(linear, x_TI[:tokens]), whole_TO[:tokens])


def test_weights_side_by_side():
    """Outputs in order, each with its own bias, zero points and global scale."""
    weights = [weight_of("nvfp4", rows, 160) for rows in (24, 8, 40)]
    biases = [None, torch.linspace(-1, 1, 8), None]
    x_TI = activations(5, 160, torch.float16)
    fused = product(prepare_matmul(weights, biases, CPU, torch.float16), x_TI)
    alone = [
        product(prepare_matmul(weight, bias, CPU, torch.float16), x_TI)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    assert torch.equal(fused, torch.cat(alone, dim=1))
    packed = [packed_weight(4, rows, 160, 32, asymmetric=True) for rows in (24, 40)]
    fused = product(prepare_matmul(packed, [None, None], CPU, torch.float16), x_TI)
    alone = [product(prepare_matmul(weight, None, CPU, torch.float16), x_TI) for weight in packed]
    assert torch.equal(fused, torch.cat(alone, dim=1))


def test_linear_protocol():
    """Its own output, any stride of x, bytes counted."""
    weight = packed_weight(4, 40, 256, 64, asymmetric=True, scale_dtype=torch.bfloat16)
    linear = prepare_matmul(weight, torch.ones(40), CPU, torch.float16)
    assert linear.nbytes == 40 * 128 + 40 * 4 * (2 + 1) + 40 * 2
    x_TI = activations(3, 256, torch.float16)
    assert torch.equal(linear(x_TI), product(linear, x_TI))
    assert torch.equal(linear(x_TI.t().contiguous().t()), product(linear, x_TI))
    assert linear(x_TI[:0]).shape == (0, 40)


def test_whole_codes_in_every_place():
    """One column set at a time: each weight comes out as it is stored, exactly."""
    for name in ("int4 g32 zero", "int8 g32 zero", "fp8 channel", "nvfp4", "mxfp4"):
        weight = weight_of(name, 8, 256)
        linear = prepare_matmul(weight, None, CPU, torch.float32)
        weight_OI = dequantized(weight, torch.float32)
        for tokens in (torch.eye(256)[:64], torch.eye(256)[64:], torch.eye(256)[200:201]):
            torch.testing.assert_close(product(linear, tokens), tokens @ weight_OI.t(), rtol=3e-7, atol=0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="a scale for 16 columns: the GPU kernels take multiples of 32"):
        prepare_matmul(packed_weight(4, 8, 64, 16, asymmetric=False), None, CPU, torch.float16)
    two = [packed_weight(4, 8, 64, group, asymmetric=False) for group in (32, 64)]
    with pytest.raises(ValueError, match="differ in their columns, codes or groups"):
        prepare_matmul(two, [None, None], CPU, torch.float16)
    codes = torch.full((4, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="not finite"):
        prepare_matmul(Float8Weight(codes, torch.ones(4, 1)), None, CPU, torch.float16)
    linear = prepare_matmul(packed_weight(4, 8, 64, 32, asymmetric=False), None, CPU, torch.float16)
    with pytest.raises(ValueError, match="activations have 65 columns, the weight 64"):
        linear(torch.zeros(2, 65, dtype=torch.float16))
