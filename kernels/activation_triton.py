"""Gated activations on a GPU.

Shapes: T tokens, I channels of the gate and of the other half.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compress.kernels.activation import Gate
from compress.kernels.launch import Launch, Target, run, target_of, unit_stride

TILE = 1024  # channels of a program: 8 to a thread of 4 warps


@triton.jit
def _gated(x, out, channels, x_token, out_token, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Arithmetic in float32, one rounding."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    gate = tl.load(x + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_token + channels + column, mask=inside, other=0.0).to(tl.float32)
    if GATE == "gelu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    elif GATE == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, without the cancellation at negative u
        share = tl.sigmoid(gate * (1.5957691216057308 + 0.07135481282553984 * gate * gate))
    else:
        share = tl.sigmoid(gate)
    tl.store(out + token * out_token + column, (gate * share * up).to(out.dtype.element_ty), mask=inside)


def plan_gated(x_T2I: torch.Tensor, gate: Gate, out_TI: torch.Tensor, target: Target) -> list[Launch]:
    """Any strides but the last, which is 1; out_TI may be x's first half."""
    tokens, channels = out_TI.shape
    block = min(TILE, triton.next_power_of_2(max(channels, 1)))
    arguments = {
        "x": x_T2I,
        "out": out_TI,
        "channels": channels,
        "x_token": x_T2I.stride(0),
        "out_token": out_TI.stride(0),
        "GATE": gate,
        "BLOCK": block,
    }
    grid = (tokens, triton.cdiv(channels, block))
    return [Launch(_gated, grid, arguments, num_warps=max(1, block // 256))]


def gated(x_T2I: torch.Tensor, gate: Gate) -> torch.Tensor:
    """activation.gated, but for float32 arithmetic and one rounding."""
    x_T2I = unit_stride(x_T2I)
    out_TI = torch.empty(x_T2I.shape[0], x_T2I.shape[1] // 2, dtype=x_T2I.dtype, device=x_T2I.device)
    run(plan_gated(x_T2I, gate, out_TI, target_of(x_T2I.device)))
    return out_TI
