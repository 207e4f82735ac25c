"""What a quantization walk will need of this machine: memory, scratch disk and FLOPs, from the config alone.

Memory follows what `blockwise` and `quant` hold at once, and does not grow with the samples once their activation files
pass RESIDENT_BYTES; scratch files and time do. Against measured runs: docs/log.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compress.activations import RESIDENT_BYTES
from compress.arch import BLOCK_LINEARS, TAPS, ModelSpec
from compress.recipe import CalibrationSettings, QuantizeSettings, resolve_method
from compress.roofline import attention_flops, block_weights
from compress.stages import CHUNK_TOKENS

FLOAT = 4  # the walk computes in float32
LIBRARIES = 400 << 20  # resident with torch and a tokenizer, before any weights
# Copies of a Gram matrix alive at once: the sums, the mean made of them, and what each method makes of that.
GRAM_COPIES, AWQ_COPIES, GPTQ_COPIES = 3, 6, 5
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
        block_input, block_output, *between = _file_widths(spec, settings)
        disk["hidden states"] = tokens * (block_input + block_output) * FLOAT
        if between:
            disk["inputs of o_proj and the MLP"] = tokens * sum(between) * FLOAT
    return WalkCost(_memory(spec, settings, tokens, length), disk, _flops(spec, settings, tokens, length), tokens)


def _rounds_in_sequence(settings: QuantizeSettings) -> bool:
    """Whether taps are quantized one after the other, each from the outputs of those before it."""
    method = resolve_method(settings)
    return method.rounding == "gptq" or method.transform == "none"


def tap_widths(spec: ModelSpec) -> list[int]:
    """Input features of each tap of a block."""
    return [spec.linear_shape(tap.linears[0])[1] for tap in TAPS]


def _memory(spec: ModelSpec, settings: QuantizeSettings, tokens: int, length: int) -> dict[str, int]:
    """Bytes at the peak of one block. Copies are counted as the code makes them: see `quant.quantize` and `gptq`."""
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
        parts["Gram matrices of all taps, kept and held out"] = 2 * sum(squares)
        parts["scaled copies of the widest Gram matrix"] = AWQ_COPIES * max(squares)
    else:
        parts["Gram matrix of one tap"] = GRAM_COPIES * max(squares)
    if method.rounding == "gptq":
        parts["Cholesky factors of GPTQ"] = GPTQ_COPIES * max(squares)
    chunk = max(min(CHUNK_TOKENS, tokens), length)
    parts["activations of one chunk"] = chunk * 3 * (spec.hidden + spec.intermediate) * FLOAT
    files = [tokens * width * FLOAT for width in _file_widths(spec, settings)]
    parts["activation files in memory"] = sum(min(size, RESIDENT_BYTES) for size in files)
    return parts


def _file_widths(spec: ModelSpec, settings: QuantizeSettings) -> list[int]:
    """Features of each activation file that is open at once: a block's input and output, and what lies between."""
    widths = [spec.hidden, spec.hidden]
    if _rounds_in_sequence(settings):
        widths += [spec.heads * spec.head_dim, spec.hidden, spec.intermediate]
    return widths


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
