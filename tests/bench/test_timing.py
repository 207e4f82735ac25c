"""Latencies and rates of requests whose times are written down."""

from __future__ import annotations

import pytest

from compress.bench.timing import Limits, Run, Timing, figures, spread


def timing(start: float, *pieces: float, output: int | None = None, asked: int | None = None) -> Timing:
    output = len(pieces) if output is None else output
    return Timing(start, pieces, 10, output, output if asked is None else asked)


FAILED = Timing(0.0, (0.5,), 10, 0, 4, error="HTTP 500: no")


def test_the_definitions() -> None:
    one = timing(1.0, 1.5, 1.7, 2.3)
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.3)
    assert one.tpot == pytest.approx((1.3 - 0.5) / 2)
    assert one.gaps == pytest.approx([0.2, 0.6])
    assert timing(0.0, 1.0).tpot is None
    assert timing(0.0, 1.0).gaps == []


def test_several_tokens_in_a_piece_part_itl_from_tpot() -> None:
    """9 tokens in 3 pieces, 0.4 s apart: a token takes 0.1 s, a gap 0.4 s."""
    one = timing(0.0, 1.0, 1.4, 1.8, output=9)
    found = figures([Run([one], 1.8)], None)
    assert found.tpot is not None
    assert found.itl is not None
    assert found.tpot.median == pytest.approx(100)
    assert found.itl.median == pytest.approx(400)
    assert found.tokens_per_piece == pytest.approx(3)


def test_percentiles_interpolate() -> None:
    """Of 1 … 101: the median is 51, the 90th percentile 91, the 99th 100. Of 0 and 10: 5, 9, 9.9."""
    found = spread(value / 1000 for value in range(101, 0, -1))
    assert found is not None
    assert (found.mean, found.median, found.p90, found.p99) == pytest.approx((51, 51, 91, 100))
    assert found.count == 101
    two = spread([0.0, 0.010])
    assert two is not None
    assert (two.mean, two.median, two.p90, two.p99) == pytest.approx((5, 5, 9, 9.9))
    assert spread([]) is None


def test_rates_are_medians_over_runs() -> None:
    """A run that something else held up for 100 s moves nothing."""
    runs = [Run([timing(0, 1, 2), timing(0, 1, 3)], 3.0), Run([timing(0, 0.5, 1)], 1.0), Run([timing(0, 1, 2)], 100.0)]
    found = figures(runs, None)
    assert found.output_tokens_per_s == pytest.approx(4 / 3)
    assert found.total_tokens_per_s == pytest.approx((4 + 20) / 3)
    assert found.requests_per_s == pytest.approx(2 / 3)
    assert found.seconds == 104.0
    assert found.goodput is None
    assert runs[0].output_rate == pytest.approx(4 / 3)


def test_failures_are_counted_and_in_no_latency_or_rate() -> None:
    found = figures([Run([timing(0, 1, 2), FAILED, FAILED], 2.0)], Limits(ttft=1e9))
    assert (found.requests, found.failed) == (3, 2)
    assert found.errors == {"HTTP 500: no": 2}
    assert found.ttft is not None
    assert found.ttft.count == 1
    assert found.ttft.median == pytest.approx(1000)
    assert found.output_tokens_per_s == pytest.approx(1.0)
    assert found.requests_per_s == found.goodput == pytest.approx(0.5)


def test_goodput_needs_every_limit() -> None:
    fast, slow_start, slow_tokens = timing(0, 0.1, 0.2), timing(0, 0.6, 0.7), timing(0, 0.1, 0.4)
    run = [Run([fast, slow_start, slow_tokens, timing(0, 0.2)], 2.0)]
    assert figures(run, Limits(ttft=500)).goodput == pytest.approx(3 / 2)
    assert figures(run, Limits(ttft=500, tpot=150)).goodput == pytest.approx(2 / 2)
    assert figures(run, Limits(ttft=500, tpot=150, e2e=199)).goodput == pytest.approx(0)
    assert figures(run, Limits(tpot=150)).goodput == pytest.approx(3 / 2), "one token has no TPOT to miss"


def test_a_run_without_answers_has_no_latencies() -> None:
    found = figures([Run([FAILED], 1.0)], None)
    assert found.ttft is found.tpot is found.itl is found.e2e is found.tokens_per_piece is None
    assert found.output_tokens_per_s == 0


def test_short_answers_are_counted() -> None:
    assert figures([Run([timing(0, 1, 2, asked=2), timing(0, 1, asked=2)], 2.0)], None).short == 1
