"""What a quantization walk will need of this machine: memory, scratch disk and FLOPs, from the config alone.

Each figure follows what `blockwise` and `quant` hold at once; none depends on how many samples there are, except the
scratch files and the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compress.arch import BLOCK_LINEARS, TAPS, ModelSpec
from compress.recipe import CalibrationSettings, QuantizeSettings, resolve_method
from compress.roofline import attention_flops, block_weights

FLOAT = 4  # the walk computes in float32
LIBRARIES = 400 << 20  # resident after importing torch and reading the tokenizer; measured on Linux x86-64
CHUNK_TOKENS = 4096  # tokens of one pass through a block; a longer sequence goes alone
SCALE_STEPS = 22  # AWQ's grid of exponents, and the held-out errors before and after
RANGE_STEPS = {True: 41, False: 60}  # candidates of a range search, symmetric or not
# A step of a search scales, rounds, clamps, subtracts and compares each weight: passes over memory, not products.
ELEMENTWISE_FLOPS = 200  # SGEMM FLOPs that take as long as one such step takes for one weight


@dataclass(frozen=True)
class WalkCost:
    """Bytes by what holds them, and the FLOPs of the stage."""

    memory: dict[str, int]
    disk: dict[str, int]
    flops: float
    tokens: int

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())


def walk_cost(
    spec: ModelSpec, settings: QuantizeSettings, calibration: CalibrationSettings | None, finished_bytes: int
) -> WalkCost:
    """Price one quantize stage; `finished_bytes` is what its part files will hold."""
    length = calibration.sequence_length if calibration else 0
    tokens = calibration.samples * length if calibration else 0
    disk = {"finished blocks": finished_bytes}
    if tokens:
        disk["hidden states"] = 2 * tokens * spec.hidden * FLOAT
        if _rounds_in_sequence(settings):
            width = spec.heads * spec.head_dim + spec.hidden + spec.intermediate
            disk["inputs of o_proj and the MLP"] = tokens * width * FLOAT
    return WalkCost(_memory(spec, settings, tokens, length), disk, _flops(spec, settings, tokens, length), tokens)


def _rounds_in_sequence(settings: QuantizeSettings) -> bool:
    """Whether taps are quantized one after the other, each from the outputs of those before it."""
    method = resolve_method(settings)
    return method.rounding == "gptq" or method.transform == "none"


def tap_widths(spec: ModelSpec) -> list[int]:
    """Input features of each tap of a block."""
    return [spec.linear_shape(tap.linears[0])[1] for tap in TAPS]


def _memory(spec: ModelSpec, settings: QuantizeSettings, tokens: int, length: int) -> dict[str, int]:
    block = sum(math.prod(shape) for shape in spec.block_tensors().values())
    widest_tap = max(sum(math.prod(spec.linear_shape(linear)) for linear in tap.linears) for tap in TAPS)
    parts = {
        "Python and torch": LIBRARIES,
        "one block, original and changed": 2 * block * FLOAT,
        "one tap's linears while rounded": 3 * widest_tap * FLOAT,
    }
    if not tokens:
        return parts
    method = resolve_method(settings)
    squares = [width * width * FLOAT for width in tap_widths(spec)]
    if method.transform == "awq":
        parts["Gram matrices, kept and held out"] = 2 * sum(squares)
        parts["Gram matrix, scaled copies"] = 2 * max(squares)
    else:
        parts["Gram matrix of one tap"] = max(squares)
    if method.rounding == "gptq":
        parts["Cholesky factors of GPTQ"] = 3 * max(squares)
    chunk = max(min(CHUNK_TOKENS, tokens), length)
    parts["activations of one chunk"] = chunk * (3 * spec.hidden + 3 * spec.intermediate) * FLOAT
    return parts


def _flops(spec: ModelSpec, settings: QuantizeSettings, tokens: int, length: int) -> float:
    method = resolve_method(settings)
    weights = block_weights(spec)
    forms = spec.layers * sum(
        2 * rows * columns**2 for rows, columns in map(spec.linear_shape, BLOCK_LINEARS)
    )  # one tr(ΔW·H·ΔWᵀ) for every linear
    elementwise = 2.0 * weights * ELEMENTWISE_FLOPS
    if method.range != "minmax":
        elementwise += RANGE_STEPS[settings.symmetric] * weights * ELEMENTWISE_FLOPS
    if not tokens:
        return elementwise
    forward = 2.0 * weights * tokens + attention_flops(spec, length) * tokens / length
    gram = 1.0 * tokens * spec.layers * sum(width**2 for width in tap_widths(spec))  # symmetric: half of the products
    passes = (method.transform == "awq") + _rounds_in_sequence(settings)
    total = passes * (forward + gram) + 2 * forms + elementwise
    if method.transform == "awq":
        total += SCALE_STEPS * (forms + weights * ELEMENTWISE_FLOPS)
    if method.rounding == "gptq":
        cubes = spec.layers * sum(width**3 for width in tap_widths(spec))
        total += 2 * cubes + forms / 2
    return total
