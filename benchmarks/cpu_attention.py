"""Paged attention on a CPU: decode steps and prompts by the compiled kernel, beside torch and beside mere reading.

    python benchmarks/cpu_attention.py [--threads 1] [--rounds 9]

Each shape is a model's layers in turn, each with a cache of its own at random pages, so that keys and values come from
where they would come from in a step. Times are the least of interleaved rounds: CPU time on one thread, elapsed time on
several. `read` sums the same bytes, one tensor after the other.

Shapes: N requests, T new tokens of all, H query heads, K KV heads, D head dim, P pages, S slots.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.kernels.attention import PagedAttention
from compress.kernels.cpu.attention import CompiledAttention
from compress.kernels.cpu.isa import supported
from compress.kernels.kv import Pages
from compress.kernels.queries import AttentionOptions, PagedQueries

PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    requests: int
    length: int
    context: int
    heads: tuple[int, int, int] = (9, 3, 64)  # H, K, D: SmolLM2-135M
    layers: int = 30


SHAPES = (
    Shape(1, 1, 64),
    Shape(1, 1, 150),
    Shape(16, 1, 64),
    Shape(16, 1, 150, layers=8),
    Shape(16, 1, 150),
    Shape(8, 1, 1000, layers=8),
    Shape(1, 1, 4000, layers=8),
    Shape(4, 1, 1000, (32, 8, 128), layers=4),
    Shape(4, 1, 1000, (8, 8, 64), layers=4),
    Shape(1, 4, 1000, layers=8),
    Shape(1, 512, 512, layers=3),
    Shape(1, 2048, 2048, layers=1),
    Shape(4, 256, 256, (32, 8, 128), layers=1),
)


def steps(shape: Shape) -> tuple[dict[str, Callable[[], object]], int]:
    """One call of each contender is a step through all layers; and the bytes that a layer reads at least."""
    heads, kv_heads, dim = shape.heads
    each = -(-shape.context // PAGE_SIZE)
    order = torch.randperm(shape.requests * each).tolist()
    tables = [order[i * each : (i + 1) * each] for i in range(shape.requests)]
    queries = PagedQueries([shape.length] * shape.requests, [shape.context] * shape.requests, tables, PAGE_SIZE)
    size = (len(order), PAGE_SIZE, kv_heads, dim)
    layers = [Pages(torch.randn(size), torch.randn(size)) for _ in range(shape.layers)]
    q_THD = torch.randn(shape.requests * shape.length, heads, dim)

    def attend(attention: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: [attention(q_THD, pages, AttentionOptions()) for pages in layers]

    contenders = {isa: attend(CompiledAttention(queries, isa)) for isa in supported()[1:] or supported()}
    contenders["torch"] = attend(PagedAttention(queries))
    contenders["read"] = lambda: [(p.keys_PSKD.sum(), p.values_PSKD.sum()) for p in layers]
    return contenders, 2 * 4 * shape.requests * shape.context * kv_heads * dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    for shape in SHAPES:
        contenders, bytes_read = steps(shape)
        least = dict.fromkeys(contenders, float("inf"))
        for _ in range(arguments.rounds):
            for name, step in contenders.items():
                start = clock()
                step()
                least[name] = min(least[name], (clock() - start) / shape.layers)
        figures = ", ".join(f"{name} {1e6 * t:.0f}" for name, t in least.items())
        best = min(least[name] for name in supported() if name in least)
        what = (
            f"{shape.requests} × {shape.length} of {shape.context} tokens, heads {shape.heads}, {shape.layers} layers"
        )
        print(f"{what}: µs a layer: {figures}; {bytes_read / best / 1e9:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
