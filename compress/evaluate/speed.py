"""How fast both models answer, measured in turns on one machine, with the harness's own noise beside the result.

A round runs baseline, compressed, compressed, baseline (ABBA), so that a machine that slows down steadily slows both
arms alike, and each arm follows itself as often as the other. Each round gives two paired ratios, and one ratio of the
baseline to itself: the A/A control, whose interval is the smallest effect that this machine can show.

TTFT is the time from request to first token; TPOT is (end to end − TTFT) / (output tokens − 1), as vLLM defines it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from compress.arch import ModelSpec
from compress.errors import UserError
from compress.evaluate import contract
from compress.evaluate.compare import Estimate, contains, paired_log_ratio
from compress.runtime.engine import Engine, SamplingParams

Progress = Callable[[int, int], None]


class Arm(Protocol):
    """A loaded model that can be timed."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def weight_bytes(self) -> int: ...  # resident, in the form the arithmetic reads

    @property
    def embedding_bytes(self) -> int: ...  # resident
    @property
    def expert_bytes(self) -> int: ...  # of the experts of a mixture, among the weights

    @property
    def element_bytes(self) -> int: ...  # of the type it computes in, which the cache has

    def steps(self, prompts: list[list[int]], output: int) -> Iterator[int]:
        """Generate greedily, never stopping early; after each step, the fewest tokens that any sequence has."""
        ...


@dataclass(frozen=True)
class EngineArm:
    """The bundled runtime as an arm; `dtype` is what the engine was loaded to compute in."""

    engine: Engine
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def weight_bytes(self) -> int:
        return self.engine.weight_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.engine.embedding_bytes

    @property
    def expert_bytes(self) -> int:
        return self.engine.expert_bytes

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    def steps(self, prompts: list[list[int]], output: int) -> Iterator[int]:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        requests = [self.engine.add(prompt, params) for prompt in prompts]
        while any(request.status != "finished" for request in requests):
            self.engine.step()
            yield min(len(request.generated) for request in requests)


@dataclass(frozen=True)
class Workload:
    batch: int
    prompt: int  # tokens
    output: int  # tokens, at least 2


@dataclass(frozen=True)
class Timing:
    ttft: float  # seconds
    tpot: float  # seconds


def prompts_for(workload: Workload, vocab: int, seed: int) -> list[list[int]]:
    """`batch` prompts of random token ids, different for every seed so that no cached prefix is met again."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (workload.batch, workload.prompt), generator=generator).tolist()


def time_generation(arm: Arm, workload: Workload, seed: int, clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Time one batch: TTFT until every sequence has its first token, TPOT from there to the end."""
    prompts = prompts_for(workload, arm.spec.vocab, seed)
    start = clock()
    first, end = None, start
    for tokens in arm.steps(prompts, workload.output):
        end = clock()
        if first is None and tokens > 0:
            first = end
    first = end if first is None else first
    return Timing(first - start, (end - first) / (workload.output - 1))


@dataclass(frozen=True)
class Round:
    """ABBA: the two runs of each arm in the order they were taken."""

    baseline: tuple[Timing, Timing]
    compressed: tuple[Timing, Timing]


def run_round(
    baseline: Arm, compressed: Arm, workload: Workload, index: int, clock: Callable[[], float] = time.perf_counter
) -> Round:
    """One ABBA round; the two halves have prompts of their own."""
    first, second = 2 * index, 2 * index + 1
    a1 = time_generation(baseline, workload, first, clock)
    b1 = time_generation(compressed, workload, first, clock)
    b2 = time_generation(compressed, workload, second, clock)
    a2 = time_generation(baseline, workload, second, clock)
    return Round((a1, a2), (b1, b2))


def measure(
    baseline: Arm,
    compressed: Arm,
    workload: Workload,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> contract.SpeedRow:
    """Warm both arms up, then take up to `rounds` ABBA rounds within `seconds`, and never fewer than two.

    Raises UserError where the workload does not fit the models' positions.
    """
    check_fits(workload, baseline.spec.max_positions, compressed.spec.max_positions)
    started, load_before = clock(), load_average()
    for arm in (baseline, compressed):
        time_generation(arm, workload, -1, clock)
    taken: list[Round] = []
    while len(taken) < rounds:
        begun = clock()
        taken.append(run_round(baseline, compressed, workload, len(taken), clock))
        if progress is not None:
            progress(len(taken), rounds)
        if len(taken) >= 2 and clock() - started + (clock() - begun) > seconds:
            break
    return summarize(
        taken,
        workload,
        predicted_ratio=bytes_per_step(baseline, workload) / bytes_per_step(compressed, workload),
        load={"load_before": load_before, "load_after": load_average(), "seconds": clock() - started},
    )


def check_fits(workload: Workload, *max_positions: int) -> None:
    length, limit = workload.prompt + workload.output, min(max_positions)
    if length > limit:
        raise UserError(
            f"speed: prompt {workload.prompt} + output {workload.output} exceeds the model's {limit} positions"
        )


def summarize(
    taken: list[Round], workload: Workload, predicted_ratio: float | None, load: dict[str, Any]
) -> contract.SpeedRow:
    """Medians of each arm; the ratios of paired runs with intervals, and the control's."""
    tpot, tpot_control = _ratios(taken, lambda timing: timing.tpot)
    ttft, ttft_control = _ratios(taken, lambda timing: timing.ttft)
    return contract.SpeedRow(
        batch=workload.batch,
        prompt=workload.prompt,
        output=workload.output,
        baseline=_latency([t for r in taken for t in r.baseline], workload),
        compressed=_latency([t for r in taken for t in r.compressed], workload),
        ratio=tpot.value,
        ci95=tpot.interval,
        predicted_ratio=predicted_ratio,
        control_ci95=tpot_control.interval,
        resolved=is_resolved(tpot, tpot_control),
        prompt_ratio=ttft.value,
        prompt_ci95=ttft.interval,
        prompt_control_ci95=ttft_control.interval,
        prompt_resolved=is_resolved(ttft, ttft_control),
        rounds=len(taken),
        **load,
    )


def _ratios(taken: list[Round], of: Callable[[Timing], float]) -> tuple[Estimate, Estimate]:
    """Baseline / compressed over the 2R pairs of runs, and first baseline / second baseline over the R rounds."""
    baseline = [of(timing) for one in taken for timing in one.baseline]
    compressed = [of(timing) for one in taken for timing in one.compressed]
    control = paired_log_ratio([of(one.baseline[0]) for one in taken], [of(one.baseline[1]) for one in taken])
    return paired_log_ratio(baseline, compressed), control


def is_resolved(measured: Estimate, control: Estimate) -> bool:
    """Whether the interval excludes 1 and the ratio lies outside what the baseline shows against itself."""
    if measured.interval is None or control.interval is None:
        return False
    return not contains(measured.interval, 1.0) and not contains(control.interval, measured.value)


def _latency(timings: list[Timing], workload: Workload) -> contract.Latency:
    ttft = statistics.median(timing.ttft for timing in timings)
    tpot = statistics.median(timing.tpot for timing in timings)
    return contract.Latency(
        ttft_ms=1000 * ttft,
        tpot_ms=1000 * tpot,
        tokens_per_s=workload.batch / tpot,
        prompt_tokens_per_s=workload.batch * workload.prompt / ttft,
    )


def bytes_per_step(arm: Arm, workload: Workload) -> float:
    """Bytes that one decoding step reads: resident weights, and the keys and values of half the output on average.

    Of an embedding that is not the head too, one row per sequence is read; of a mixture, the experts that the batch is
    expected to go to.
    """
    spec, element_bytes = arm.spec, arm.element_bytes
    weights: float = arm.weight_bytes - (0 if spec.tied else arm.embedding_bytes)
    if spec.experts is not None:
        weights -= arm.expert_bytes * (1 - spec.experts.touched(workload.batch))
    context = workload.prompt + workload.output / 2
    cached = sum(min(context, window or context) for window in spec.windows)
    return weights + workload.batch * cached * spec.cached_numbers * element_bytes


def load_average() -> float | None:
    """Processes waiting or running, averaged over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
