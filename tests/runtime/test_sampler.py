"""Distributions by hand and by χ²; randomness that depends on nothing but its key."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from compress.runtime.request import SamplingParams, request_key
from compress.runtime.sampler import (
    Draw,
    distribution,
    filter_probabilities,
    logprobs_of,
    pick,
    sample,
    uniform,
)

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (None, 1.0, 0.0, [0.1, 0.4, 0.05, 0.25, 0.2]),
        (0, 1.0, 0.0, [0.1, 0.4, 0.05, 0.25, 0.2]),
        (1, 1.0, 0.0, [0, 1, 0, 0, 0]),
        (2, 1.0, 0.0, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (99, 1.0, 0.0, [0.1, 0.4, 0.05, 0.25, 0.2]),
        # 0.4 falls short of 0.6, 0.4 + 0.25 does not
        (None, 0.6, 0.0, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (None, 0.0001, 0.0, [0, 1, 0, 0, 0]),
        # after top-3 the shares are 0.47, 0.29, 0.24: two of them pass 0.7, which they would not without
        (3, 0.7, 0.0, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        # at least half as likely as 0.4
        (None, 1.0, 0.45, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        (None, 1.0, 1.0, [0, 1, 0, 0, 0]),
        (2, 1.0, 0.7, [0, 1, 0, 0, 0]),
    ],
)
def test_filters_by_hand(top_k: int | None, top_p: float, min_p: float, expected: list[float]) -> None:
    torch.testing.assert_close(
        filter_probabilities(PROBS, top_k, top_p, min_p), torch.tensor(expected, dtype=torch.float32)
    )


def test_a_nucleus_wider_than_the_first_try() -> None:
    """A flat vocabulary of 5,000: half of the probability is half of the tokens."""
    kept = filter_probabilities(torch.full((5000,), 1 / 5000), None, 0.5, 0.0)
    assert abs(int((kept > 0).sum()) - 2500) <= 1


def test_temperature_scales_logits_and_zero_is_greedy() -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0])
    torch.testing.assert_close(
        distribution(logits_V, SamplingParams(temperature=2.0)), torch.softmax(logits_V / 2, dim=-1)
    )
    assert distribution(logits_V, SamplingParams()).tolist() == [0, 1, 0]
    for tiny in (1e-30, 1e-300, 5e-324):  # the last two are zero in float32
        assert distribution(logits_V, SamplingParams(temperature=tiny)).tolist() == [0, 1, 0]
    torch.testing.assert_close(distribution(logits_V, SamplingParams(temperature=1e300)), torch.full((3,), 1 / 3))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=6),
        SamplingParams(temperature=1.3, top_p=0.8),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    """χ² of 10,000 draws on a vocabulary of ten: p > 0.001. The draws are fixed, so this does not flicker."""
    logits_V = torch.randn(10, generator=torch.Generator().manual_seed(0)) * 1.5
    probs_V = distribution(logits_V, params)
    counts_V = torch.zeros(10)
    for position in range(10_000):
        counts_V[pick(probs_V, uniform(params.seed, b"key", position))] += 1
    possible = probs_V > 0
    assert counts_V[~possible].sum() == 0
    expected = (probs_V[possible].double() / probs_V[possible].double().sum() * 10_000).numpy()
    assert chisquare(counts_V[possible].numpy(), expected).pvalue > 0.001


def test_every_part_of_the_key_changes_the_draw() -> None:
    base = (1, b"a", 7, 0)
    others = [(2, b"a", 7, 0), (1, b"b", 7, 0), (1, b"a", 8, 0), (1, b"a", 7, 1), (-1, b"a", 7, 0)]
    assert uniform(*base) == uniform(*base)
    assert len({uniform(*key) for key in [base, *others]}) == 6
    assert request_key([1, 23], 0) != request_key([12, 3], 0)
    assert request_key([1, 2], 0) != request_key([1, 2], 1)


def test_the_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    probs_V = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [pick(probs_V, u) for u in (0.0, 0.2499, 0.25, 1 - 2**-48)] == [1, 1, 3, 3]


def test_rows_do_not_see_each_other() -> None:
    logits_NV = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.5),
    ]
    draws = [Draw(params, b"k", position) for position, params in enumerate(kinds)]
    together = sample(logits_NV, draws)
    assert together == [sample(logits_NV[i : i + 1], [draws[i]])[0] for i in range(4)]
    assert together[0] == int(logits_NV[0].argmax())


def test_logprobs_are_the_models_own() -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0])
    expected_V = torch.log_softmax(logits_V, -1)
    found = logprobs_of(logits_V, 0, 2)
    assert found.chosen == pytest.approx(float(expected_V[0]), abs=1e-6)
    assert list(found.top) == [1, 2]
    assert found.top[2] == pytest.approx(float(expected_V[2]), abs=1e-6)
