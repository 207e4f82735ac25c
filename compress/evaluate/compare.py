"""Paired statistics: two models, the same texts, an interval for the difference.

Shapes: G clusters (windows of text), R rounds of a benchmark, N items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval; `interval` is None where the data cannot carry one (one cluster only)."""

    value: float
    interval: Interval | None

    def exponentiated(self) -> Estimate:
        """The same estimate on the ratio scale, where `value` is a mean of logarithms."""
        interval = None if self.interval is None else (math.exp(self.interval[0]), math.exp(self.interval[1]))
        return Estimate(math.exp(self.value), interval)


def clustered_mean(sum_G: ArrayLike, count_G: ArrayLike, confidence: float = 0.95) -> Estimate:
    """The mean over all items, with an interval that allows for dependence inside each cluster.

    sum_G and count_G are the total and the number of items of each cluster. With mean m = Σs / Σn,

        SE² = G/(G−1) · Σ_g (s_g − m·n_g)² / n²        (the CR1 estimator)

    and the interval is m ± t(G−1)·SE. Tokens of one text are not independent: the token-level error of a perplexity
    is too small. Source: clustered standard errors in E. Miller, arXiv 2411.00640; G/(G−1) is
    the small-sample factor of Liang and Zeger's estimator for a mean.
    """
    sums = np.asarray(sum_G, dtype=np.float64)
    counts = np.asarray(count_G, dtype=np.float64)
    total = counts.sum()
    if total <= 0:
        raise ValueError("clustered_mean: no items")
    mean = float(sums.sum() / total)
    clusters = int((counts > 0).sum())
    if clusters < 2:
        return Estimate(mean, None)
    residual_G = sums - mean * counts
    error = math.sqrt(clusters / (clusters - 1) * float((residual_G**2).sum())) / total
    half = float(stats.t.ppf(0.5 + confidence / 2, clusters - 1)) * error
    return Estimate(mean, (mean - half, mean + half))


def hodges_lehmann(values_R: ArrayLike, confidence: float = 0.95) -> Estimate:
    """The centre of paired differences: the median of their pairwise means, with the exact signed-rank interval.

    The interval runs from the k-th smallest to the k-th largest of the R(R+1)/2 Walsh averages, k the largest rank
    with P(W ≤ k − 1) ≤ (1 − confidence)/2 under Wilcoxon's null distribution. It assumes differences symmetric about
    their centre, not normal ones, so a round disturbed by another process does little. Fewer than six rounds cannot
    reach 95 %: the interval is None. Source: Hollander, Wolfe and Chicken, Nonparametric Statistical Methods,
    3rd edition, 3.2 and 3.3.
    """
    values = np.asarray(values_R, dtype=np.float64)
    rounds = len(values)
    if rounds == 0:
        raise ValueError("hodges_lehmann: no rounds")
    first, second = np.triu_indices(rounds)
    walsh = np.sort((values[first] + values[second]) / 2)
    rank = int((np.cumsum(signed_rank_pmf(rounds)) <= (1 - confidence) / 2).sum())
    interval = None if rank == 0 else (float(walsh[rank - 1]), float(walsh[len(walsh) - rank]))
    return Estimate(float(np.median(walsh)), interval)


def signed_rank_pmf(rounds: int) -> np.ndarray:
    """P(W = w) for w = 0 … R(R+1)/2: each of the ranks 1 … R carries a plus sign with probability one half."""
    pmf = np.ones(1)
    for rank in range(1, rounds + 1):
        grown = np.zeros(len(pmf) + rank)
        grown[: len(pmf)] += pmf / 2
        grown[rank:] += pmf / 2
        pmf = grown
    return pmf


def paired_log_ratio(numerator_R: ArrayLike, denominator_R: ArrayLike, confidence: float = 0.95) -> Estimate:
    """The ratio of two positive measurements taken in the same rounds, as exp of the centre of its logarithms.

    The interval is the signed-rank one; below six rounds, where none reaches 95 %, that of Student's t.
    """
    log_ratio = np.log(np.asarray(numerator_R, dtype=np.float64)) - np.log(np.asarray(denominator_R, dtype=np.float64))
    centre = hodges_lehmann(log_ratio, confidence)
    if centre.interval is None:
        centre = clustered_mean(log_ratio, np.ones(len(log_ratio)), confidence)
    return centre.exponentiated()


def contains(interval: Interval | None, value: float) -> bool:
    """Whether `value` lies in the interval; an interval that is missing excludes nothing."""
    return interval is None or interval[0] <= value <= interval[1]
