"""Linears over quantized weights on a GPU: their prepared form, and the launches of one product.

Three paths, by the number of tokens T, all with sums in float32:

T = 1          one program for a few rows of W, float32 products (GEMV)
2 ≤ T ≤ 64     the columns in splits, whose number depends on the weight alone; a second launch adds them in order
T > 64         tiles of tokens and rows

Within a path a token's result does not depend on which others are in its batch: every tile size runs the same matrix
instructions over a token's columns in the same order. Sums of groups are scaled in float32, except that scales of
fewer than 128 columns multiply the weights, rounded to the activations' dtype, where T > 64, and always for nvfp4
in both half formats and mxfp4 in bf16, where those products are exact.

Shapes: T tokens, O out features, I in features, G groups along I, W words of 32 bits, S splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compress.kernels.launch import Launch, Target, run, target_of
from compress.kernels.matmul import QuantizedWeight, group_scales, group_size
from compress.kernels.matmul_kernel_triton import gemv_kernel, matmul_kernel, sum_splits_kernel
from compress.kernels.narrow import unpack_nibbles
from compress.kernels.packing import unpack_int32
from compress.kernels.quarter import PADDING, SLAB, pack_words, word_count
from compress.kernels.weights import Float4Weight, Float8Weight, PackedWeight

FEW_TOKENS = 64  # the most that the split path takes
SPLIT_PROGRAMS = 512  # about as many as a large GPU holds at a time: more splits would only add sums
SPLIT_COLUMNS = 512  # the fewest that are worth a split
ROW_BYTES = 512  # of a row of W in one turn of the GEMV's loop: 16 bytes for each thread of a warp
GEMV_ROWS = 4
SUM_COLUMNS = 256
BAND = 2048  # tokens of one launch: their activations stay in the cache while the weights pass
EARLY_FACTOR = 64  # of the kernel: how far it lifts a scale before it multiplies halves


@dataclass(frozen=True)
class Form:
    """What the kernels must know of a weight; weights of one form and as many columns can be fused."""

    code: Literal["int4", "int8", "e4m3", "e2m1"]
    scale: Literal["plain", "e4m3", "e8m0"]
    group: int | None  # columns of a scale; None for one scale a row
    zero_points: bool

    @property
    def bits(self) -> int:
        return 4 if self.code in ("int4", "e2m1") else 8

    @property
    def parts(self) -> int:
        return 16 // self.bits

    @property
    def width(self) -> int:
        """Columns of a part: a scale covers whole parts."""
        if self.group == 16:
            return 16
        return 32 if self.code != "e4m3" or (self.group or 64) % 64 else 64

    @property
    def block(self) -> int:
        return self.parts * self.width

    @property
    def steps(self) -> int:
        """Times that the scale may change within a block."""
        if self.group is None or self.group % self.block == 0:
            return 1
        return 2 if self.group % (self.block // 2) == 0 else self.parts

    def factor(self, dtype: torch.dtype) -> int:
        """What the codes decoded for activations of this dtype are short of."""
        return 1 if dtype == torch.bfloat16 else {"int4": 1, "int8": 1, "e4m3": 1 << 8, "e2m1": 1 << 14}[self.code]


def form_of(weight: QuantizedWeight) -> Form:
    """ValueError for groups that the kernels cannot take."""
    if isinstance(weight, Float4Weight):
        return Form("e2m1", *(("e4m3", 16) if weight.kind == "nvfp4" else ("e8m0", 32)), zero_points=False)
    scale = weight.scale_OG if isinstance(weight, PackedWeight) else weight.scale_AB
    group = None if scale.shape[1] == 1 else group_size(weight)
    if group is not None and (group % 32 or (isinstance(weight, PackedWeight) and weight.columns % group)):
        raise ValueError(f"a scale for {group} columns: the GPU kernels take multiples of 32, or one scale a row")
    if isinstance(weight, Float8Weight):
        return Form("e4m3", "plain", group, zero_points=False)
    return Form("int4" if weight.bits <= 4 else "int8", "plain", group, weight.zero_point_OG is not None)


@dataclass(frozen=True)
class MatmulLinear:
    """Weights side by side in the kernels' layout (quarter.py); see linear.Linear."""

    form: Form
    columns: int
    words_OW: torch.Tensor  # int32
    scale_GO: torch.Tensor | None  # the scales of a tile of rows are neighbours
    zero_point_GO: torch.Tensor | None  # int8
    gain_O: torch.Tensor | None  # float32: a row's only scale, or nvfp4's 1 / global scale
    bias_O: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        tensors = (self.words_OW, self.scale_GO, self.zero_point_GO, self.gain_O, self.bias_O)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def splits(self, tokens: int) -> int:
        """Into how many parts the columns are cut."""
        if not 1 < tokens <= FEW_TOKENS:
            return 1
        return -(-_padded(self.columns) // (PADDING * self.split_units))

    @property
    def split_units(self) -> int:
        """Units of PADDING columns in one split: of the weight's shape alone."""
        units, tiles = _padded(self.columns) // PADDING, -(-self.words_OW.shape[0] // 64)
        wanted = max(1, min(SPLIT_PROGRAMS // tiles, units * PADDING // SPLIT_COLUMNS))
        return max(1, -(-units // wanted))

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        tokens, rows = x_TI.shape[0], self.words_OW.shape[0]
        y_TO = x_TI.new_empty(tokens, rows)
        splits = self.splits(tokens)
        workspace_STO = None if splits == 1 else x_TI.new_empty(splits, tokens, rows, dtype=torch.float32)
        x_TI = x_TI if x_TI.stride(1) == 1 or self.columns == 1 else x_TI.contiguous()
        run(plan_matmul(x_TI, self, y_TO, workspace_STO, target_of(x_TI.device)))
        return y_TO


def prepare_matmul(
    weights: QuantizedWeight | Sequence[QuantizedWeight],
    biases: torch.Tensor | Sequence[torch.Tensor | None] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> MatmulLinear:
    """One linear for weights that share their input, for activations of `dtype`: their outputs side by side, in order.

    ValueError for groups that the kernels cannot take, weights that differ in form or columns, codes or scales that
    are not finite, and scales below zero of four-bit floats.
    """
    weights = list(weights) if isinstance(weights, Sequence) else [weights]
    biases = list(biases) if isinstance(biases, Sequence) else [biases]
    forms = [form_of(weight) for weight in weights]
    columns = [_shape(weight)[1] for weight in weights]
    if len(set(zip(forms, columns, strict=True))) > 1:
        raise ValueError("weights of one linear differ in their columns, codes or groups")
    form = forms[0]
    scale_GO = gain_O = zero_point_GO = bias_O = None
    if form.group is not None:
        scale_GO = torch.cat([_stored_scales(weight, device) for weight in weights]).t().contiguous()
    if form.group is None or form.scale == "e4m3":
        gain_O = torch.cat([_gain(weight, device) for weight in weights])
    if form.zero_points:
        zero_points = [weight.zero_point_OG for weight in weights if isinstance(weight, PackedWeight)]
        zero_point_GO = torch.cat([zero.to(device) for zero in zero_points if zero is not None]).t().contiguous()
    if any(bias is not None for bias in biases):
        bias_O = torch.cat(
            [
                torch.zeros(_shape(weight)[0], dtype=dtype, device=device)
                if bias is None
                else bias.to(device=device, dtype=dtype)
                for weight, bias in zip(weights, biases, strict=True)
            ]
        )
    words_OW = torch.cat([_words(weight, form, device) for weight in weights])
    return MatmulLinear(form, columns[0], words_OW, scale_GO, zero_point_GO, gain_O, bias_O)


def _padded(columns: int) -> int:
    return -(-columns // PADDING) * PADDING


def _shape(weight: QuantizedWeight) -> tuple[int, int]:
    if isinstance(weight, PackedWeight):
        return weight.words_OW.shape[0], weight.columns
    if isinstance(weight, Float4Weight):
        return weight.packed_OB.shape[0], 2 * weight.packed_OB.shape[1]
    return weight.codes_OI.shape[0], weight.codes_OI.shape[1]


def _stored_scales(weight: QuantizedWeight, device: torch.device) -> torch.Tensor:
    """[O, G], in the dtype in which they are stored; bytes for those that the kernels decode."""
    if isinstance(weight, Float4Weight):
        bytes_OG = weight.scale_OG.view(torch.uint8).to(device)
        last = 0x7E if weight.kind == "nvfp4" else 0xFE
        if bool((bytes_OG > last).any()):
            raise ValueError(f"{weight.kind} scales are below zero or not finite")
        return bytes_OG
    if isinstance(weight, PackedWeight):
        return weight.scale_OG.to(device)
    return group_scales(weight).to(device=device, dtype=weight.scale_AB.dtype)


def _gain(weight: QuantizedWeight, device: torch.device) -> torch.Tensor:
    """Float32 [O]."""
    if isinstance(weight, Float4Weight):
        return torch.full((weight.packed_OB.shape[0],), 1 / weight.global_scale, device=device)
    return group_scales(weight)[:, 0].to(device)


def _words(weight: QuantizedWeight, form: Form, device: torch.device) -> torch.Tensor:
    """int32 [O, W], by slabs of rows: only the stored form and the result are ever whole on the device."""
    rows, columns = _shape(weight)
    words_OW = torch.empty(rows, word_count(columns, form.bits) // 2, dtype=torch.int32, device=device)
    step = max(1, SLAB // max(columns, 1))
    for first in range(0, rows, step):
        last = first + step
        if isinstance(weight, PackedWeight):
            codes_OI = unpack_int32(weight.words_OW[first:last].to(device), weight.bits, columns)
            codes_OI = (codes_OI + 8 if form.bits == 4 else codes_OI).view(torch.uint8)
        elif isinstance(weight, Float4Weight):
            codes_OI = unpack_nibbles(weight.packed_OB[first:last].to(device))
        else:
            codes_OI = weight.codes_OI[first:last].view(torch.uint8).to(device)
            if bool(((codes_OI & 0x7F) == 0x7F).any()):
                raise ValueError("8-bit float weights are not finite")
        packed = pack_words(codes_OI, form.bits, form.width, padding=8 if form.code == "int4" else 0)
        words_OW[first:last] = packed.view(torch.int32)
    return words_OW


def _tile(tokens: int, form: Form, dtype: torch.dtype, target: Target) -> tuple[int, int, int, int]:
    """Tokens and rows of a tile, warps, stages."""
    # Four warps on 64 rows have wider instructions here, of another order of sums than those for few tokens.
    wide = target.arch in (90, 100)
    hip, few = target.backend == "hip", tokens <= FEW_TOKENS
    stages = 2 if hip else 3
    if dtype == torch.float32 and not few:
        return 32, 64, 4, stages  # no matrix instruction: the operands fill the registers
    if hip and few:
        return 16, 64, 2, stages  # tiles of 32 tokens have another instruction
    if few and dtype == torch.float32 and target.arch == 100:
        return 16, 32, 2, stages  # 64 rows spill, or fall to an instruction of less precision
    if tokens <= 16:
        return 16, 64, 4 if form.zero_points and dtype == torch.float16 and target.arch == 120 else 2, 4
    if few:
        return (32, 64, 2, stages) if wide else (32 if tokens <= 32 else 64, 64, 4, stages)
    if tokens > 256 and target.arch == 100:
        return 64, 128, 4, stages  # of 128 tokens Triton 3.7 makes an empty program
    return (128, 128, 8, stages) if tokens > 256 and (wide or hip) else (64, 64, 4, stages)


def plan_matmul(
    x_TI: torch.Tensor, weight: MatmulLinear, y_TO: torch.Tensor, workspace_STO: torch.Tensor | None, target: Target
) -> list[Launch]:
    """y = x·Wᵀ + b. `workspace_STO` (float32, contiguous, [weight.splits(T), T, O]) is needed for more than one split.

    Neighbouring columns of x and y are neighbours in memory. ValueError where x has another number of columns.
    """
    if x_TI.shape[1] != weight.columns:
        raise ValueError(f"activations have {x_TI.shape[1]} columns, the weight {weight.columns}")
    tokens = x_TI.shape[0]
    if tokens == 1:
        return [_gemv(x_TI, weight, y_TO)]
    if tokens > FEW_TOKENS:
        bands = zip(x_TI.split(BAND), y_TO.split(BAND), strict=True)
        tile = _tile(tokens, weight.form, x_TI.dtype, target)
        return [_tiles(x_bI, weight, y_bO, 1, tile, _early(weight.form, x_TI.dtype)) for x_bI, y_bO in bands]
    tile, splits = _tile(tokens, weight.form, x_TI.dtype, target), weight.splits(tokens)
    early = _exact(weight.form, x_TI.dtype)
    if splits == 1 or workspace_STO is None:
        return [_tiles(x_TI, weight, y_TO, 1, tile, early)]
    return [_tiles(x_TI, weight, workspace_STO, splits, tile, early), _sum_splits(weight, workspace_STO, y_TO)]


def _exact(form: Form, dtype: torch.dtype) -> bool:
    """Whether products of codes and scales are exact in this dtype; those of mxfp4 reach beyond fp16."""
    return form.scale == "e4m3" or (form.scale == "e8m0" and dtype == torch.bfloat16)


def _early(form: Form, dtype: torch.dtype) -> bool:
    """Whether scales multiply the weights where T is large: the sums of few columns would be scaled too often."""
    if form.code == "e2m1":
        return _exact(form, dtype)
    # float16 has too few exponents for any scale
    return form.group is not None and form.group < 128 and form.code != "e4m3" and dtype != torch.float16


def _common(x_TI: torch.Tensor, weight: MatmulLinear) -> dict[str, Any]:
    form = weight.form
    return {
        "x_ptr": x_TI,
        "w_ptr": weight.words_OW,
        "scale_ptr": weight.scale_GO,
        "zero_ptr": weight.zero_point_GO,
        "gain_ptr": weight.gain_O,
        "bias_ptr": weight.bias_O,
        "O": weight.words_OW.shape[0],
        "I": weight.columns,
        "w_stride": weight.words_OW.stride(0),
        "blocks": -(-weight.columns // form.block),
        "CODE": form.code,
        "SCALE": form.scale,
        "GROUP": form.group or 0,
        "STEPS": form.steps,
        "PARTS": form.parts,
        "WIDTH": form.width,
    }


def _gemv(x_TI: torch.Tensor, weight: MatmulLinear, y_TO: torch.Tensor) -> Launch:
    form = weight.form
    turn = ROW_BYTES // (2 * form.width)
    arguments = _common(x_TI, weight) | {
        "y_ptr": y_TO,
        "FACTOR": form.factor(torch.float32),
        "EVEN": weight.columns % (turn * form.block) == 0,
        "BLOCKS": turn,
        "BLOCK_O": GEMV_ROWS,
    }
    # One warp: x never moves between the threads that load it and those that multiply it.
    return Launch(gemv_kernel, (-(-weight.words_OW.shape[0] // GEMV_ROWS),), arguments, num_warps=1)


def _tiles(
    x_TI: torch.Tensor,
    weight: MatmulLinear,
    out: torch.Tensor,
    splits: int,
    tile: tuple[int, int, int, int],
    early: bool,
) -> Launch:
    """Into y [T, O], or into the splits' sums [S, T, O]."""
    form, tokens, rows = weight.form, x_TI.shape[0], weight.words_OW.shape[0]
    block_t, block_o, warps, stages = tile
    common, factor = _common(x_TI, weight), form.factor(x_TI.dtype)
    arguments = common | {
        "y_ptr": out,
        "T": tokens,
        "x_stride": x_TI.stride(0),
        "y_stride": out.stride(-2),
        "split_stride": tokens * rows,
        "split_blocks": common["blocks"] if splits == 1 else weight.split_units * (PADDING // form.block),
        "EARLY": early,
        "FACTOR": factor // EARLY_FACTOR if early and factor > 1 else factor,
        "EVEN": weight.columns % form.block == 0,
        "SPLIT": splits > 1,
        "BLOCK_T": block_t,
        "BLOCK_O": block_o,
    }
    return Launch(matmul_kernel, (-(-tokens // block_t), -(-rows // block_o), splits), arguments, warps, stages)


def _sum_splits(weight: MatmulLinear, workspace_STO: torch.Tensor, y_TO: torch.Tensor) -> Launch:
    tokens, rows = y_TO.shape
    arguments = {
        "part_ptr": workspace_STO,
        "gain_ptr": weight.gain_O,
        "bias_ptr": weight.bias_O,
        "y_ptr": y_TO,
        "O": rows,
        "y_stride": y_TO.stride(0),
        "split_stride": tokens * rows,
        "SPLITS": workspace_STO.shape[0],
        "BLOCK_O": SUM_COLUMNS,
    }
    return Launch(sum_splits_kernel, (tokens, -(-rows // SUM_COLUMNS)), arguments, num_warps=2)
