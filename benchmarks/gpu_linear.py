"""Quantized linears beside cuBLAS in half precision, at the shapes of published models.

A cell of the table: microseconds, how many times faster than cuBLAS in bfloat16, and the share of the roofline that
this GPU's own copies and matrix products draw in the same run.

Shapes: T tokens, O out features, I in features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu_clock import Bench, Roofline, Timing
from benchmarks.gpu_shapes import FORMATS, LAYERS, SMALL_LAYERS, SMALL_TOKENS, TOKENS, Layer, random_weight
from benchmarks.gpu_tables import Column, Deadline, Section
from compress.kernels.linear import DenseLinear, Linear
from compress.kernels.matmul_triton import prepare_matmul
from compress.kernels.narrow_matmul_triton import prepare_w8a8
from compress.kernels.weights import Float4Weight

DENSE = "cuBLAS"
KINDS = (DENSE, *FORMATS, "int8 W8A8", "fp8 W8A8")


def make_linear(kind: str, layer: Layer, bench: Bench, dtype: torch.dtype, generator: torch.Generator) -> Linear:
    if kind == DENSE:
        weight_OI = torch.randn(layer.rows, layer.columns, device=bench.device, generator=generator).to(dtype)
        return DenseLinear(weight_OI, None)
    weight = random_weight(kind.partition(" ")[0], layer.rows, layer.columns, bench.device, generator)
    if "W8A8" in kind:
        assert not isinstance(weight, Float4Weight)
        return prepare_w8a8([weight], [None], bench.device, dtype)
    return prepare_matmul([weight], [None], bench.device, dtype)


def measure_linears(bench: Bench, roofline: Roofline | None, deadline: Deadline) -> Section:
    tokens = SMALL_TOKENS if bench.interpreted else TOKENS
    columns = (Column("model"), Column("layer"), Column("O × I"), Column("weights"))
    section = Section("Linears", (*columns, *(Column(f"M = {count}") for count in tokens)))
    generator = torch.Generator(bench.device).manual_seed(0)
    for layer in SMALL_LAYERS if bench.interpreted else LAYERS:
        dense: dict[int, Timing | None] = {}
        for kind in KINDS:
            what = f"{layer.model} {layer.name} {kind}"
            if deadline.passed(what):
                continue
            try:
                figures = measure_layer(bench, roofline, layer, kind, tokens, dense, generator)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                section.notes.append(f"{what}: the GPU's memory does not suffice.")
                continue
            section.figures += figures
            section.add(layer.model, layer.name, f"{layer.rows} × {layer.columns}", kind, *map(cell, figures))
    section.notes.append("Linears: time of a call, × against cuBLAS in bfloat16, share of the roofline.")
    section.notes += deadline.note()
    return section


def measure_layer(
    bench: Bench,
    roofline: Roofline | None,
    layer: Layer,
    kind: str,
    tokens: Sequence[int],
    dense: dict[int, Timing | None],
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """A figure for each number of tokens. `dense` keeps cuBLAS's times, which come first."""
    dtype = bench.dtypes[0]
    linear = make_linear(kind, layer, bench, dtype, generator)
    copies = bench.copies(linear, linear.nbytes)
    figures = []
    for count in tokens:
        x_TI = torch.randn(count, layer.columns, device=bench.device, generator=generator).to(dtype)
        timing = bench.measure([lambda each=each, x=x_TI: each(x) for each in copies])
        if kind == DENSE:
            dense[count] = timing
        moved = linear.nbytes + (layer.columns + layer.rows) * count * dtype.itemsize
        operations = 2 * count * layer.rows * layer.columns
        told = {**vars(layer), "weights": kind, "tokens": count}
        figures.append(told | describe(timing, dense.get(count), roofline, moved, operations))
    return figures


def describe(
    timing: Timing | None, peer: Timing | None, roofline: Roofline | None, nbytes: float, operations: float
) -> dict[str, float | None]:
    if timing is None or roofline is None:
        return {"seconds": None}
    return {
        "seconds": timing.seconds,
        "lowest_seconds": timing.low,
        "highest_seconds": timing.high,
        "speed_up": peer.seconds / timing.seconds if peer else None,
        "bytes_per_second": nbytes / timing.seconds,
        "roofline_share": roofline.seconds(nbytes, operations) / timing.seconds,
    }


def cell(figure: Mapping[str, Any]) -> str | None:
    seconds, share, speed_up = figure["seconds"], figure.get("roofline_share"), figure.get("speed_up")
    if seconds is None or share is None:
        return None
    return f"{1e6 * seconds:.1f} µs" + (f", ×{speed_up:.2f}" if speed_up else "") + f", {share:.0%}"
