"""y = x·Wᵀ + b with both sides in 8 bits: quantized weights, and tokens quantized as they come.

Shapes: T tokens, O out features, I in features, A × B blocks of 128 × 128 of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.kernels.packing import unpack_int32
from compress.kernels.token_quant import Kind, quantize_tokens
from compress.kernels.weights import Float8Weight, PackedWeight

BLOCK = 128  # rows and columns of a block of a weight, and columns of a token, that share a scale
WIDEST_INT8 = 131072  # in features: 128 · 127 · 131072 is the largest sum, just within int32
NAN_E4M3 = 0x7F  # of both signs, once the sign is masked

Weight = PackedWeight | Float8Weight


@dataclass(frozen=True)
class NarrowWeight:
    """Codes of weights that share their input, one below another.

    scale is float32: [O] for each channel, or [A, B] for blocks; then tokens too have a scale for each 128 columns.
    """

    kind: Kind
    codes_OI: torch.Tensor  # int8 or float8_e4m3fn
    scale: torch.Tensor
    bias_O: torch.Tensor | None

    @property
    def blocks(self) -> bool:
        return self.scale.ndim == 2

    @property
    def nbytes(self) -> int:
        return self.codes_OI.nbytes + self.scale.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)


def narrow_matmul(x_TI: torch.Tensor, weight: NarrowWeight) -> torch.Tensor:
    """y[T, O] in x's dtype: Σ over blocks of (Σ of code products, exact) · scales, plus the bias, in float32.

    Per token and channel (arXiv 2208.07339, section 2.1), or per 128 columns and block of 128 × 128 (arXiv 2412.19437,
    section 3.3.2). Sums of products are float64, in which they are exact.
    """
    codes_TI, scale_TG = quantize_tokens(x_TI, weight.kind, BLOCK if weight.blocks else None)
    if weight.blocks:
        y_TO = torch.zeros(x_TI.shape[0], weight.codes_OI.shape[0], dtype=torch.float32, device=x_TI.device)
        for block in range(scale_TG.shape[1]):
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            sum_TO = codes_TI[:, columns].double() @ weight.codes_OI[:, columns].double().t()
            scale_O = weight.scale[:, block].repeat_interleave(BLOCK)[: y_TO.shape[1]]
            y_TO += sum_TO.float() * scale_TG[:, block, None] * scale_O
    else:
        y_TO = (codes_TI.double() @ weight.codes_OI.double().t()).float() * scale_TG * weight.scale
    if weight.bias_O is not None:
        y_TO += weight.bias_O.float()
    return y_TO.to(x_TI.dtype)


@dataclass(frozen=True)
class W8A8:
    """A linear over 8-bit weights and tokens: the reference, for any device."""

    weight: NarrowWeight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return narrow_matmul(x_TI, self.weight)


def prepare_w8a8(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
) -> W8A8:
    """One linear for weights [O, I] that share their input: their outputs side by side, in order. Errors as join's."""
    return W8A8(join(weights, biases, device, dtype))


def join(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
) -> NarrowWeight:
    """All weights as one, biases in `dtype` (zeros where a weight has none and another has).

    ValueError: a weight whose codes are not 8 bits wide or not symmetric, or are NaN; scales that are neither by
    channel, by tensor, nor by blocks of 128 × 128; weights of unlike kinds; a weight by blocks with another below it
    whose rows do not fill its blocks; int8 rows of more than 131072.
    """
    parts = [_integer(weight) if isinstance(weight, PackedWeight) else _float8(weight) for weight in weights]
    if len({(codes_OI.dtype, scale.ndim) for codes_OI, scale in parts}) != 1:
        raise ValueError("weights that share a matmul differ in their codes or in the shape of their scales")
    if parts[0][1].ndim == 2 and any(codes_OI.shape[0] % BLOCK for codes_OI, _ in parts[:-1]):
        raise ValueError(f"a weight scaled by blocks has rows that do not fill blocks of {BLOCK}: prepare it apart")
    bias_O = None
    if any(bias is not None for bias in biases):
        bias_O = torch.cat(
            [
                torch.zeros(codes_OI.shape[0], dtype=dtype) if bias is None else bias.to("cpu", dtype)
                for bias, (codes_OI, _) in zip(biases, parts, strict=True)
            ]
        ).to(device)
    # cat does not know float8; its bytes it does
    codes_OI = torch.cat([codes_OI.view(torch.int8) for codes_OI, _ in parts]).view(parts[0][0].dtype)
    scale = torch.cat([scale for _, scale in parts])
    kind: Kind = "int8" if codes_OI.dtype == torch.int8 else "e4m3"
    return NarrowWeight(kind, codes_OI.to(device), scale.to(device), bias_O)


def _integer(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    if weight.bits != 8 or weight.zero_point_OG is not None or weight.scale_OG.shape[1] != 1:
        raise ValueError("W8A8 takes integer weights of 8 bits, symmetric, with one scale per channel")
    if weight.columns > WIDEST_INT8:
        raise ValueError(f"{weight.columns} columns of int8; sums of more than {WIDEST_INT8} may pass int32")
    return unpack_int32(weight.words_OW, 8, weight.columns), weight.scale_OG[:, 0].float()


def _float8(weight: Float8Weight) -> tuple[torch.Tensor, torch.Tensor]:
    codes_OI, scale_AB = weight.codes_OI, weight.scale_AB.float()
    rows, columns = codes_OI.shape
    if ((codes_OI.view(torch.uint8) & NAN_E4M3) == NAN_E4M3).any():
        raise ValueError("an e4m3 weight holds NaN")
    if weight.block is None and scale_AB.shape in ((1, 1), (rows, 1)):
        return codes_OI, scale_AB[:, 0].expand(rows).contiguous()
    size = weight.block or (rows // scale_AB.shape[0], columns // scale_AB.shape[1])
    if size == (BLOCK, BLOCK) and scale_AB.shape == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return codes_OI, scale_AB.contiguous()
    raise ValueError(f"scales {tuple(scale_AB.shape)} of an e4m3 weight {rows} × {columns}: by channel, tensor or 128²")
