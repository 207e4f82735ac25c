"""The speed harness on simulated machines: a clock that the arms move, so that every figure is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from compress.arch import Experts, ModelSpec, read_spec
from compress.errors import UserError
from compress.evaluate.compare import Estimate, paired_log_ratio
from compress.evaluate.speed import EngineArm, Workload, bytes_per_step, is_resolved, measure, prompts_for
from compress.runtime.engine import Engine
from tests.tiny import BASE, tiny_model

SPEC = read_spec({"model_type": "llama", **BASE})
WORK = Workload(batch=2, prompt=32, output=11)


@dataclass
class Clock:
    now: float = 0.0
    drift: float = 0.0  # everything takes 1 + drift · now times as long
    noise: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * (1 + self.drift * self.now) * (1 + self.noise * self.random.gauss(0, 1))


@dataclass
class SimulatedArm:
    """Takes `prompt` seconds to the first token and `token` seconds for each further one."""

    clock: Clock
    prompt: float
    token: float
    weight_bytes: int = 1_000_000
    element_bytes: int = 4
    embedding_bytes: int = 256 * 64 * 4
    expert_bytes: int = 0
    spec: ModelSpec = SPEC
    seen: list[tuple[int, ...]] = field(default_factory=list)

    def steps(self, prompts: list[list[int]], output: int) -> Iterator[int]:
        self.seen += [tuple(prompt) for prompt in prompts]
        for done, seconds in ((0, self.prompt / 4), (1, self.prompt * 3 / 4)):  # a prompt prefilled in two chunks
            self.clock.spend(seconds)
            yield done
        for done in range(2, output + 1):
            self.clock.spend(self.token)
            yield done


def test_exact_times_on_a_quiet_machine():
    clock = Clock()
    row = measure(SimulatedArm(clock, 1.0, 0.2), SimulatedArm(clock, 0.5, 0.1), WORK, 6, 1e9, clock)
    assert row.baseline.ttft_ms == pytest.approx(1000)
    assert row.baseline.tpot_ms == pytest.approx(200)
    assert row.compressed.tokens_per_s == pytest.approx(2 / 0.1)
    assert row.baseline.prompt_tokens_per_s == pytest.approx(64)
    assert row.ratio == pytest.approx(2.0)
    assert row.ci95 == pytest.approx((2.0, 2.0))
    assert row.control_ci95 == pytest.approx((1.0, 1.0))
    assert row.resolved
    assert row.rounds == 6


def test_drift_cancels_between_the_arms():
    """A machine that slows down to half its speed still shows equal arms as equal."""
    clock = Clock(drift=0.01)
    row = measure(SimulatedArm(clock, 1.0, 0.1), SimulatedArm(clock, 1.0, 0.1), WORK, 8, 1e9, clock)
    assert clock.drift * clock.now > 0.9
    assert row.ratio == pytest.approx(1.0, abs=0.02)
    assert row.ci95 is not None
    assert row.ci95[0] <= 1 <= row.ci95[1]
    assert not row.resolved


def test_the_engine_is_timed(tmp_path: Path):
    """The bundled runtime against itself: finite times, equal bytes, and a control that contains 1."""
    arm = EngineArm(Engine.load(tiny_model(tmp_path)))
    row = measure(arm, arm, Workload(batch=2, prompt=24, output=5), rounds=2, seconds=10)
    assert row.baseline.ttft_ms > 0
    assert row.compressed.tpot_ms > 0
    assert row.predicted_ratio == 1.0
    assert list(arm.steps([[3] * 24, [4] * 9], 5))[-1] == 5


@pytest.mark.parametrize(("speedup", "resolved"), [(1.0, False), (1.5, True)])
def test_noise_is_told_from_a_speedup(speedup: float, resolved: bool):
    clock = Clock(noise=0.02)
    row = measure(SimulatedArm(clock, 0.2, 0.1), SimulatedArm(clock, 0.2, 0.1 / speedup), WORK, 8, 1e9, clock)
    assert row.resolved is resolved
    assert row.control_ci95 is not None
    assert 0.9 < row.control_ci95[0] < row.control_ci95[1] < 1.1
    assert row.prompt_resolved is False


def test_a_ratio_inside_the_control_band_is_not_resolved():
    measured = Estimate(1.05, (1.02, 1.08))
    assert not is_resolved(measured, Estimate(1.0, (0.94, 1.06)))
    assert is_resolved(measured, Estimate(1.0, (0.97, 1.03)))
    assert not is_resolved(measured, Estimate(1.0, None))


def test_the_budget_ends_the_rounds_but_never_before_two():
    clock = Clock()
    arm = SimulatedArm(clock, 1.0, 0.1)  # a run takes 2 s, warming up 4 s, a round 8 s
    assert measure(arm, arm, WORK, 10, 1.0, clock).rounds == 2
    assert measure(arm, arm, WORK, 10, 30.0, clock).rounds == 3
    assert measure(arm, arm, WORK, 4, 1e9, clock).rounds == 4


def test_no_prompt_is_met_twice_by_one_arm():
    clock = Clock()
    baseline, compressed = SimulatedArm(clock, 1.0, 0.1), SimulatedArm(clock, 1.0, 0.1)
    measure(baseline, compressed, WORK, 3, 1e9, clock)
    assert len(set(baseline.seen)) == len(baseline.seen) == (3 * 2 + 1) * WORK.batch
    assert sorted(baseline.seen) == sorted(compressed.seen)
    assert prompts_for(WORK, 256, 5) == prompts_for(WORK, 256, 5)


def test_predicted_ratio_is_the_bytes_read():
    clock = Clock()
    quantized = SimulatedArm(clock, 1, 0.1, weight_bytes=400_000)
    baseline = SimulatedArm(clock, 1, 0.1)
    embedding = 256 * 64 * 4
    cache = 2 * 37.5 * (2 * 2 * 16 * 4) * 2  # batch · context · keys and values of 2 heads · layers
    assert bytes_per_step(baseline, WORK) == 1_000_000 - embedding + cache
    tied = SimulatedArm(clock, 1, 0.1, spec=replace(SPEC, tied=True))
    assert bytes_per_step(tied, WORK) == 1_000_000 + cache
    experts = Experts(4, 1, 32, True, (True, True), "mlp", ("gate_proj", "up_proj", "down_proj"))
    mixture = SimulatedArm(clock, 1, 0.1, spec=replace(SPEC, tied=True, experts=experts), expert_bytes=800_000)
    assert WORK.batch == 2
    assert bytes_per_step(mixture, WORK) == pytest.approx(200_000 + 800_000 * (1 - 0.75**2) + cache)
    row = measure(baseline, quantized, WORK, 2, 1e9, clock)
    assert row.predicted_ratio == pytest.approx((1_000_000 - embedding + cache) / (400_000 - embedding + cache))


def test_a_workload_beyond_the_models_positions_is_refused():
    clock = Clock()
    arm = SimulatedArm(clock, 1.0, 0.1)
    with pytest.raises(UserError, match=r"prompt 600 \+ output 8 exceeds the model's 512 positions"):
        measure(arm, arm, Workload(1, 600, 8), 2, 1.0, clock)


def test_few_rounds_fall_back_to_the_t_interval():
    estimate = paired_log_ratio([2.0, 2.2], [1.0, 1.0])
    assert estimate.interval is not None
    assert estimate.interval[0] < 2.0 < 2.2 < estimate.interval[1]
    assert paired_log_ratio([2.0], [1.0]).interval is None
