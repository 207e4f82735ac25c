"""Both arms in turns: order, ratios, intervals, and the control that says what shows."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from compress.bench.offline import OfflineArm
from compress.bench.sweep import LevelResult, Ratio, sweep
from compress.bench.table import notes, render, summary
from compress.bench.timing import Limits
from compress.bench.workload import Arrivals, Clients, Level, Span, Workload
from tests.bench.simulated import SimulatedEngine
from tests.evaluate.test_speed import Clock

WORK = Workload(Span(8, 8), Span(11, 11), vocab=1000)


def measured(
    clock: Clock, engines: dict[str, SimulatedEngine], levels: list[Level] | None = None, rounds: int = 3
) -> list[LevelResult]:
    arms = {role: OfflineArm(role, engine, clock, clock.spend) for role, engine in engines.items()}
    return sweep(arms, WORK, levels or [Clients(2)], lambda level: 4, lambda level: 2, rounds, Limits(tpot=75))


def pair(clock: Clock, speedup: float) -> dict[str, SimulatedEngine]:
    return {
        "baseline": SimulatedEngine(clock, 1.0, 0.1),
        "compressed": SimulatedEngine(clock, 1.0 / speedup, 0.1 / speedup),
    }


def test_exact_ratios_on_a_quiet_machine() -> None:
    clock = Clock()
    [found] = measured(clock, pair(clock, 2.0))
    assert found.figures["baseline"].output_tokens_per_s == pytest.approx(44 / 6.2)
    assert found.figures["compressed"].output_tokens_per_s == pytest.approx(2 * 44 / 6.2)
    assert found.figures["baseline"].goodput == 0
    assert found.figures["compressed"].goodput == pytest.approx(4 / 3.1)
    assert found.figures["compressed"].requests == 6 * 4
    for name in ("output_tokens_per_s", "tpot", "ttft"):
        ratio = found.ratios[name]
        assert ratio.value == pytest.approx(2.0)
        assert ratio.interval == pytest.approx((2.0, 2.0))
        assert ratio.control == pytest.approx((1.0, 1.0))
        assert ratio.smallest_effect == pytest.approx(0.0, abs=1e-9)
        assert ratio.resolved


def test_drift_cancels_between_the_arms() -> None:
    clock = Clock(drift=0.002)
    [found] = measured(clock, pair(clock, 1.0), rounds=6)
    assert clock.drift * clock.now > 0.3
    ratio = found.ratios["output_tokens_per_s"]
    assert ratio.value == pytest.approx(1.0, abs=0.01)
    assert not ratio.resolved


@pytest.mark.parametrize(("speedup", "resolved"), [(1.0, False), (1.5, True)])
def test_noise_is_told_from_a_speedup(speedup: float, resolved: bool) -> None:
    clock = Clock(noise=0.05)
    [found] = measured(clock, pair(clock, speedup), rounds=6)
    ratio = found.ratios["output_tokens_per_s"]
    assert ratio.resolved is resolved
    assert ratio.smallest_effect is not None
    assert 0 < ratio.smallest_effect < 0.2


def test_the_smallest_effect_is_how_far_the_control_strays() -> None:
    assert Ratio(1.0, (0.9, 1.1), (0.8, 1.1), False).smallest_effect == pytest.approx(0.25)
    assert Ratio(1.0, (0.9, 1.1), (0.95, 1.2), False).smallest_effect == pytest.approx(0.2)
    assert Ratio(1.0, None, None, False).smallest_effect is None


def test_the_order_is_abba_and_no_prompt_is_met_twice() -> None:
    clock = Clock()
    order: list[str] = []

    class Noting(SimulatedEngine):
        def add(self, prompt, params):  # type: ignore[no-untyped-def]
            role = "A" if self is engines["baseline"] else "B"
            if not order or order[-1] != role:
                order.append(role)
            return super().add(prompt, params)

    engines: dict[str, SimulatedEngine] = {"baseline": Noting(clock), "compressed": Noting(clock)}
    measured(clock, engines, [Clients(1), Arrivals(1.0)], rounds=2)
    # warm-up A B, then A BB A, A BB A; neighbours of one arm are one entry
    assert "".join(order) == "ABABABA" + "BABABA"
    seen = engines["baseline"].seen + engines["compressed"].seen
    assert len(set(seen)) == len(seen) == 2 * 2 * (2 + 4 * 4)


def test_one_arm_has_a_control_from_four_runs_on() -> None:
    clock = Clock(noise=0.05)
    [few] = measured(clock, {"compressed": SimulatedEngine(clock)}, rounds=3)
    [found] = measured(clock, {"compressed": SimulatedEngine(clock)}, rounds=8)
    assert few.control is None
    assert found.control is not None
    assert 0.8 < found.control[0] < 1 < found.control[1] < 1.25
    assert not found.ratios
    assert summary([found]) == []
    assert any(line.startswith("A/A ") for line in notes([found]))


def test_the_summary_line_gives_ratio_interval_and_smallest_effect() -> None:
    clock = Clock()
    results = measured(clock, pair(clock, 2.0), [Clients(1), Clients(2)])
    assert summary(results) == [
        "compressed  2.00 times the baseline's output tok/s at 2 clients (95 % 2.000–2.000; smallest effect seen here "
        "0.0 %); TPOT 2.00 times as fast"
    ]
    [opened] = summary(measured(clock, pair(clock, 2.0), [Arrivals(0.1)]))
    assert opened.startswith("compressed  TPOT 2.00 times as fast as the baseline's at 0.1 req/s (95 % 2.000–2.000")
    [same] = summary(measured(clock, pair(clock, 1.0)))
    assert "so no difference is shown" in same
    [once] = summary(measured(clock, pair(clock, 2.0), rounds=1))
    assert "unknown: one round" in once


def test_a_ratio_that_may_be_noise_has_a_question_mark() -> None:
    """In the table too, where no interval stands beside it; and no line is folded in a pipe."""
    clock = Clock()
    for speed, marked in ((2.0, False), (1.0, True)):
        results = measured(clock, pair(clock, speed), [Clients(1), Clients(2)])
        shown = io.StringIO()
        Console(file=shown, width=140).print(render(results), crop=False)
        rows = [line for line in shown.getvalue().splitlines() if "compressed  " in line[4:]]
        assert [row.rstrip().endswith(f"{speed:.2f} ?") for row in rows] == [marked, marked]
        assert any(line.startswith("?           1 client, 2 clients: not told") for line in notes(results)) == marked
        assert shown.getvalue().splitlines()[-1] == summary(results)[0]


def test_notes_tell_what_changes_the_meaning_of_a_figure() -> None:
    clock = Clock()
    told = "\n".join(notes(measured(clock, {"compressed": SimulatedEngine(clock, width=4)})))
    assert "warm-up     2 requests, not measured" in told
    assert "2.75 tokens a piece" in told
    told = "\n".join(notes(measured(clock, {"compressed": SimulatedEngine(clock, ends_early=3)})))
    assert "failed      2 clients, compressed: 12 of 12 requests" in told
    assert "finished for 'stop'" in told


def test_an_interval_that_says_nothing_is_not_printed() -> None:
    """Two rounds on a machine that stalls give intervals of many powers of ten: no figure is one to show."""
    clock = Clock()
    [quiet] = measured(clock, pair(clock, 2.0))
    wild = (1e-19, 4.5e17)
    ratio = Ratio(2.0, wild, wild, False)
    [line] = summary([replace(quiet, ratios={"output_tokens_per_s": ratio})])
    assert line.endswith(
        "(95 % unknown: too noisy; smallest effect seen here unknown: too noisy, so no difference is shown)"
    )
    [line] = summary([replace(quiet, ratios={"output_tokens_per_s": replace(ratio, interval=(14.0, 16.0))})])
    assert "95 % 14.000–16.000; smallest effect seen here unknown: too noisy" in line
    [line] = summary([replace(quiet, ratios={"output_tokens_per_s": Ratio(1.0, (0.4, 3.9), (0.12, 1.1), False)})])
    assert "95 % 0.400–3.900; smallest effect seen here 733.3 %" in line
    alone = replace(quiet, figures={"compressed": quiet.figures["compressed"]}, ratios={}, control=wild)
    assert "A/A         2 clients: output tok/s of one run over another unknown: too noisy" in list(notes([alone]))
    assert next(notes([replace(alone, warmup=1)])) == "warm-up     1 request, not measured"


def test_single_tokens_have_no_tpot_and_are_compared_by_ttft() -> None:
    clock = Clock()
    arms = {role: OfflineArm(role, engine, clock, clock.spend) for role, engine in pair(clock, 2.0).items()}
    single = Workload(Span(8, 8), Span(1, 1), vocab=1000)
    results = sweep(arms, single, [Arrivals(0.01)], lambda level: 3, lambda level: 0, 3)
    assert results[0].figures["compressed"].tpot is None
    assert set(results[0].ratios) == {"output_tokens_per_s", "ttft"}
    assert summary(results)[0].startswith("compressed  TTFT 2.00 times as fast as the baseline's at 0.01 req/s (95 % ")
    assert next(notes(results)) == "warm-up     none: the first requests are measured too"


def test_a_run_without_answers_gives_no_ratio() -> None:
    clock = Clock()
    engines = {"baseline": SimulatedEngine(clock), "compressed": SimulatedEngine(clock, ends_early=3)}
    [found] = measured(clock, engines)
    assert not found.ratios
    assert math.isclose(found.figures["baseline"].output_tokens_per_s, 44 / 6.2)
