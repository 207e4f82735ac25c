"""Paired divergence of two models: exact cases by hand, an independent float64 reference, and the limits."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.errors import RunError, UserError
from compress.evaluate.divergence import ROWS, compare_models, score_window, survival_curve
from tests.evaluate.models import FixedModel, HuggingFaceModel, load, perturbed
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceModel:
    return load(tiny_model(Path(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def ids_NS() -> torch.Tensor:
    return torch.randint(256, (5, 40), generator=torch.Generator().manual_seed(1))


def test_a_model_against_itself(model: HuggingFaceModel, ids_NS: torch.Tensor):
    """Row 34: compare(L, L) finds nothing, and divides by no zero variance."""
    accuracy = compare_models(model, model, ids_NS)
    assert accuracy.tokens == 5 * 39
    assert accuracy.perplexity.ratio == 1.0
    assert accuracy.perplexity.ci95 == (1.0, 1.0)
    assert accuracy.kl.mean == accuracy.kl.max == 0.0
    assert accuracy.top1_agreement == 1.0
    assert accuracy.top1_ci95 == (1.0, 1.0)
    assert accuracy.kl.survival == []


def test_a_perturbed_model_diverges_more_with_more_noise(model: HuggingFaceModel, ids_NS: torch.Tensor):
    """Row 34: a model that differs has KL > 0, ordered by how much it differs."""
    means = [compare_models(model, perturbed(model, noise), ids_NS).kl.mean for noise in (1e-3, 1e-2, 1e-1)]
    assert 0 < means[0] < means[1] < means[2]


def test_figures_match_float64_on_full_logits(model: HuggingFaceModel, ids_NS: torch.Tensor):
    other = perturbed(model, 0.05)
    accuracy = compare_models(model, other, ids_NS)
    with torch.no_grad():
        log_p, log_q = (m.model(ids_NS).logits.double().log_softmax(-1)[:, :-1] for m in (model, other))
    target = ids_NS[:, 1:, None]
    nll_p, nll_q = -log_p.gather(-1, target).mean().item(), -log_q.gather(-1, target).mean().item()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert accuracy.perplexity.baseline == pytest.approx(math.exp(nll_p), rel=1e-5)
    assert accuracy.perplexity.ratio == pytest.approx(math.exp(nll_q - nll_p), rel=1e-5)
    assert accuracy.kl.mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert accuracy.kl.max == pytest.approx(kl.max().item(), rel=1e-4)
    assert accuracy.kl.p99 == pytest.approx(np.quantile(kl.numpy(), 0.99), rel=1e-4)
    assert accuracy.top1_agreement == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item())
    assert accuracy.windows[2].kl == pytest.approx(kl[2].mean().item(), rel=1e-4)


def test_exact_divergence_of_two_tokens():
    p = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]).log()
    q = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]).log()
    scores = score_window(FixedModel(p), FixedModel(q), torch.tensor([0, 0, 1]))
    np.testing.assert_allclose(scores.kl_T, [0.5 * math.log(3), 0], atol=1e-7)
    np.testing.assert_allclose(scores.baseline_nll_T, [-math.log(0.75), math.log(2)], atol=1e-7)
    np.testing.assert_allclose(scores.compressed_nll_T, [math.log(4), math.log(2)], atol=1e-7)
    assert scores.agree_T.tolist() == [False, True]


def test_a_token_of_zero_probability_adds_nothing():
    masked = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, -torch.inf]])
    scores = score_window(FixedModel(masked), FixedModel(masked), torch.tensor([0, 1]))
    assert scores.kl_T.tolist() == [0.0]


def test_padded_vocabulary_is_cut_to_the_smaller(model: HuggingFaceModel, ids_NS: torch.Tensor):
    padded = perturbed(model, 0.0)
    head = torch.nn.Linear(64, 320, bias=False)
    with torch.no_grad():
        head.weight[:256] = model.model.lm_head.weight
    padded.model.lm_head = head
    accuracy = compare_models(model, padded, ids_NS)
    assert accuracy.kl.max < 1e-9
    assert accuracy.perplexity.ratio == pytest.approx(1.0, abs=1e-9)


def test_logits_are_bounded_in_memory():
    logits = torch.randn(700, 8)
    seen = []

    class Watching(FixedModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden.shape[0])
            return super().logits(hidden)

    scores = score_window(Watching(logits), Watching(logits), torch.randint(8, (700,)))
    assert max(seen) == ROWS
    assert sum(seen) == 2 * 699
    assert len(scores.kl_T) == 699


def test_non_finite_positions_are_counted_not_averaged():
    clean, broken = torch.randn(6, 4), torch.randn(6, 4)
    broken[2] = torch.nan
    accuracy = compare_models(FixedModel(clean), FixedModel(broken), torch.zeros(2, 6, dtype=torch.long))
    assert accuracy.non_finite == 2
    assert accuracy.tokens == 8
    assert math.isfinite(accuracy.kl.mean)
    with pytest.raises(RunError, match="finite"):
        compare_models(FixedModel(clean), FixedModel(broken * torch.nan), torch.zeros(2, 6, dtype=torch.long))


def test_one_window_has_no_interval(model: HuggingFaceModel, ids_NS: torch.Tensor):
    accuracy = compare_models(model, perturbed(model, 0.01), ids_NS[:1])
    assert accuracy.perplexity.ci95 is None
    assert accuracy.kl.ci95 is None


def test_progress_and_unusable_text(model: HuggingFaceModel, ids_NS: torch.Tensor):
    calls = []
    compare_models(model, model, ids_NS, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    with pytest.raises(UserError, match="at least 2 tokens"):
        compare_models(model, model, ids_NS[:, :1])
    with pytest.raises(UserError, match="token id 9 lies outside"):
        score_window(FixedModel(torch.randn(3, 4)), FixedModel(torch.randn(3, 4)), torch.tensor([0, 9, 0]))


def test_survival_curve_falls_from_the_share_above_the_floor_to_zero():
    curve = survival_curve(np.array([0.0, 0.0, 1e-3, 1.0]))
    assert curve[0] == (pytest.approx(1e-6), 0.5)
    assert curve[-1] == (pytest.approx(1.0), 0.0)
    assert all(a[1] >= b[1] for a, b in itertools.pairwise(curve))
    assert survival_curve(np.full(5, 0.3)) == []
    assert survival_curve(np.zeros(5)) == []
