"""Activations to 8 bits on a GPU. The codes are made by bit operations, so they are the same on every target.

Shapes: T tokens, I columns, G groups of columns.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compress.kernels.launch import Launch, Target, run, target_of, unit_stride
from compress.kernels.token_quant import CODE_DTYPE, LARGEST, Kind

WIDEST = 16384  # columns of one scale that a program holds in registers
TILE = 4096  # elements of a program whose groups are shorter


@triton.jit
def encode_e4m3(value):
    """float32 in [−448, 448] to the byte of its nearest e4m3, ties to even.

    A normal's 23 fraction bits are rounded to 3 in the integer; the carry may step the exponent, which is right. Below
    2^-6 the codes count steps of 2^-9: the float adder rounds to them when 2^14 is added, whose last place is 2^-9.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # 960: (127 − 7) << 3
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_int8(value):
    """float32 in [−127, 127] to the nearest integer, ties to even: what the adder leaves of it below 1.5·2^23."""
    return ((value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def decode_e4m3(code):
    """A byte to float16: its value times 2^-8, exactly, subnormals too. NaN becomes 480·2^-8."""
    # Sign-extended and shifted by 7: the sign, a copy of it that is cleared, 4 bits of exponent and 3 of fraction.
    return ((code.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True)


@triton.jit
def _magnitude(value):
    """As integers, magnitudes order as they do as floats, with infinity and then NaN above all finite ones."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _step(largest, LARGEST: tl.constexpr):
    """The scale for a largest magnitude, and 1 for one that is not finite."""
    # IEEE division here and of the values: the codes are those of the reference to the bit.
    step = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), LARGEST), 1.1754943508222875e-38)
    return tl.where(largest < 0x7F800000, step, 1.0)


@triton.jit
def _encode(value, step, finite, LARGEST: tl.constexpr, INTEGER: tl.constexpr, HALF: tl.constexpr):
    """HALF: the e4m3 values themselves, as float16."""
    ratio = tl.where(finite, tl.div_rn(value, step), 0.0)
    if INTEGER:
        code = encode_int8(ratio)
    else:
        code = encode_e4m3(tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST))
        if HALF:
            code = decode_e4m3(code) * 256.0
    return code


@triton.jit(do_not_specialize=["scale_group"])  # one build for all batches
def _quantize_groups(
    x,
    codes,
    scale,
    groups,
    columns,
    x_token,
    codes_token,
    scale_token,
    scale_group,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """GROUPS groups of WIDTH columns of one token, in registers; a WIDTH of 0 means all columns."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, BLOCK)[None, :]
    column = group[:, None] * WIDTH + within
    inside = column < columns
    if WIDTH > 0:
        inside = inside & (within < WIDTH)
    value = tl.load(x + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(_magnitude(value), axis=1)
    finite = largest < 0x7F800000
    step = _step(largest, LARGEST)
    code = _encode(value, step[:, None], finite[:, None], LARGEST, INTEGER, HALF)
    tl.store(codes + token * codes_token + column, code, mask=inside)
    place = scale + token * scale_token + group * scale_group
    tl.store(place, tl.where(finite, step, float("nan")), mask=group < groups)


@triton.jit
def _quantize_wide(
    x,
    codes,
    scale,
    columns,
    x_token,
    codes_token,
    scale_token,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All columns of one token, read twice: the second time from cache."""
    token = tl.program_id(0).to(tl.int64)
    source, within = x + token * x_token, tl.arange(0, BLOCK)
    largest_each = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        value = tl.load(source + start + within, mask=start + within < columns, other=0.0).to(tl.float32)
        largest_each = tl.maximum(largest_each, _magnitude(value))
    largest = tl.max(largest_each, axis=0)
    finite = largest < 0x7F800000
    step = _step(largest, LARGEST)
    for start in range(0, columns, BLOCK):
        inside = start + within < columns
        value = tl.load(source + start + within, mask=inside, other=0.0).to(tl.float32)
        code = _encode(value, step, finite, LARGEST, INTEGER, HALF)
        tl.store(codes + token * codes_token + start + within, code, mask=inside)
    tl.store(scale + token * scale_token, tl.where(finite, step, float("nan")))


def plan_quantize_tokens(
    x_TI: torch.Tensor,
    codes_TI: torch.Tensor,
    scale_TG: torch.Tensor,
    target: Target,
    *,
    group: int | None = None,
) -> list[Launch]:
    """Codes (int8, float8_e4m3fn) and scales as token_quant.quantize_tokens; any strides but the columns', which is 1.

    float16 codes_TI receive the values of e4m3 codes, for targets without e4m3.

    ValueError: a group of more than 16384 columns that is not the whole row.
    """
    tokens, columns = x_TI.shape
    integer, half = codes_TI.dtype == torch.int8, codes_TI.dtype == torch.float16
    shared = {
        "x": x_TI,
        "codes": codes_TI if integer or half else codes_TI.view(torch.uint8),
        "scale": scale_TG,
        "columns": columns,
        "x_token": x_TI.stride(0),
        "codes_token": codes_TI.stride(0),
        "scale_token": scale_TG.stride(0),
        "LARGEST": LARGEST["int8" if integer else "e4m3"],
        "INTEGER": integer,
        "HALF": half,
    }
    groups = scale_TG.shape[1]
    width = group or columns
    if width > WIDEST:
        if groups > 1:
            raise ValueError(f"groups of {width} columns; at most {WIDEST}")
        return [Launch(_quantize_wide, (tokens,), shared | {"BLOCK": TILE}, num_warps=8)]
    block = triton.next_power_of_2(max(width, 1))
    tile = min(max(1, TILE // block), triton.next_power_of_2(groups))
    shape = {"groups": groups, "scale_group": scale_TG.stride(1), "WIDTH": group or 0, "GROUPS": tile, "BLOCK": block}
    warps = min(16, max(1, tile * block // 512))
    return [Launch(_quantize_groups, (tokens, triton.cdiv(groups, tile)), shared | shape, num_warps=warps)]


def new_scales(x_TI: torch.Tensor, group: int | None) -> torch.Tensor:
    """Room for scales [T, G]; those of one group lie side by side, as a matmul reads them."""
    tokens, columns = x_TI.shape
    groups = triton.cdiv(columns, group) if group else 1
    return torch.empty(groups, tokens, dtype=torch.float32, device=x_TI.device).t()


def quantize_tokens(x_TI: torch.Tensor, kind: Kind, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """token_quant.quantize_tokens, bit for bit."""
    x_TI = unit_stride(x_TI)
    codes_TI = torch.empty(x_TI.shape, dtype=CODE_DTYPE[kind], device=x_TI.device)
    scale_TG = new_scales(x_TI, group)
    run(plan_quantize_tokens(x_TI, codes_TI, scale_TG, target_of(x_TI.device), group=group))
    return codes_TI, scale_TG
