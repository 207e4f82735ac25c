"""W8A8 matmuls, at shapes of Llama-3.1-8B and SmolLM2-135M. The quantization in front is among the small kernels.

Matrix instructions: 16 tokens are too few for wgmma and tcgen05, so mma serves them, and its e4m3 on Hopper and
Blackwell's data-centre chips is float16's: the compiler widens the codes. Instructions per element count the weights
of sm_80's tile; at M=64 the tiles of all but sm_80 and sm_89 have twice as many.
"""

from __future__ import annotations

from functools import partial

import torch

from compress.kernels.gate_case import Case
from compress.kernels.launch import Launch, Target
from compress.kernels.narrow_matmul import BLOCK, NarrowWeight
from compress.kernels.narrow_matmul_triton import COLUMNS, new_scratch, plan_narrow_matmul, rows_of, tiles_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INT8 = {"sm_80": "IMMA", "sm_89": "IMMA", "sm_120": "IMMA", "gfx942": "v_mfma_i32", "gfx950": "v_mfma_i32"}
INT8_FEW = INT8 | {"sm_90": "IMMA", "sm_100": "IMMA"}
INT8_MANY = INT8 | {"sm_90": "IGMMA", "sm_100": "UTCIMMA|IMMA"}  # Triton 3.7 does not know it
E4M3 = {"sm_80": "HMMA", "sm_89": "QMMA", "sm_120": "QMMA", "gfx942": "v_mfma_f32", "gfx950": "v_mfma_f32"}
E4M3_FEW = E4M3 | {"sm_90": "HMMA", "sm_100": "HMMA"}
E4M3_MANY = E4M3 | {"sm_90": "QGMMA", "sm_100": "UTCQMMA"}


def _plan(kind: str, tokens: int, outs: int, ins: int, bias: bool, dtype: torch.dtype, target: Target) -> list[Launch]:
    """The matmul and the addition of its splits."""
    codes = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    shape = (-(-outs // BLOCK), -(-ins // BLOCK)) if kind == "e4m3 blocks" else (outs,)
    weight = NarrowWeight(
        "int8" if kind == "int8" else "e4m3",
        torch.empty(outs, ins, dtype=codes, device="meta"),
        torch.empty(shape, dtype=torch.float32, device="meta"),
        torch.empty(outs, dtype=dtype, device="meta") if bias else None,
    )
    x_TI = torch.empty(tokens, ins, dtype=dtype, device="meta")
    out_TO = torch.empty(tokens, outs, dtype=dtype, device="meta")
    scratch = new_scratch(x_TI, weight, target, rows_of(tokens))
    return plan_narrow_matmul(x_TI, weight, scratch, out_TO, target)[1:]


def _case(kind: str, tokens: int, outs: int, ins: int, name: str, bias: bool = False) -> Case:
    tiles = tiles_of(rows_of(tokens), "int8", Target("cuda", 80))
    few = tokens <= tiles.tokens and tiles.tokens == 16
    matrix = (INT8_FEW if few else INT8_MANY) if kind == "int8" else (E4M3_FEW if few else E4M3_MANY)
    return Case(
        f"W8A8 {kind} M={tokens} {outs}x{ins}{' bias' if bias else ''} {name}",
        partial(_plan, kind, tokens, outs, ins, bias, DTYPES[name]),
        elements=tiles.outs * COLUMNS,
        matrix=matrix,
        tiles_in_flight=(tiles.stages - 1, (tiles.tokens + tiles.outs) * COLUMNS),
    )


CASES: tuple[Case, ...] = tuple(
    _case(kind, tokens, outs, ins, name, bias)
    for kind in ("int8", "e4m3", "e4m3 blocks")
    for tokens, outs, ins, name, bias in (
        (1, 4096, 4096, "bf16", False),  # split
        (16, 28672, 4096, "bf16", False),  # whole
        (16, 28672, 4096, "fp16", True),
        (64, 4096, 14336, "bf16", False),
        (512, 28672, 4096, "bf16", True),
        (512, 4096, 14336, "fp16", False),
        (1, 960, 576, "bf16", False),  # 576 = 4.5 blocks: masked loads
        (64, 3072, 576, "fp16", True),
    )
)
