"""The engine as an arm: exact times on a simulated one, and a real one that is tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.bench.offline import OfflineArm
from compress.bench.timing import Limits, figures
from compress.bench.workload import Arrivals, Ask, Clients, Span, Workload, asks_for
from compress.errors import RunError
from compress.runtime.engine import Engine
from tests.bench.simulated import SimulatedEngine
from tests.evaluate.test_speed import Clock
from tests.tiny import tiny_model


def simulated(**settings: object) -> tuple[OfflineArm, SimulatedEngine]:
    clock = Clock()
    engine = SimulatedEngine(clock, **settings)  # pyright: ignore[reportArgumentType]
    return OfflineArm("simulated", engine, clock, clock.spend), engine


def asks(*due: float, output: int = 11) -> list[Ask]:
    return [Ask([i] * 8, output, at) for i, at in enumerate(due)]


def test_exact_times_of_one_client() -> None:
    """1.1 s to the first token, ten further ones of 0.1 s, twice."""
    arm, _ = simulated()
    found = figures([arm.run(asks(0, 0), Clients(1))], Limits(ttft=1100.001, tpot=99))
    assert found.seconds == pytest.approx(4.2)
    for spread, expected in ((found.ttft, 1100), (found.tpot, 100), (found.itl, 100), (found.e2e, 2100)):
        assert spread is not None
        assert (spread.mean, spread.median, spread.p90, spread.p99) == pytest.approx((expected,) * 4)
    assert found.output_tokens_per_s == pytest.approx(22 / 4.2)
    assert found.total_tokens_per_s == pytest.approx((22 + 16) / 4.2)
    assert found.goodput == 0
    assert found.tokens_per_piece == 1


def test_clients_wait_for_their_answers() -> None:
    """Two clients: both prompts in one step of 2.1 s, ten steps of 0.1 s; then the same with the next two."""
    arm, engine = simulated()
    run = arm.run(asks(0, 0, 0, 0), Clients(2))
    assert run.seconds == pytest.approx(6.2)
    assert [timing.ttft for timing in run.timings] == pytest.approx([2.1] * 4)
    assert engine.most == 2


def test_arrivals_wait_for_nobody_and_count_from_their_time() -> None:
    """The second arrives at 0.5, inside the first step (0 to 1.1): its prompt is in the second (1.1 to 2.2)."""
    arm, _ = simulated()
    run = arm.run(asks(0, 0.5), Arrivals(2.0))
    assert run.timings[0].ttft == pytest.approx(1.1)
    assert run.timings[1].ttft == pytest.approx(2.2 - 0.5)
    assert run.timings[0].gaps == pytest.approx([1.1] + [0.1] * 9), "the second prompt stalls the first stream"
    assert run.timings[0].tpot == pytest.approx((1.1 + 0.9) / 10)


def test_an_idle_engine_sleeps_until_the_next_arrival() -> None:
    arm, engine = simulated()
    run = arm.run(asks(0, 50), Arrivals(1.0))
    assert run.seconds == pytest.approx(52.1)
    assert run.timings[1].ttft == pytest.approx(1.1)
    assert engine.steps == 22


def test_speculation_shows_in_itl_alone() -> None:
    """Four tokens a step: after the first, ten more take three steps; TPOT is 0.03 s, the gaps 0.1 s."""
    arm, _ = simulated(width=4)
    found = figures([arm.run(asks(0), Clients(1))], None)
    assert found.tpot is not None
    assert found.itl is not None
    assert found.tpot.median == pytest.approx(30)
    assert found.itl.median == pytest.approx(100)
    assert found.tokens_per_piece == pytest.approx(11 / 4)


def test_an_engine_that_fails_is_one_line_and_left_empty() -> None:
    arm, engine = simulated(fails_at=15)
    with pytest.raises(RunError, match=r"^simulated: the engine failed after 1 requests: out of memory$"):
        arm.run(asks(0, 0, 0), Clients(1))
    assert not engine.running


def test_a_request_that_stops_by_itself_is_a_failure() -> None:
    arm, _ = simulated(ends_early=3)
    found = figures([arm.run(asks(0), Clients(1))], None)
    assert found.errors == {"finished for 'stop'": 1}
    assert found.output_tokens_per_s == 0


def test_the_real_engine(tmp_path: Path) -> None:
    """Every token of every request is timed, in order; three clients overlap."""
    engine = Engine.load(tiny_model(tmp_path))
    work = Workload(Span(10, 40), Span(2, 12), engine.spec.vocab)
    asked = asks_for(work, Clients(3), 7, 0)
    run = OfflineArm("tiny", engine).run(asked, Clients(3))
    assert sorted((t.prompt_tokens, t.output_tokens) for t in run.timings) == sorted(
        (len(ask.prompt), ask.output) for ask in asked
    )
    for timing in run.timings:
        assert timing.error is None
        assert timing.start < timing.pieces[0]
        assert len(timing.pieces) == timing.output_tokens == timing.asked_tokens
        assert min(timing.gaps) > 0
    assert sum(timing.e2e for timing in run.timings) > run.seconds, "requests ran at the same time"
    assert max(timing.pieces[-1] for timing in run.timings) - run.timings[0].start <= run.seconds + 1


def test_a_cache_that_is_too_small_shows_as_preemptions(tmp_path: Path) -> None:
    """Room for one request and a half: four together take each other's pages."""
    engine = Engine.load(tiny_model(tmp_path), max_tokens_in_cache=96)
    work = Workload(Span(32, 32), Span(24, 24), engine.spec.vocab)
    arm = OfflineArm("tiny", engine)
    assert (arm.run(asks_for(work, Clients(4), 4, 0), Clients(4)).preemptions or 0) > 0
    assert arm.run(asks_for(work, Clients(1), 2, 1), Clients(1)).preemptions == 0
