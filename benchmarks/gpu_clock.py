"""How long a GPU takes for a call: medians over replays of a graph, with data that its caches do not hold."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

REPLAYS = 15
ENOUGH_SECONDS = 0.04  # of replays for one figure
CALLS = 10  # at least, in one graph
MOST_COPIES = 128
Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the replays, and their span."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Bench:
    """Where the benchmark runs. Interpreted kernels run once, and their time is not told."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    interpreted: bool
    cache_bytes: int  # of the last-level cache

    def measure(self, calls: Sequence[Call]) -> Timing | None:
        """The calls do the same on different data; None where kernels are interpreted."""
        if self.interpreted:
            calls[0]()
            return None
        return _replay(calls)

    def copies(self, make: T, nbytes: int) -> list[T]:
        """So many deep copies that together they fill the cache more than twice over."""
        if self.interpreted:
            return [make]
        count = min(MOST_COPIES, -(-2 * self.cache_bytes // max(nbytes, 1)) + 1)
        return [make, *(copy.deepcopy(make) for _ in range(count - 1))]


def open_bench(interpreted: bool) -> Bench:
    if interpreted:
        return Bench(torch.device("cpu"), (torch.float16,), True, 0)
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    return Bench(device, (torch.bfloat16, torch.float16), False, properties.L2_cache_size)


def _replay(calls: Sequence[Call]) -> Timing:
    """From a graph of all calls, so that neither Python nor the driver's launches are in the figure."""
    rounds = [call for _ in range(-(-CALLS // len(calls))) for call in calls]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles, and fills lazily made workspaces
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in rounds:
            call()
    graph.replay()
    first = _elapsed(graph)
    count = max(3, min(REPLAYS, int(ENOUGH_SECONDS / max(first, 1e-6))))
    each = sorted(_elapsed(graph) / len(rounds) for _ in range(count))
    return Timing(statistics.median(each), each[0], each[-1])


def _elapsed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


@dataclass(frozen=True)
class Roofline:
    """What this GPU did in this run: bytes a second of a copy, read and written, and half-precision FLOP a second."""

    bytes_per_second: float
    flops: float

    def seconds(self, nbytes: float, operations: float) -> float:
        return max(nbytes / self.bytes_per_second, operations / self.flops)


def measure_roofline(bench: Bench) -> Roofline | None:
    """None where kernels are interpreted."""
    if bench.interpreted:
        return None
    size = 1 << 30
    source, destination = (torch.empty(size, dtype=torch.uint8, device=bench.device).zero_() for _ in range(2))
    copied = bench.measure([lambda: destination.copy_(source)])
    a, b = (torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    multiplied = bench.measure([lambda: torch.mm(a, b, out=out)])
    assert copied is not None
    assert multiplied is not None
    return Roofline(2 * size / copied.seconds, 2 * 8192**3 / multiplied.seconds)
