"""Rotary position embedding on a GPU: one token's heads, or a part of them, to a program.

Shapes: T tokens, H heads, D head dim, F pairs that rotate.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compress.kernels.launch import Launch, Target, run, target_of, unit_stride

TILE = 1024  # pairs of one program: 8 values of each half to a thread of 4 warps


@triton.jit
def _rotate(
    x,
    out,
    cos,
    sin,
    heads,
    x_token,
    x_head,
    out_token,
    out_head,
    cos_token,
    sin_token,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    STILL: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_STILL: tl.constexpr,
):
    """Arithmetic in float32, one rounding. STILL dimensions after the 2·PAIRS are copied (0 where out is x)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    source = x + token * x_token + head * x_head
    target = out + token * out_token + head * out_head
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    c = tl.load(cos + token * cos_token + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        inside = (head < heads) & (column < 2 * PAIRS)
        both = tl.load(source + column, mask=inside, other=0.0)
        low, high = tl.split(both.reshape(HEADS, BLOCK_PAIRS, 2))
        low, high = low.to(tl.float32), high.to(tl.float32)
        turned = tl.join((low * c - high * s).to(both.dtype), (high * c + low * s).to(both.dtype))
        tl.store(target + column, turned.reshape(HEADS, 2 * BLOCK_PAIRS), mask=inside)
    else:
        inside = (head < heads) & (pair < PAIRS)
        low = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + PAIRS + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + pair, (low * c - high * s).to(out.dtype.element_ty), mask=inside)
        tl.store(target + PAIRS + pair, (high * c + low * s).to(out.dtype.element_ty), mask=inside)
    if STILL > 0:
        column = tl.arange(0, BLOCK_STILL)[None, :]
        inside = (head < heads) & (column < STILL)
        rest = tl.load(source + 2 * PAIRS + column, mask=inside, other=0.0)
        tl.store(target + 2 * PAIRS + column, rest, mask=inside)


def plan_rotate(
    x_THD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    out_THD: torch.Tensor,
    target: Target,
    *,
    interleaved: bool = False,
) -> list[Launch]:
    """Rotate into out_THD, which may be x_THD itself; any strides but the last, which is 1.

    Queries and keys that lie side by side in one projection are one x_THD: the first heads of its view [T, heads, D].
    The tables are of any float dtype; float32 ones cost nothing more here.
    """
    tokens, heads, head_dim = x_THD.shape
    pairs = cos_TF.shape[1]
    still = 0 if out_THD is x_THD else head_dim - 2 * pairs
    block_pairs = triton.next_power_of_2(pairs)
    block_heads = min(triton.next_power_of_2(heads), max(1, TILE // block_pairs))
    arguments = {
        "x": x_THD,
        "out": out_THD,
        "cos": cos_TF,
        "sin": sin_TF,
        "heads": heads,
        "x_token": x_THD.stride(0),
        "x_head": x_THD.stride(1),
        "out_token": out_THD.stride(0),
        "out_head": out_THD.stride(1),
        "cos_token": cos_TF.stride(0),
        "sin_token": sin_TF.stride(0),
        "INTERLEAVED": interleaved,
        "PAIRS": pairs,
        "STILL": still,
        "HEADS": block_heads,
        "BLOCK_PAIRS": block_pairs,
        "BLOCK_STILL": triton.next_power_of_2(max(still, 1)),
    }
    warps = min(4, max(1, block_heads * block_pairs // 256))
    return [Launch(_rotate, (tokens, triton.cdiv(heads, block_heads)), arguments, num_warps=warps)]


def rotate(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """rotary.rotate, but for float32 arithmetic and one rounding."""
    x_THD, cos_TF, sin_TF = unit_stride(x_THD), unit_stride(cos_TF), unit_stride(sin_TF)
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    run(plan_rotate(x_THD, cos_TF, sin_TF, out_THD, target_of(x_THD.device), interleaved=interleaved))
    return out_THD
