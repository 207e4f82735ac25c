"""Log-probabilities and divergences against float64."""

from __future__ import annotations

import math

import pytest
import torch

from compress.kernels.logprob import kl_divergence, token_logprobs


def logits() -> torch.Tensor:
    x_TV = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 5
    x_TV[0, 3], x_TV[1, 500:] = 300.0, -math.inf
    return x_TV


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_token_logprobs(dtype: torch.dtype) -> None:
    """A sum of 1000 terms in float32 and its logarithm: 2e-6, and 1e-6 of the value."""
    x_TV, target_T = logits().to(dtype), torch.tensor([3, 499, 0, 999])
    out = token_logprobs(x_TV, target_T)
    exact_TV = x_TV.double().log_softmax(1)
    torch.testing.assert_close(out.logprob_T.double(), exact_TV[torch.arange(4), target_T], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(out.logsumexp_T.double(), x_TV.double().logsumexp(1), rtol=1e-6, atol=2e-6)
    assert torch.equal(out.argmax_T, x_TV.argmax(1))


def test_targets_that_do_not_exist() -> None:
    out = token_logprobs(logits(), torch.tensor([-1, 1000, 5, 5]))
    assert out.logprob_T.isnan().tolist() == [True, True, False, False]
    assert out.logsumexp_T.isfinite().all()


def test_logits_that_are_not_finite() -> None:
    x_TV = torch.zeros(4, 10)
    x_TV[0], x_TV[1, 2], x_TV[2, 2], x_TV[3, 2] = -math.inf, math.inf, math.nan, -math.inf
    out = token_logprobs(x_TV, torch.tensor([2, 3, 3, 2]))
    assert out.logprob_T[:3].isnan().all()
    assert out.logprob_T[3] == -math.inf


def test_divergence() -> None:
    p_TV, q_TV = logits(), logits().flip(0)
    p_TV[0], q_TV[0] = 0.0, torch.arange(1000) % 2 * math.log(3.0)  # uniform against odds of 1 : 3
    q_TV[1] = p_TV[1]
    exact = math.log(2.0) - math.log(3.0) / 2
    out = kl_divergence(p_TV, q_TV)
    assert out[0].item() == pytest.approx(exact, abs=1e-6)
    assert out[1] == 0
    assert out[2] == math.inf  # q's −∞ where p is finite
    assert (out >= -1e-6).all()


def test_no_rows() -> None:
    assert token_logprobs(torch.empty(0, 5), torch.empty(0, dtype=torch.int64)).argmax_T.shape == (0,)
    assert kl_divergence(torch.empty(0, 5), torch.empty(0, 5)).shape == (0,)
