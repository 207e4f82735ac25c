"""RMSNorm on a GPU: one pass, a row or a few short rows to a program.

Shapes: T tokens, C channels, H heads, D head dim.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compress.kernels.launch import Launch, Target, run, target_of, unit_stride

WIDEST = 32768  # channels one program holds in registers
TILE = 1024  # elements of a program whose rows are shorter


@triton.jit(do_not_specialize=["rows"])  # one build for all batches
def _rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    heads,
    channels,
    eps,
    x_token,
    x_head,
    residual_token,
    residual_head,
    weight_head,
    out_token,
    out_head,
    total_token,
    total_head,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = norm(x + residual) · weight, total = x + residual; row r is head r % heads of token r // heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = (row // heads).to(tl.int64), row % heads
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < channels)
    value = tl.load(x + (token * x_token + head * x_head) + column, mask=inside, other=0.0)
    if ADD:
        extra = tl.load(residual + (token * residual_token + head * residual_head) + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + extra.to(tl.float32)).to(value.dtype)
        tl.store(total + (token * total_token + head * total_head) + column, value, mask=inside)
    gain = tl.load(weight + head * weight_head + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / channels
    scaled = wide * tl.rsqrt(mean + eps)[:, None]
    if UNIT_OFFSET:
        normed = scaled * (1.0 + gain.to(tl.float32))
    else:
        normed = scaled.to(value.dtype).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + (token * out_token + head * out_head) + column, normed.to(out.dtype.element_ty), mask=inside)


def plan_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    target: Target,
    *,
    unit_offset: bool = False,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> list[Launch]:
    """x, out, residual and total are [T, C], or [T, H, D] for a norm of each head, with weight [C], [D] or [H, D].

    Any strides but the last, which is 1; out may be x, and total may be residual or x. Given a residual, the sum is
    written to `total`. ValueError: more than 32768 channels.
    """
    tokens, channels = x.shape[0], x.shape[-1]
    if channels > WIDEST:
        raise ValueError(f"{channels} channels; a row of at most {WIDEST} is normalized")
    extra, sums = (x, x) if residual is None or total is None else (residual, total)
    heads = x.shape[1] if x.ndim == 3 else 1
    block = triton.next_power_of_2(channels)
    rows = max(1, TILE // block)
    arguments = {
        "x": x,
        "residual": extra,
        "weight": weight,
        "out": out,
        "total": sums,
        "rows": tokens * heads,
        "heads": heads,
        "channels": channels,
        "eps": eps,
        "weight_head": weight.stride(0) if weight.ndim == 2 else 0,
        "ADD": residual is not None,
        "UNIT_OFFSET": unit_offset,
        "ROWS": rows,
        "BLOCK": block,
    }
    for name, tensor in (("x", x), ("residual", extra), ("out", out), ("total", sums)):
        arguments[f"{name}_token"] = tensor.stride(0)
        arguments[f"{name}_head"] = tensor.stride(1) if tensor.ndim == 3 else 0
    warps = min(16, max(1, rows * block // 512))
    return [Launch(_rms_norm, (triton.cdiv(tokens * heads, rows),), arguments, num_warps=warps)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """norm.rms_norm."""
    x, weight = unit_stride(x), unit_stride(weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(plan_rms_norm(x, weight, eps, out, target_of(x.device), unit_offset=unit_offset))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm.add_rms_norm."""
    x, residual, weight = unit_stride(x), unit_stride(residual), unit_stride(weight)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    target = target_of(x.device)
    run(plan_rms_norm(x, weight, eps, out, target, unit_offset=unit_offset, residual=residual, total=total))
    return out, total
