"""Quantized linears of Llama-3.1-8B, 4096 → 14336 and 14336 → 4096: one token, a few, many.

Shapes: O out features, I in features, G groups along I, W words of 32 bits, S splits.
"""

from __future__ import annotations

import functools

import torch

from compress.kernels.gate_case import Case
from compress.kernels.launch import Launch, Target
from compress.kernels.matmul_triton import GEMV_ROWS, ROW_BYTES, Form, MatmulLinear, plan_matmul
from compress.kernels.quarter import word_count

FORMS = {
    "int4 g128": Form("int4", "plain", 128, zero_points=False),
    "int4 g128 asymmetric": Form("int4", "plain", 128, zero_points=True),
    "int4 g64": Form("int4", "plain", 64, zero_points=False),
    "int4 g32": Form("int4", "plain", 32, zero_points=False),
    "int4 g32 asymmetric": Form("int4", "plain", 32, zero_points=True),
    "int4 channel": Form("int4", "plain", None, zero_points=False),
    "int8 channel": Form("int8", "plain", None, zero_points=False),
    "int8 g128 asymmetric": Form("int8", "plain", 128, zero_points=True),
    "fp8 channel": Form("e4m3", "plain", None, zero_points=False),
    "fp8 block": Form("e4m3", "plain", 128, zero_points=False),
    "nvfp4": Form("e2m1", "e4m3", 16, zero_points=False),
    "mxfp4": Form("e2m1", "e8m0", 32, zero_points=False),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Two warps never use the wider instructions that Hopper and Blackwell's data centre chips have for four.
FEW = {
    "sm_80": "HMMA",
    "sm_89": "HMMA",
    "sm_90": "HMMA",
    "sm_100": "HMMA",
    "sm_120": "HMMA",
    "gfx942": "v_mfma",
    "gfx950": "v_mfma",
}
MANY = FEW | {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}
LIMITS = {"sm_80": 5.9, "sm_90": 4.6}  # of the int4 loop, per weight: what decoding may cost beside the products
MIXED = ("int4 g128", "int4 g128 asymmetric", "int4 g32", "int8 channel", "fp8 channel", "fp8 block", "nvfp4", "mxfp4")
# tokens, dtype, forms
PRODUCTS = (
    (1, "bf16", MIXED),
    (1, "fp16", ("int4 g128",)),
    (16, "bf16", tuple(FORMS)),
    (16, "fp16", ("int4 g128", "int4 g128 asymmetric", "int8 channel", "nvfp4", "mxfp4")),
    (16, "fp32", ("int4 g128",)),
    (256, "bf16", MIXED),
    (256, "fp16", ("int4 g128",)),
    (256, "fp32", ("int4 g128",)),
)


def meta_linear(form: Form, rows: int, columns: int, dtype: torch.dtype) -> MatmulLinear:
    """A linear with a bias, of no contents."""
    scale_dtype = dtype if form.scale == "plain" else torch.uint8
    groups = 1 if form.group is None else columns // form.group

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return MatmulLinear(
        form,
        columns,
        words_OW=empty(rows, word_count(columns, form.bits) // 2, dtype=torch.int32),
        scale_GO=None if form.group is None else empty(groups, rows, dtype=scale_dtype),
        zero_point_GO=empty(groups, rows, dtype=torch.int8) if form.zero_points else None,
        gain_O=empty(rows, dtype=torch.float32) if form.group is None or form.scale == "e4m3" else None,
        bias_O=empty(rows, dtype=dtype),
    )


def plan(form: Form, tokens: int, rows: int, columns: int, dtype: torch.dtype, target: Target) -> list[Launch]:
    linear = meta_linear(form, rows, columns, dtype)
    x_TI = torch.empty(tokens, columns, dtype=dtype, device="meta")
    y_TO = torch.empty(tokens, rows, dtype=dtype, device="meta")
    workspace_STO = torch.empty(linear.splits(tokens), tokens, rows, dtype=torch.float32, device="meta")
    return plan_matmul(x_TI, linear, y_TO, workspace_STO, target)


def case(tokens: int, dtype: str, name: str) -> Case:
    """4096 → 14336; an iteration handles one turn of the GEMV's loop, or one block of 64 rows."""
    form = FORMS[name]
    plan_on = functools.partial(plan, form, tokens, 14336, 4096, DTYPES[dtype])
    elements = GEMV_ROWS * ROW_BYTES * 8 // form.bits if tokens == 1 else 64 * form.block
    matrix = {} if tokens == 1 or dtype == "fp32" else FEW if tokens <= 64 else MANY
    most = LIMITS if tokens == 16 and dtype != "fp32" and name == "int4 g128" else {}
    return Case(f"{name} {dtype} M={tokens}", plan_on, elements, matrix, most=most)


CASES: tuple[Case, ...] = (
    *(case(tokens, dtype, name) for tokens, dtype, names in PRODUCTS for name in names),
    Case(
        "int4 g128 bf16 M=64, 14336 to 4096",
        functools.partial(plan, FORMS["int4 g128"], 64, 4096, 14336, torch.bfloat16),
        matrix=FEW,
    ),
    Case(
        "int4 g128 bf16 M=4096",
        functools.partial(plan, FORMS["int4 g128"], 4096, 14336, 4096, torch.bfloat16),
        matrix=MANY,
    ),
)
