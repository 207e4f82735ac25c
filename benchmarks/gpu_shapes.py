"""The shapes that are measured: layers of published models, and one large square.

Shapes: O out features, I in features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.kernels.narrow import quantize_mxfp4, quantize_nvfp4
from compress.kernels.packing import packed_words
from compress.kernels.weights import Float4Weight, Float8Weight, PackedWeight


@dataclass(frozen=True)
class Layer:
    model: str
    name: str
    rows: int  # O
    columns: int  # I


LAYERS = (
    Layer("Llama-3.1-8B", "qkv", 6144, 4096),
    Layer("Llama-3.1-8B", "o", 4096, 4096),
    Layer("Llama-3.1-8B", "gate_up", 28672, 4096),
    Layer("Llama-3.1-8B", "down", 4096, 14336),
    Layer("square", "16k", 16384, 16384),
    Layer("Qwen3-0.6B", "qkv", 4096, 1024),
    Layer("Qwen3-0.6B", "o", 1024, 2048),
    Layer("Qwen3-0.6B", "gate_up", 6144, 1024),
    Layer("Qwen3-0.6B", "down", 1024, 3072),
    Layer("Qwen3-0.6B", "lm_head", 151936, 1024),
    Layer("Llama-2-13B", "qkv", 15360, 5120),
    Layer("Llama-2-13B", "o", 5120, 5120),
    Layer("Llama-2-13B", "gate_up", 27648, 5120),
    Layer("Llama-2-13B", "down", 5120, 13824),
    Layer("Llama-3.1-8B", "lm_head", 128256, 4096),
)
SMALL_LAYERS = (Layer("small", "square", 128, 256), Layer("small", "tall", 320, 128))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SMALL_TOKENS = (1, 3, 70)
FORMATS = ("int4", "int8", "fp8", "nvfp4")
CHECKED = (*FORMATS, "int4 asymmetric", "int3", "mxfp4")

Weight = PackedWeight | Float8Weight | Float4Weight


def random_weight(kind: str, rows: int, columns: int, device: torch.device, generator: torch.Generator) -> Weight:
    """A quantized weight of random codes: every bit pattern that its format knows, scales of unlike sizes.

    int3 and int4 have groups of 128 columns, or of 32 where those do not fit, and bfloat16 scales; int8 and fp8 one
    scale a row.
    """

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator) * 0.02 + 0.005

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.int64, device=device, generator=generator)

    if kind.startswith("int"):
        bits = int(kind[3])
        groups = 1 if bits == 8 else columns // (128 if columns % 128 == 0 else 32)
        words_OW = integers(-(2**31), 2**31, rows, packed_words(columns, bits)).to(torch.int32)
        zero_point_OG = integers(-8, 8, rows, groups).to(torch.int8) if "asymmetric" in kind else None
        return PackedWeight(bits, columns, words_OW, uniform(rows, groups).bfloat16(), zero_point_OG)
    normal = torch.randn(rows, columns, device=device, generator=generator)
    if kind == "fp8":
        return Float8Weight((normal * 100).clamp(-448, 448).to(torch.float8_e4m3fn), uniform(rows, 1))
    return (quantize_nvfp4 if kind == "nvfp4" else quantize_mxfp4)(normal * 0.05)
