"""What the hardware allows: bytes and FLOPs of a model → the least time a token can take.

A decode step reads every weight once (of a mixture of experts, those that its tokens go to) and the KV cache of each
sequence, and multiplies each weight once for each sequence that meets it: t ≥ max(bytes / bandwidth, FLOPs / peak) (the
roofline of Williams et al. 2009, doi:10.1145/1498765.1498785).
Nothing runs faster than this; good GPU stacks reach 70–85 % of it. Bytes are bytes and GB is 10⁹ bytes throughout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from compress.arch import EMBEDDING, HEAD, ModelSpec
from compress.errors import UserError, nearest

if TYPE_CHECKING:
    from compress.quant.scheme import Scheme

Schemes = Mapping[str, "Scheme | None"]  # by a linear's full name; absent or None: dense
DENSE_BITS = 16  # of embedding, norms, biases, kept linears and KV cache, unless the caller says otherwise


@dataclass(frozen=True)
class Hardware:
    """Vendor figures of one device: memory bandwidth [bytes/s], dense bf16 matmul rate [FLOP/s], memory [bytes]."""

    title: str
    bandwidth: float
    flops: float
    memory: float
    source: str


HARDWARE = {
    "a100": Hardware("NVIDIA A100 80GB SXM", 2.039e12, 312e12, 80e9, "NVIDIA A100 datasheet, 2021"),
    "h100": Hardware("NVIDIA H100 80GB SXM", 3.35e12, 989e12, 80e9, "NVIDIA H100 datasheet, without sparsity"),
    "h200": Hardware("NVIDIA H200 141GB SXM", 4.8e12, 989e12, 141e9, "NVIDIA H200 datasheet, without sparsity"),
    "b200": Hardware("NVIDIA B200 180GB (HGX)", 8.0e12, 2250e12, 180e9, "NVIDIA HGX B200 datasheet, without sparsity"),
    "l40s": Hardware("NVIDIA L40S 48GB", 0.864e12, 362e12, 48e9, "NVIDIA L40S datasheet, without sparsity"),
    "4090": Hardware(
        "NVIDIA GeForce RTX 4090 24GB", 1.008e12, 165e12, 24e9, "NVIDIA Ada architecture paper, fp32 sums"
    ),
    "mi300x": Hardware("AMD Instinct MI300X 192GB", 5.3e12, 1307e12, 192e9, "AMD MI300X datasheet, without sparsity"),
}


def find_hardware(name: str) -> Hardware:
    """A device of the table, or `cpu`: this machine, measured in about a second. Raises UserError for another name."""
    if name == "cpu":
        return measure_cpu()
    if name not in HARDWARE:
        known = [*HARDWARE, "cpu"]
        raise UserError(f"--hardware: {name!r} is not known; known: {', '.join(known)}{nearest(name, known)}")
    return HARDWARE[name]


def parameters(spec: ModelSpec) -> int:
    """Stored parameters; a tied head counts once."""
    return sum(math.prod(shape) for shape in spec.tensors().values())


def kv_bytes_per_token(spec: ModelSpec, bits: int = 16) -> int:
    """Bytes that one token adds to the KV cache over all layers, before any window drops it."""
    return spec.layers * spec.cached_numbers * bits // 8


def uniform(spec: ModelSpec, scheme: Scheme | None) -> dict[str, Scheme | None]:
    """`scheme` for every linear of every block, and the head kept."""
    return {name: None if name == HEAD else scheme for name in spec.linears()}


def weight_bytes_per_step(
    spec: ModelSpec, schemes: Schemes, dense_bits: int = DENSE_BITS, tokens: float = math.inf
) -> float:
    """Weight bytes that a step of so many tokens reads: all but the embedding, of which one row per sequence is read.

    A tied head is read whole, so it counts although it is not stored. Of a mixture, the experts that the tokens are
    expected to go to (`Experts.touched`); all of them by default.
    """
    linears = spec.linears()
    touched = 1.0 if spec.experts is None else spec.experts.touched(tokens)
    small = sum(
        math.prod(shape)
        for name, shape in spec.tensors().items()
        if name != f"{EMBEDDING}.weight" and name.removesuffix(".weight") not in linears
    )
    bits = float(small * dense_bits)
    for name, (rows, columns) in linears.items():
        scheme = schemes.get(name)
        share = touched if is_expert(name) else 1.0
        bits += share * rows * columns * (scheme.bits_per_weight(columns) if scheme else dense_bits)
    return bits / 8


def stored_weight_bytes(spec: ModelSpec, schemes: Schemes, dense_bits: int = DENSE_BITS) -> float:
    """Weight bytes that stay in memory: all that steps read, and the embedding unless the head is the same tensor."""
    embedding = 0 if spec.tied else spec.vocab * spec.hidden
    return weight_bytes_per_step(spec, schemes, dense_bits) + embedding * dense_bits / 8


@dataclass(frozen=True)
class Prediction:
    """The least time that `batch` sequences of `context` tokens take; a bound, never an estimate from above."""

    batch: int
    context: int
    bytes_per_step: float
    tpot_ms: float  # time per output token of each sequence
    tokens_per_s: float  # of the whole batch
    prefill_ms: float  # one prompt of `context` tokens: the least time to its first token
    bound: Literal["memory", "compute"]
    memory_bytes: float  # weights and KV cache
    fits: bool


def predict(
    spec: ModelSpec,
    schemes: Schemes,
    hardware: Hardware,
    batch: int,
    context: int,
    dense_bits: int = DENSE_BITS,
    kv_bits: int = DENSE_BITS,
) -> Prediction:
    """The roofline of decode and prefill; linears that `schemes` leaves out are `dense_bits` wide."""
    weights = weight_bytes_per_step(spec, schemes, dense_bits, batch)
    cached = sum(min(context, window or context) for window in spec.windows)
    kv = batch * cached * kv_bytes_per_token(spec, kv_bits) / spec.layers
    bytes_per_step = weights + kv + batch * spec.hidden * dense_bits / 8
    reading = bytes_per_step / hardware.bandwidth
    multiplying = batch * _decode_flops(spec, context) / hardware.flops
    seconds = max(reading, multiplying)
    reading_once = weight_bytes_per_step(spec, schemes, dense_bits, context) / hardware.bandwidth
    prefill = max(prefill_flops(spec, context) / hardware.flops, reading_once)
    memory = stored_weight_bytes(spec, schemes, dense_bits) + kv
    return Prediction(
        batch=batch,
        context=context,
        bytes_per_step=bytes_per_step,
        tpot_ms=1e3 * seconds,
        tokens_per_s=batch / seconds,
        prefill_ms=1e3 * prefill,
        bound="memory" if reading >= multiplying else "compute",
        memory_bytes=memory,
        fits=memory <= hardware.memory,
    )


def block_weights(spec: ModelSpec) -> float:
    """Weights in the linears of all blocks that a token meets, so not all experts: each costs it two FLOPs."""
    met = 1.0 if spec.experts is None else spec.experts.touched(1)
    shapes = spec.linears().items()
    return sum(rows * columns * (met if is_expert(name) else 1) for name, (rows, columns) in shapes if name != HEAD)


def is_expert(linear: str) -> bool:
    return ".experts." in linear


def attention_flops(spec: ModelSpec, tokens: int) -> float:
    """FLOPs of q·k and p·v over one causal sequence of `tokens`, all layers: position p sees min(p, window) keys."""
    width = 4 * spec.heads * spec.head_dim
    seen = 0.0
    for window in spec.windows:
        reach = min(window or tokens, tokens)
        seen += reach * (reach + 1) / 2 + (tokens - reach) * reach
    return width * seen


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    """FLOPs of one prompt: the blocks for every token, the head for the last."""
    head = 2 * spec.vocab * spec.hidden
    return 2 * block_weights(spec) * tokens + attention_flops(spec, tokens) + head


def _decode_flops(spec: ModelSpec, context: int) -> float:
    seen = sum(min(context, window or context) for window in spec.windows)
    return 2 * (block_weights(spec) + spec.vocab * spec.hidden) + 4 * spec.heads * spec.head_dim * seen


def measure_flops(seconds: float = 0.3, size: int = 512) -> float:
    """FLOP/s of float32 matrix products on this machine, with torch's present number of threads."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - start)


def measure_bandwidth(seconds: float = 0.3, size: int = 256 << 20) -> float:
    """Bytes/s of reading `size` bytes, far more than a cache holds, by summing floats."""
    import torch

    values = torch.ones(size // 4)
    values.sum()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        values.sum()
        count += 1
    return size * count / (time.perf_counter() - start)


def measure_cpu() -> Hardware:
    """This machine, from half a second of sums and products in float32."""
    import psutil
    import torch

    title = f"this CPU, {torch.get_num_threads()} threads, measured in float32"
    return Hardware(title, measure_bandwidth(), measure_flops(), psutil.virtual_memory().total, "measured just now")
