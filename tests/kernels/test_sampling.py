"""Choosing tokens, on every path of a CPU, against a walk through the sorted vocabulary in float64."""

from __future__ import annotations

import math

import pytest
import torch

from compress.kernels import sampling
from tests.kernels.sampled_rows import FILTERS, PATHS, mixed, operations, rows_of_logits, rules_of


def kept_by_hand(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probabilities: one token after the other, from the likeliest, the lower id first among equals."""
    weights = ((logits_V.double() - logits_V.double().max()) / temperature).exp().float().double().tolist()
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:top_k]
    whole = math.fsum(weights[i] for i in order)
    out, before = [0.0] * len(weights), 0.0
    for i in order:
        if (top_p == 1 or before < top_p * whole) and weights[i] >= min_p:
            out[i] = weights[i]
        before += weights[i]
    return [weight / math.fsum(out) for weight in out]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("vocab", [1, 5, 64, 1000, 3001])
def test_distributions_by_hand(path: str, vocab: int) -> None:
    """The same tokens, but where a sum falls on the edge to rounding; probabilities to 5e-6 of themselves."""
    for name, logits_V in rows_of_logits(vocab).items():
        rules = rules_of(*FILTERS)
        found_NV = operations(path).token_distributions(logits_V.expand(len(FILTERS), -1), rules)
        for found_V, one in zip(found_NV, FILTERS, strict=True):
            expected_V = torch.tensor(kept_by_hand(logits_V, *one), dtype=torch.float64)
            moved = int(((found_V > 0) != (expected_V > 0)).sum())
            assert moved == 0 or (moved == 1 and one[2] < 1), (name, one)
            if not moved:
                torch.testing.assert_close(found_V.double(), expected_V, rtol=5e-6, atol=1e-12, msg=f"{name} {one}")


@pytest.mark.parametrize("path", PATHS)
def test_a_draw_is_of_the_distribution(path: str) -> None:
    """At the middle of the share of each token that may be drawn, where that is wide enough to tell."""
    for logits_V in rows_of_logits(300).values():
        for one in FILTERS:
            probs_V = operations(path).token_distributions(logits_V[None], rules_of(one))[0].double()
            ends_V = probs_V.cumsum(0)
            drawn = (probs_V > 1e-5).nonzero()[:, 0]
            points = ((ends_V - probs_V / 2) / ends_V[-1])[drawn].tolist()
            logits_NV = logits_V.expand(len(points), -1)
            found_N = operations(path).sample_tokens(logits_NV, rules_of(*[one] * len(points)), points)
            assert torch.equal(found_N, drawn)


@pytest.mark.parametrize("path", PATHS)
def test_greedy_takes_the_first_of_the_largest(path: str) -> None:
    logits_NV = torch.zeros(5, 2000)
    logits_NV[0, [1990, 130, 700]] = 2.0
    logits_NV[1, 1999] = 1e-30
    logits_NV[2] = -math.inf
    logits_NV[3, 64] = math.inf
    logits_NV[4] = -0.0
    logits_NV[4, 1000] = 0.0  # equal to −0
    rules = rules_of(*[(0.0, 2000, 1.0, 0.0)] * 5)
    assert operations(path).sample_tokens(logits_NV, rules, [0.5] * 5).tolist() == [130, 1999, 0, 64, 0]
    probs_NV = operations(path).token_distributions(logits_NV, rules)
    assert probs_NV.argmax(1).tolist() == [130, 1999, 0, 64, 0]
    assert torch.equal(probs_NV.sum(1), torch.ones(5))


@pytest.mark.parametrize("path", PATHS)
def test_logits_that_are_not_finite(path: str) -> None:
    """NaN is −∞; infinite logits share everything; where all are −∞, all are equal."""
    logits_NV = torch.randn(5, 130, generator=torch.Generator().manual_seed(0))
    logits_NV[0, ::2], logits_NV[1, [3, 128]], logits_NV[2] = math.nan, math.inf, -math.inf
    logits_NV[3] = math.nan
    logits_NV[4, 7], logits_NV[4, 9] = math.inf, math.nan
    probs_NV = operations(path).token_distributions(logits_NV, rules_of(*[(1.0, 130, 1.0, 0.0)] * 5))
    expected_V = torch.where(torch.arange(130) % 2 == 1, logits_NV[0].nan_to_num().exp(), 0.0)
    torch.testing.assert_close(probs_NV[0], expected_V / expected_V.sum())
    assert probs_NV[1].nonzero()[:, 0].tolist() == [3, 128]
    assert torch.equal(probs_NV[1, [3, 128]], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(probs_NV[2:4], torch.full((2, 130), 1 / 130))
    assert probs_NV[4].nonzero()[:, 0].tolist() == [7]
    for one in FILTERS:
        tokens_N = operations(path).sample_tokens(logits_NV, rules_of(*[one] * 5), [0.0, 0.3, 0.6, 0.9, 1 - 2**-48])
        assert ((tokens_N >= 0) & (tokens_N < 130)).all()
        assert tokens_N[0] % 2 == 1
        assert tokens_N[1] in (3, 128)
        assert tokens_N[4] == 7


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("vocab", [1, 65, 3001])
def test_logprobs_and_the_likeliest(path: str, vocab: int) -> None:
    """Against float64 to 4e-6; the order is exact, the lower id first among equals."""
    for name, logits_V in rows_of_logits(vocab).items():
        exact_V = logits_V.double().log_softmax(0)
        order = sorted(range(vocab), key=lambda i: (-float(logits_V[i]), i))
        for count in {0, 1, min(20, vocab), vocab}:
            found = operations(path).top_logprobs(logits_V[None], [vocab // 3], count)
            assert found.ids_Nk[0].tolist() == order[:count], name
            torch.testing.assert_close(found.chosen_N.double(), exact_V[[vocab // 3]], rtol=1e-6, atol=4e-6)
            torch.testing.assert_close(found.values_Nk[0].double(), exact_V[order[:count]], rtol=1e-6, atol=4e-6)


def test_nothing_on_a_device_waits_for_its_numbers() -> None:
    """Tensors without contents: to read one on the host, or to let a size depend on it, would fail."""
    logits_NV, rules, uniforms = mixed(200)
    logits_NV = logits_NV.to("meta")
    rows = len(logits_NV)
    assert sampling.sample_tokens(logits_NV, rules, uniforms).shape == (rows,)
    probs_NV = sampling.token_distributions(logits_NV, rules)
    assert sampling.pick_tokens(probs_NV, uniforms).shape == (rows,)
    assert sampling.top_logprobs(logits_NV, [0] * rows, 5).ids_Nk.shape == (rows, 5)
    drafts = [probs_NV[:2], probs_NV[:3]]
    accepted, token = sampling.verify_drafts(probs_NV[:7], drafts, [1] * 5, [0.5] * 5, uniforms[:7])
    assert accepted.shape == token.shape == (2,)
