"""What one request's times say, and what those of many come to.

    TTFT = first piece − start                 start: when it was sent, or was due to arrive in an open loop
    E2E  = last piece − start
    TPOT = (E2E − TTFT) / (output tokens − 1)  as vLLM defines it
    ITL  = gaps between pieces; a piece holds several tokens under speculation, and then ITL exceeds TPOT

Only answered requests have latencies; failures are counted beside them. Times are in seconds here, and in milliseconds
where they are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Timing:
    start: float
    pieces: tuple[float, ...]  # when each piece of output came; at least one, unless the request failed
    prompt_tokens: int
    output_tokens: int
    asked_tokens: int
    error: str | None = None  # why it failed

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.start

    @property
    def e2e(self) -> float:
        return self.pieces[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """None where there is one token only."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """One pass of one arm over the requests of a level."""

    timings: list[Timing]
    seconds: float  # from the first request's start to the last answer or failure
    preemptions: int | None = None  # None where the arm does not tell

    @property
    def answered(self) -> list[Timing]:
        return [timing for timing in self.timings if timing.error is None]

    @property
    def output_rate(self) -> float:
        """Output tokens per second, of requests that were answered."""
        return sum(timing.output_tokens for timing in self.answered) / self.seconds


@dataclass(frozen=True)
class Limits:
    """What a request must meet to count as good, in milliseconds; None sets no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met_by(self, timing: Timing) -> bool:
        """A failed request meets none; one of a single token has no TPOT to miss."""
        if timing.error is not None:
            return False
        took = {"ttft": timing.ttft, "tpot": timing.tpot, "e2e": timing.e2e}
        for field in fields(self):
            limit, seconds = getattr(self, field.name), took[field.name]
            if limit is not None and seconds is not None and 1000 * seconds > limit:
                return False
        return True


@dataclass(frozen=True)
class Spread:
    """Of one latency over requests, in milliseconds; percentiles interpolate linearly between neighbours."""

    mean: float
    median: float
    p90: float
    p99: float
    count: int


def spread(seconds: Iterable[float]) -> Spread | None:
    """None where nothing was measured."""
    values = 1000 * np.fromiter(seconds, dtype=np.float64)
    if not len(values):
        return None
    median, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return Spread(float(values.mean()), float(median), float(p90), float(p99), len(values))


@dataclass(frozen=True)
class Figures:
    """One arm at one level, over all its runs."""

    requests: int
    failed: int
    short: int  # answered with fewer tokens than asked
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts and outputs
    requests_per_s: float  # answered
    goodput: float | None  # requests per second that met the limits; None without limits
    tokens_per_piece: float | None  # above 1: speculation, or text that was held back
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    errors: dict[str, int]
    preemptions: int | None


def figures(runs: Sequence[Run], limits: Limits | None) -> Figures:
    """Rates are medians over the runs, so that one disturbed run moves none; latencies are of all answered requests."""

    def rate(count: Callable[[Run], float]) -> float:
        return float(np.median([count(run) / run.seconds for run in runs]))

    timings = [timing for run in runs for timing in run.timings]
    answered = [timing for run in runs for timing in run.answered]
    seconds = sum(run.seconds for run in runs)
    output = sum(timing.output_tokens for timing in answered)
    told = [run.preemptions for run in runs if run.preemptions is not None]
    return Figures(
        requests=len(timings),
        failed=len(timings) - len(answered),
        short=sum(timing.output_tokens < timing.asked_tokens for timing in answered),
        seconds=seconds,
        output_tokens_per_s=rate(lambda run: sum(t.output_tokens for t in run.answered)),
        total_tokens_per_s=rate(lambda run: sum(t.prompt_tokens + t.output_tokens for t in run.answered)),
        requests_per_s=rate(lambda run: len(run.answered)),
        goodput=rate(lambda run: sum(map(limits.met_by, run.timings))) if limits else None,
        tokens_per_piece=output / sum(len(timing.pieces) for timing in answered) if answered else None,
        ttft=spread(timing.ttft for timing in answered),
        tpot=spread(tpot for timing in answered if (tpot := timing.tpot) is not None),
        itl=spread(gap for timing in answered for gap in timing.gaps),
        e2e=spread(timing.e2e for timing in answered),
        errors=dict(Counter(timing.error for timing in timings if timing.error is not None)),
        preemptions=sum(told) if told else None,
    )
