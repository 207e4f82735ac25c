"""Paired statistics against scipy, hand-computed values and seeded simulations of coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from compress.evaluate.compare import (
    Estimate,
    clustered_mean,
    contains,
    hodges_lehmann,
    paired_log_ratio,
    signed_rank_pmf,
)


def test_clusters_of_one_item_are_the_t_interval():
    values = np.random.default_rng(0).normal(size=12)
    estimate = clustered_mean(values, np.ones(12))
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert estimate.value == pytest.approx(values.mean(), abs=1e-12)
    assert estimate.interval == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_clustered_mean_by_hand():
    # Two clusters, [1, 1] and [0]: m = 2/3, residuals 2/3 and -2/3, SE = sqrt(2 · 8/9) / 3 = 4/9, t(1) = 12.7062.
    estimate = clustered_mean([2.0, 0.0], [2, 1])
    assert estimate.value == pytest.approx(2 / 3)
    assert estimate.interval == pytest.approx((2 / 3 - 12.7062 * 4 / 9, 2 / 3 + 12.7062 * 4 / 9), abs=1e-4)


def test_clustering_widens_the_interval_of_dependent_items():
    shift = np.random.default_rng(1).normal(size=20)
    items = np.repeat(shift, 50)
    clustered = clustered_mean(shift * 50, np.full(20, 50)).interval
    token_level = clustered_mean(items, np.ones(1000)).interval
    assert clustered is not None
    assert token_level is not None
    assert (clustered[1] - clustered[0]) > 5 * (token_level[1] - token_level[0])


def test_one_cluster_has_no_interval_and_zero_variance_no_division_by_zero():
    assert clustered_mean([3.0], [4]) == Estimate(0.75, None)
    assert clustered_mean([0.0, 0.0, 0.0], [5, 5, 5]) == Estimate(0.0, (0.0, 0.0))
    assert clustered_mean([4.0, 0.0], [4, 0]).interval is None  # an empty cluster is no cluster
    with pytest.raises(ValueError, match="no items"):
        clustered_mean([0.0], [0])


def test_exponentiated_interval_of_a_zero_log_ratio_is_one():
    assert clustered_mean([0.0, 0.0], [1, 1]).exponentiated() == Estimate(1.0, (1.0, 1.0))


def test_coverage_of_the_clustered_interval():
    """95 % intervals over 12 unequal clusters with a shared effect cover the truth; token-level ones do not."""
    random = np.random.default_rng(2)
    runs, covered, naive = 1000, 0, 0
    for _ in range(runs):
        counts = random.integers(15, 26, size=12)
        values = [random.normal(size=n) + random.normal() * 0.5 for n in counts]
        covered += contains(clustered_mean([v.sum() for v in values], counts).interval, 0.0)
        items = np.concatenate(values)
        naive += contains(clustered_mean(items, np.ones(len(items))).interval, 0.0)
    assert 0.92 <= covered / runs <= 0.97
    assert naive / runs < 0.75


def signed_rank_p(values: np.ndarray) -> float:
    return float(np.asarray(stats.wilcoxon(values, method="exact"))[1])


def test_signed_rank_distribution_matches_scipy():
    for rounds in (1, 5, 9):
        pmf = signed_rank_pmf(rounds)
        assert pmf.sum() == pytest.approx(1.0)
        values = np.arange(1, rounds + 1, dtype=float)
        # All ranks positive: the two-sided p value is 2 · P(W = 0).
        assert 2 * pmf[0] == pytest.approx(signed_rank_p(values))


def test_hodges_lehmann_by_hand():
    # Walsh averages of 0, 1, 10: 0, 0.5, 1, 5, 5.5, 10 -> median 3; three rounds carry no 95 % interval.
    assert hodges_lehmann([0.0, 1.0, 10.0]) == Estimate(3.0, None)
    assert hodges_lehmann([1.0] * 5).interval is None
    # At six rounds k = 1: the interval is the whole range, at level 1 − 2/64 = 96.9 %.
    assert hodges_lehmann([1.0, 2, 3, 4, 5, 60]).interval == (1.0, 60.0)


def test_interval_and_signed_rank_test_agree():
    """0 lies outside the 95 % interval exactly when the exact two-sided test has p ≤ 0.05."""
    random = np.random.default_rng(3)
    for _ in range(60):
        values = random.normal(loc=0.6, size=10)
        p_value = signed_rank_p(values)
        assert contains(hodges_lehmann(values).interval, 0.0) == (p_value > 0.05)


def test_coverage_with_disturbed_rounds():
    """One round in six is disturbed tenfold; the interval still covers 1 at its nominal rate or above."""
    random = np.random.default_rng(4)
    covered = 0
    for _ in range(400):
        noise = random.normal(size=(2, 8)) * 0.03
        noise[random.random((2, 8)) < 1 / 6] *= 10
        baseline, compressed = np.exp(noise)
        covered += contains(paired_log_ratio(baseline, compressed).interval, 1.0)
    assert covered / 400 >= 0.93


def test_paired_log_ratio_recovers_a_known_ratio_under_drift():
    drift = np.exp(np.linspace(0, 1, 10))
    estimate = paired_log_ratio(2.0 * drift, drift)
    assert estimate.value == pytest.approx(2.0, abs=1e-12)
    assert estimate.interval == pytest.approx((2.0, 2.0), abs=1e-12)
    assert math.isclose(hodges_lehmann([0.0]).value, 0.0)
