"""Which implementation runs where: the one place that knows devices and their capabilities.

linear            CPU: SGEMM in the order that suits the number of tokens; integer weights are dequantized once
                  elsewhere: one GEMM; integer weights are dequantized once
paged attention   everywhere: the reference over gathered pages
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compress.kernels.attention import PagedAttention, PagedQueries
from compress.kernels.linear import DenseLinear, DenseLinearCPU, IntegerWeight, Linear, dequantize

Weight = torch.Tensor | IntegerWeight


def dense(weight: Weight, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A weight as one dense tensor [O, I] of its own memory or the given one."""
    if isinstance(weight, IntegerWeight):
        return dequantize(weight, dtype).to(device)
    return weight.to(device=device, dtype=dtype)


def prepare_linear(
    weights: Sequence[Weight], biases: Sequence[torch.Tensor | None], device: torch.device, dtype: torch.dtype
) -> Linear:
    """One linear for weights [O, I] that share their input: their outputs side by side, in order."""
    parts = [dense(weight, device, dtype) for weight in weights]
    bias_O = None
    if any(bias is not None for bias in biases):
        bias_O = torch.cat(
            [
                bias.to(device=device, dtype=dtype) if bias is not None else part.new_zeros(part.shape[0])
                for bias, part in zip(biases, parts, strict=True)
            ]
        )
    weight_OI = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (DenseLinearCPU if device.type == "cpu" else DenseLinear)(weight_OI, bias_O)


def prepare_attention(queries: PagedQueries) -> PagedAttention:
    """The paged attention of one step."""
    return PagedAttention(queries)
