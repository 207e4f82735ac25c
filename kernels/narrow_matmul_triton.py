"""y = x·Wᵀ with both sides in 8 bits, on a GPU: quantize the tokens, multiply codes, scale the sums.

Three classes of tiles by the number of tokens. Within a class a row's result does not depend on the other rows: the
splits along I follow from O and I alone and are added in order. int8 sums are exact, so there the classes agree too.

e4m3 tensor cores of Hopper (and Ada) add with fewer bits than float32 has. So each 128 products are summed from zero
in the matrix unit and that sum is added in float32: the error of the matrix unit does not grow with I. Where the
compiler has no e4m3, the bytes become float16, which holds every e4m3 value, and float16 products are summed.

Shapes: T tokens, O out, I in features, S splits of I.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from compress.kernels.launch import Launch, Target, run, target_of, unit_stride
from compress.kernels.narrow_matmul import BLOCK, NarrowWeight, Weight, join
from compress.kernels.token_quant import CODE_DTYPE
from compress.kernels.token_quant_triton import decode_e4m3, new_scales, plan_quantize_tokens

Rows = Literal["few", "some", "many"]


@triton.jit(do_not_specialize=["tokens", "x_scale_group"])  # one build for all batches of a class
def _matmul(
    x,
    w,
    x_scale,
    w_scale,
    bias,
    out,
    tokens,
    outs,
    ins,
    span,
    x_row,
    w_row,
    x_scale_token,
    x_scale_group,
    w_scale_row,
    w_scale_group,
    out_row,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    FINISH: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    PANEL: tl.constexpr,
):
    """One tile [BT, BO] over `span` columns of I. KIND: "int8", "e4m3", or "bytes" for w as bytes of e4m3
    and x as their values in float16.

    BLOCKS: scales of x for each 128 columns and of w for each block of 128 × 128 are applied in the loop. FINISH: the
    scales of tokens and channels, and the bias, are applied and y is written; otherwise the sums of this split are.
    EVEN: `span` divides I.
    """
    # Programs that run together share a panel of x's tiles and one tile of w after another: both stay in L2.
    tile, split = tl.program_id(0), tl.program_id(1)
    t_tiles, o_tiles = tl.cdiv(tokens, BT), tl.cdiv(outs, BO)
    first = tile // (PANEL * o_tiles) * PANEL
    height = tl.minimum(t_tiles - first, PANEL)
    within = tile % (PANEL * o_tiles)
    t_tile, o_tile = first + within % height, within // height
    t_in, o_in = tl.arange(0, BT), tl.arange(0, BO)
    # Rows beyond the last are read as the last one, which is there, and never written.
    t_read = tl.minimum(t_in, tokens - 1 - t_tile * BT)
    o_read = tl.minimum(o_in, outs - 1 - o_tile * BO)
    i_in = tl.arange(0, BI)
    start = split * span
    x_tile = x + (t_tile * BT).to(tl.int64) * x_row + start + (t_read[:, None] * x_row + i_in[None, :])
    w_tile = w + (o_tile * BO).to(tl.int64) * w_row + start + (o_read[:, None] * w_row + i_in[None, :])
    if BLOCKS:
        x_scales = x_scale + (t_tile * BT + t_read) * x_scale_token
        w_scales = w_scale + (o_tile * BO // 128) * w_scale_row
    total = tl.zeros((BT, BO), tl.int32 if KIND == "int8" else tl.float32)
    for i in range(start, tl.minimum(start + span, ins), BI):
        if EVEN:
            x_code, w_code = tl.load(x_tile), tl.load(w_tile)
        else:
            inside = (i_in < ins - i)[None, :]
            # an integer does not become an e4m3
            x_code = tl.load(x_tile, mask=inside, other=0.0 if KIND == "e4m3" else 0)
            w_code = tl.load(w_tile, mask=inside, other=0.0 if KIND == "e4m3" else 0)
        if KIND == "int8":
            total = tl.dot(x_code, w_code.T, total, out_dtype=tl.int32)
        else:
            if KIND == "bytes":
                part = tl.dot(x_code, decode_e4m3(w_code).T)
            else:
                part = tl.dot(x_code, w_code.T, max_num_imprecise_acc=BI)
            if BLOCKS:
                group = i // 128
                part *= tl.load(x_scales + group * x_scale_group)[:, None] * tl.load(w_scales + group * w_scale_group)
            total += part
        x_tile += BI
        w_tile += BI
    if KIND == "bytes":
        total *= 256.0  # what decode_e4m3 leaves out
    t, o = t_tile * BT + t_in, o_tile * BO + o_in
    y = total
    if FINISH:
        y = total.to(tl.float32)
        if not BLOCKS:
            y *= tl.load(x_scale + t * x_scale_token, mask=t < tokens, other=0.0)[:, None]
            y *= tl.load(w_scale + o, mask=o < outs, other=0.0)[None, :]
        if ADD_BIAS:
            y += tl.load(bias + o, mask=o < outs, other=0.0).to(tl.float32)[None, :]
    row = split.to(tl.int64) * tokens + t  # out has one matrix, or one for each split
    place = out + row[:, None] * out_row + o[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (o < outs)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _add_splits(
    parts,
    x_scale,
    w_scale,
    bias,
    out,
    tokens,
    outs,
    parts_row,
    x_scale_token,
    out_row,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    BO: tl.constexpr,
):
    """One token's sums over the splits, in order; then as _matmul finishes."""
    token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    inside = o < outs
    source = parts + token * parts_row + o
    total = tl.load(source, mask=inside, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(source + split * tokens.to(tl.int64) * parts_row, mask=inside, other=0)
    y = total.to(tl.float32)
    if not BLOCKS:
        y = y * tl.load(x_scale + token * x_scale_token) * tl.load(w_scale + o, mask=inside, other=0.0)
    if ADD_BIAS:
        y += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + o, y.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tiles:
    """A program's share: tokens, outs, columns of I at a time; how many programs suffice before I is split."""

    tokens: int
    outs: int
    warps: int
    stages: int
    programs: int


COLUMNS = 128  # of I at a time: the width of a block of scales, and of the sums that a matrix unit keeps to itself
LEAST_SPLIT = 512  # columns of I that a split has at least
PANEL = 8  # tiles of tokens that share their way through the weights
MOST_TOKENS: dict[Rows, float] = {"few": 16, "some": 256, "many": float("inf")}


def tiles_of(rows: Rows, kind: str, target: Target) -> Tiles:
    """As wide as each target's registers hold: wgmma and tcgen05 take 128 outs to 4 warps, mma's fragments do not."""
    wide = target.arch in (90, 100)
    # gfx942 has 64 KiB of shared memory, and x in float16 fills twice as much of it
    tight = kind == "bytes" and target.arch == "gfx942"
    if rows == "few":
        return Tiles(16, 64, warps=4, stages=4, programs=512)
    if rows == "many":
        return Tiles(128, 128, warps=8, stages=4 if wide else 2 if tight else 3, programs=1)
    if target.arch in (80, 89):
        return Tiles(64, 64, warps=4, stages=4, programs=384)
    if target.arch == 120:
        return Tiles(64, 128, warps=8, stages=4, programs=192)
    return Tiles(64, 128, warps=4 if wide else 8, stages=2 if tight else 3, programs=192)


def split_span(outs: int, ins: int, tiles: Tiles) -> int:
    """Columns of I in each split, from the shape of the weight alone."""
    wanted = max(1, min(tiles.programs // triton.cdiv(outs, tiles.outs), ins // LEAST_SPLIT))
    splits = 1 << (wanted.bit_length() - 1)
    return -(-ins // (splits * COLUMNS)) * COLUMNS


def rows_of(tokens: int) -> Rows:
    return next(rows for rows, most in MOST_TOKENS.items() if tokens <= most)


@dataclass(frozen=True)
class Scratch:
    """What lies between the launches: quantized tokens, and the sums of the splits where I is split."""

    rows: Rows
    kind: Literal["int8", "e4m3", "bytes"]
    codes_TI: torch.Tensor
    scale_TG: torch.Tensor
    parts_STO: torch.Tensor | None


def new_scratch(x_TI: torch.Tensor, weight: NarrowWeight, target: Target, rows: Rows) -> Scratch:
    tokens, ins = x_TI.shape
    outs = weight.codes_OI.shape[0]
    kind = weight.kind if weight.kind == "int8" or target.native_e4m3 else "bytes"
    dtype = torch.float16 if kind == "bytes" else CODE_DTYPE[weight.kind]
    splits = triton.cdiv(ins, split_span(outs, ins, tiles_of(rows, kind, target)))
    parts_STO = None
    if splits > 1:
        sums = torch.int32 if kind == "int8" else torch.float32
        parts_STO = torch.empty(splits, tokens, outs, dtype=sums, device=x_TI.device)
    codes_TI = torch.empty(tokens, ins, dtype=dtype, device=x_TI.device)
    return Scratch(rows, kind, codes_TI, new_scales(x_TI, BLOCK if weight.blocks else None), parts_STO)


def plan_narrow_matmul(
    x_TI: torch.Tensor, weight: NarrowWeight, scratch: Scratch, out_TO: torch.Tensor, target: Target
) -> list[Launch]:
    """Quantize, multiply, and add the splits if there are any. The last stride of x and out is 1."""
    tokens, (outs, ins) = x_TI.shape[0], weight.codes_OI.shape
    tiles = tiles_of(scratch.rows, scratch.kind, target)
    span = split_span(outs, ins, tiles)
    codes_OI = weight.codes_OI.view(torch.uint8) if scratch.kind == "bytes" else weight.codes_OI
    parts = scratch.parts_STO
    shared = {
        "x_scale": scratch.scale_TG,
        "w_scale": weight.scale,
        "bias": weight.scale if weight.bias_O is None else weight.bias_O,
        "outs": outs,
        "x_scale_token": scratch.scale_TG.stride(0),
        "BLOCKS": weight.blocks,
        "ADD_BIAS": weight.bias_O is not None,
    }
    matmul = {
        "x": scratch.codes_TI,
        "w": codes_OI,
        "out": out_TO if parts is None else parts,
        "tokens": tokens,
        "ins": ins,
        "span": span,
        "x_row": scratch.codes_TI.stride(0),
        "w_row": codes_OI.stride(0),
        "x_scale_group": scratch.scale_TG.stride(1),
        "w_scale_row": weight.scale.stride(0),
        "w_scale_group": 1,
        "out_row": (out_TO if parts is None else parts[0]).stride(0),
        "KIND": scratch.kind,
        "FINISH": parts is None,
        "EVEN": ins % COLUMNS == 0,
        "BT": tiles.tokens,
        "BO": tiles.outs,
        "BI": COLUMNS,
        "PANEL": PANEL,
    }
    grid = (triton.cdiv(tokens, tiles.tokens) * triton.cdiv(outs, tiles.outs), triton.cdiv(ins, span))
    launches = plan_quantize_tokens(
        x_TI, scratch.codes_TI, scratch.scale_TG, target, group=BLOCK if weight.blocks else None
    )
    launches.append(Launch(_matmul, grid, shared | matmul, num_warps=tiles.warps, num_stages=tiles.stages))
    if parts is not None:
        launches.append(_plan_add_splits(parts, shared, out_TO))
    return launches


def _plan_add_splits(parts_STO: torch.Tensor, shared: dict[str, object], out_TO: torch.Tensor) -> Launch:
    splits, tokens, outs = parts_STO.shape
    block = min(1024, triton.next_power_of_2(outs))
    arguments = {
        "parts": parts_STO,
        "out": out_TO,
        "tokens": tokens,
        "parts_row": parts_STO.stride(1),
        "out_row": out_TO.stride(0),
        "SPLITS": splits,
        "BO": block,
    }
    return Launch(_add_splits, (tokens, triton.cdiv(outs, block)), shared | arguments)


@dataclass(frozen=True)
class W8A8Triton:
    """narrow_matmul.W8A8 on a GPU.

    int8 rows are the same to the bit in any batch. e4m3 rows are within each class of batch sizes (up to 16, up to 256,
    more); with `invariant` every batch takes the tiles of the first class, which reads the weights once per 16 tokens.
    """

    weight: NarrowWeight
    invariant: bool = False

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        x_TI, target = unit_stride(x_TI), target_of(x_TI.device)
        scratch = new_scratch(x_TI, self.weight, target, "few" if self.invariant else rows_of(x_TI.shape[0]))
        out_TO = torch.empty(x_TI.shape[0], self.weight.codes_OI.shape[0], dtype=x_TI.dtype, device=x_TI.device)
        run(plan_narrow_matmul(x_TI, self.weight, scratch, out_TO, target))
        return out_TO


def prepare_w8a8(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
    invariant: bool = False,
) -> W8A8Triton:
    """narrow_matmul.prepare_w8a8, run by Triton."""
    return W8A8Triton(join(weights, biases, device, dtype), invariant)
