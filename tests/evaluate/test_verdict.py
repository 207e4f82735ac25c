"""The words that stand for the figures: no claim that the interval does not carry."""

from __future__ import annotations

import pytest

from compress.evaluate import contract
from compress.evaluate.verdict import accuracy_verdict, not_measured, percent, speed_verdict
from tests.evaluate.sample import empty_report, sample_accuracy, sample_report, sample_speed


def accuracy(
    ratio: float, ci95: tuple[float, float] | None, kl: float = 0.02, non_finite: int = 0
) -> contract.Accuracy:
    return contract.Accuracy(
        tokens=1000,
        window=100,
        perplexity=contract.Perplexity(baseline=10.0, compressed=10.0 * ratio, ratio=ratio, ci95=ci95),
        kl=contract.Divergence(mean=kl, ci95=None, p99=kl, max=kl, median=kl),
        top1_agreement=0.95,
        non_finite=non_finite,
    )


@pytest.mark.parametrize(
    ("ratio", "ci95", "level", "label"),
    [
        (1.001, (0.998, 1.004), "open", "no difference detected"),
        (1.004, (1.002, 1.006), "good", "small loss"),
        (1.012, (1.006, 1.018), "fair", "measurable loss"),
        (1.076, (1.065, 1.087), "bad", "measurable loss"),
        (0.980, (0.970, 0.990), "fair", "lower perplexity"),
        (1.050, None, "open", "no interval"),
    ],
)
def test_accuracy_in_words(ratio: float, ci95: tuple[float, float] | None, level: str, label: str):
    """Row 34: inside the noise is `no difference detected`, never `equal`."""
    verdict = accuracy_verdict(accuracy(ratio, ci95))
    assert (verdict.level, verdict.label) == (level, label)


def test_inconclusive_perplexity_still_tells_the_divergence():
    """Row 34."""
    assert "mean KL is 0.02 nats" in accuracy_verdict(accuracy(1.0, (0.99, 1.01))).text
    identical = accuracy_verdict(accuracy(1.0, (1.0, 1.0), kl=0.0))
    assert identical.level == "good"
    assert "identical" in identical.text


def test_perplexity_cannot_hide_a_divergence():
    """Row 34: a ratio inside its interval beside a large KL is a loss, not `no difference`."""
    far = accuracy(1.0, (0.99, 1.01), kl=0.4)
    far.kl.ci95 = (0.35, 0.45)
    assert accuracy_verdict(far).label == "predictions differ"
    far.kl.ci95 = (0.01, 0.8)
    assert accuracy_verdict(far).label == "no difference detected"


def test_missing_numbers_outweigh_a_good_ratio():
    verdict = accuracy_verdict(accuracy(0.9, (0.8, 0.95), non_finite=3))
    assert verdict.level == "bad"
    assert "3 positions" in verdict.text


def test_speed_in_words():
    assert speed_verdict(sample_speed(1, 1.0)).label == "not resolved"
    faster = speed_verdict(sample_speed(1, 1.3))
    assert faster.label == "faster"
    assert "explain" not in faster.text
    assert speed_verdict(sample_speed(1, 0.6)).label == "slower"
    assert "more than the bytes read explain (1.40)" in speed_verdict(sample_speed(1, 2.0)).text


def test_what_nobody_measured_is_said():
    missing = "\n".join(not_measured(empty_report()))
    assert "accuracy:" in missing
    assert "speed:" in missing
    assert "accuracy:" not in "\n".join(not_measured(sample_report()))


def test_percent_is_a_signed_change():
    assert percent(1.0123) == "+1.23 %"
    assert percent(0.5) == "-50 %"
    assert accuracy_verdict(sample_accuracy(shift=0.03)).label == "measurable loss"
