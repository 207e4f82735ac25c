"""Linears over rows of a checkpoint read in place by the compiled kernels (linear.c).

Shapes: T tokens, O out features, I in features, G groups along I, P panels of 16 rows, W words of a row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compress.kernels.cpu.call import LINEAR, Call, empty, head, run
from compress.kernels.cpu.isa import Isa
from compress.kernels.weights import PackedWeight

ROWS = 16  # of a panel
MAX_BLOCK = 128  # columns that share an activation scale, at most
ALIGNMENT = 16  # columns: a block is a multiple of it
_KINDS = {4: 0, 8: 1, torch.bfloat16: 2, torch.float16: 3, torch.float32: 4}
_SCALES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class _Part(ctypes.Structure):
    """Part of linear.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("column", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
    )


class _LinearCall(Call):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("y_stride", "m", "k", "block", "group")),
        ("parts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


@dataclass(frozen=True)
class CompiledLinear:
    """y = x·Wᵀ + b for rows of 4-bit or 8-bit codes, or of floats, that stay where they are.

    Not `exact`: each block of a token's columns is quantized to 8 bits (W4A8, W8A8), for codes alone. `exact`: float32
    activations. Each output is one chain of operations that depends on I alone: its bits are the same for any number
    of tokens and threads, on every instruction set.
    """

    out_features: int
    in_features: int
    block: int
    group: int
    exact: bool
    isa: Isa
    parts: ctypes.Array[_Part]
    held: tuple[torch.Tensor, ...]  # what the pointers in `parts` point into

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """float32 [T, O] of float32 [T, I]; other activations are computed in float32 and rounded once."""
        if x_TI.dtype != torch.float32:
            return self(x_TI.float()).to(x_TI.dtype)
        if x_TI.stride(-1) != 1:
            x_TI = x_TI.contiguous()
        if x_TI.shape[1] != self.in_features:
            raise ValueError(f"x has {x_TI.shape[1]} columns, the weight {self.in_features}")
        y_TO = empty(x_TI.shape[0], self.out_features)
        run(
            _LinearCall(
                *head(LINEAR, self.isa, int(self.exact)),
                x_TI.data_ptr(),
                x_TI.stride(0),
                y_TO.data_ptr(),
                self.out_features,
                x_TI.shape[0],
                self.in_features,
                self.block,
                self.group,
                ctypes.addressof(self.parts),
                len(self.parts),
            )
        )
        return y_TO


def refusal(weight: torch.Tensor | PackedWeight) -> str | None:
    """Why the compiled kernels do not read a weight; None where they do."""
    if isinstance(weight, torch.Tensor):
        return None if weight.dtype in _KINDS else f"{weight.dtype} rows"
    if weight.bits not in (4, 8):
        return f"{weight.bits}-bit codes"
    group = _group(weight)
    if weight.scale_OG.shape[1] > 1 and group % ALIGNMENT:
        return f"groups of {group} columns, which is not a multiple of {ALIGNMENT}"
    if weight.scale_OG.dtype not in _SCALES:
        return f"{weight.scale_OG.dtype} scales"
    return None


def prepare_compiled(
    weights: Sequence[torch.Tensor | PackedWeight], biases: Sequence[torch.Tensor | None], isa: Isa, exact: bool
) -> CompiledLinear:
    """One linear for weights of one kind, which is not refused: their outputs side by side, in order."""
    first = weights[0]
    parts, held, column = [], [], 0
    for weight, bias in zip(weights, biases, strict=True):
        part, tensors = _part(weight, bias, column)
        parts.append(part)
        held += tensors
        column += part.n
    in_features = first.shape[1] if isinstance(first, torch.Tensor) else first.columns
    group = in_features if isinstance(first, torch.Tensor) else _group(first)
    return CompiledLinear(
        out_features=column,
        in_features=in_features,
        block=block_of(in_features, group),
        group=group,
        exact=exact or isinstance(first, torch.Tensor),
        isa=isa,
        parts=(_Part * len(parts))(*parts),
        held=tuple(held),
    )


def block_of(columns: int, group: int) -> int:
    """Columns that share an activation scale: the largest multiple of 16, up to 128, that divides the group.

    A group as wide as the row may end within a block.
    """
    if group == columns:
        return MAX_BLOCK if columns > MAX_BLOCK and columns % MAX_BLOCK == 0 else _widest(columns)
    return max(size for size in range(ALIGNMENT, MAX_BLOCK + 1, ALIGNMENT) if group % size == 0)


def _widest(columns: int) -> int:
    """The largest block that wastes nothing, else 64."""
    return next((size for size in range(MAX_BLOCK, 31, -ALIGNMENT) if columns % size == 0), 64)


def _group(weight: PackedWeight) -> int:
    return weight.columns if weight.scale_OG.shape[1] == 1 else weight.columns // weight.scale_OG.shape[1]


def kind_of(weight: torch.Tensor | PackedWeight) -> tuple[object, int]:
    """Weights of one kind can be computed by one call: the same rows, the same groups."""
    return (weight.dtype, 0) if isinstance(weight, torch.Tensor) else (weight.bits, _group(weight))


def _part(
    weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, column: int
) -> tuple[_Part, list[torch.Tensor]]:
    rows = weight if isinstance(weight, torch.Tensor) else weight.words_OW
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    held = [rows]
    part = _Part(
        rows=rows.data_ptr(),
        row_bytes=rows.stride(0) * rows.element_size(),
        n=rows.shape[0],
        column=column,
        kind=_KINDS[rows.dtype if isinstance(weight, torch.Tensor) else weight.bits],
    )
    if isinstance(weight, PackedWeight):
        scale_PGr = _panels(weight.scale_OG)
        part.scale, part.scale_type = scale_PGr.data_ptr(), _SCALES[scale_PGr.dtype]
        held.append(scale_PGr)
        if weight.zero_point_OG is not None:
            zero_PGr = _panels(weight.zero_point_OG.to(torch.int8))
            part.zero = zero_PGr.data_ptr()
            held.append(zero_PGr)
    if bias is not None:
        bias_O = bias.float().contiguous()
        part.bias = bias_O.data_ptr()
        held.append(bias_O)
    return part, held


def _panels(table_OG: torch.Tensor) -> torch.Tensor:
    """[P, G, 16]: the scales of 16 rows side by side, zeros where rows are missing."""
    panels = math.ceil(table_OG.shape[0] / ROWS)
    padded = F.pad(table_OG, (0, 0, 0, panels * ROWS - table_OG.shape[0]))
    return padded.view(panels, ROWS, -1).transpose(1, 2).contiguous()
