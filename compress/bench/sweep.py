"""Both arms at every level, in turns, with the harness's own noise beside each ratio.

A round runs baseline, compressed, compressed, baseline (ABBA), as `compress.evaluate.speed` does: a machine that slows
down steadily slows both alike. The two runs of the baseline in a round are the A/A control.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from compress.bench.timing import Figures, Limits, Run, figures
from compress.bench.workload import Ask, Level, Workload, asks_for
from compress.evaluate.compare import Estimate, Interval, paired_log_ratio
from compress.evaluate.speed import is_resolved


class Arm(Protocol):
    """A model that answers requests, in this process or behind a server."""

    @property
    def name(self) -> str: ...

    def run(self, asks: Sequence[Ask], level: Level, tick: Callable[[], None]) -> Run: ...


@dataclass(frozen=True)
class Ratio:
    """How many times better the compressed arm is than the baseline; above 1 it is faster."""

    value: float
    interval: Interval | None  # 95 %
    control: Interval | None  # the baseline against itself, by the same harness
    resolved: bool  # the interval excludes 1, and the ratio lies outside the control's interval

    @property
    def smallest_effect(self) -> float | None:
        """The smallest change that this machine can show, as a fraction: how far the control strays from 1."""
        return None if self.control is None else math.expm1(max(abs(math.log(end)) for end in self.control))


@dataclass(frozen=True)
class LevelResult:
    """`runs` and `figures` go by the arm's role: compressed, and baseline where there is one."""

    level: Level
    warmup: int  # requests of each arm, not measured
    runs: dict[str, list[Run]]
    figures: dict[str, Figures]
    ratios: dict[str, Ratio]  # output_tokens_per_s, tpot, ttft; empty without a baseline
    control: Interval | None  # of output tokens/s, one arm against itself; needs four runs


def sweep(
    arms: Mapping[str, Arm],
    workload: Workload,
    levels: Sequence[Level],
    requests: Callable[[Level], int],
    warmup: Callable[[Level], int],
    rounds: int,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda note: None,
) -> list[LevelResult]:
    """Measure every level in turn. `arms` holds `compressed`, and may hold `baseline`.

    `progress` is called after each request, with what it belonged to.
    """
    turns = ("baseline", "compressed", "compressed", "baseline") if "baseline" in arms else ("compressed",)
    results = []
    for level in levels:
        numbers = itertools.count()  # each run has ids of its own: both arms may be one server, with one prefix cache

        def once(role: str, count: int, note: str, level: Level = level, numbers: Iterator[int] = numbers) -> Run:
            asks = asks_for(workload, level, count, next(numbers))
            return arms[role].run(asks, level, lambda: progress(f"{level}, {role}, {note}"))

        if warmup(level):
            for role in arms:
                once(role, warmup(level), "warm-up")
        runs: dict[str, list[Run]] = {role: [] for role in arms}
        for index in range(rounds):
            for role in turns:
                runs[role].append(once(role, requests(level), f"round {index + 1} of {rounds}"))
        results.append(summarize(level, warmup(level), runs, limits))
    return results


def summarize(level: Level, warmup: int, runs: dict[str, list[Run]], limits: Limits | None) -> LevelResult:
    compared = {}
    if "baseline" in runs:
        compared = {name: ratio_of(runs["baseline"], runs["compressed"], of) for name, of in SPEEDS.items()}
    of_arm = {role: figures(taken, limits) for role, taken in runs.items()}
    control = self_ratio(runs.get("baseline", runs["compressed"]), SPEEDS["output_tokens_per_s"])
    return LevelResult(
        level=level,
        warmup=warmup,
        runs=runs,
        figures=of_arm,
        ratios={name: ratio for name, ratio in compared.items() if ratio is not None},
        control=None if control is None else control.interval,
    )


def tpot_speed(run: Run) -> float:
    """1 / the median TPOT; 0 where no request has one."""
    values = [tpot for timing in run.answered if (tpot := timing.tpot) is not None]
    return 1 / statistics.median(values) if values and statistics.median(values) > 0 else 0.0


def ttft_speed(run: Run) -> float:
    """1 / the median TTFT; 0 where nothing was answered."""
    values = [timing.ttft for timing in run.answered]
    return 1 / statistics.median(values) if values and statistics.median(values) > 0 else 0.0


SPEEDS: dict[str, Callable[[Run], float]] = {
    "output_tokens_per_s": lambda run: run.output_rate,
    "tpot": tpot_speed,
    "ttft": ttft_speed,
}


def ratio_of(baseline: Sequence[Run], compressed: Sequence[Run], of: Callable[[Run], float]) -> Ratio | None:
    """Compressed over baseline, run by run; None where a run has nothing to compare."""
    pairs = [(of(before), of(after)) for before, after in zip(baseline, compressed, strict=True)]
    if not all(before > 0 and after > 0 for before, after in pairs):
        return None
    measured = paired_log_ratio([after for _, after in pairs], [before for before, _ in pairs])
    control = self_ratio(baseline, of) or Estimate(1.0, None)
    return Ratio(measured.value, measured.interval, control.interval, is_resolved(measured, control))


def self_ratio(runs: Sequence[Run], of: Callable[[Run], float]) -> Estimate | None:
    """A/A: each run over the one before it, in pairs; None below two pairs, which carry no interval."""
    speeds = [of(run) for run in runs]
    first, second = speeds[0 : len(speeds) - 1 : 2], speeds[1::2]
    if len(first) < 2 or min(speeds) <= 0:
        return None
    return paired_log_ratio(second, first)
