"""Log-probabilities and divergences, interpreted, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compress.kernels import logprob
from compress.kernels import logprob_triton as logprob_kernel
from compress.kernels.launch import run
from compress.kernels.logprob import TokenLogprobs
from tests.kernels.interpreted.rounding import DTYPES, SM90, U32, assert_within, poisoned, randn

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # of −∞ − −∞, not taken


def exact_logprobs(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.double()
    return wide.log_softmax(1)[torch.arange(len(target)), target], wide.logsumexp(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 8192, 8193, 20001])
def test_token_logprobs(vocabulary: int, dtype: torch.dtype) -> None:
    logits = randn(5, vocabulary, dtype=dtype) * 4
    logits[0, vocabulary // 2] = 200.0  # its probability is 1: all others vanish
    logits[1] = -0.0
    logits[2, : vocabulary - 1] = -math.inf
    target = torch.tensor([vocabulary // 2, vocabulary - 1, vocabulary - 1, 0, vocabulary // 3])
    out = logprob_kernel.token_logprobs(logits, target)
    exact, total = exact_logprobs(logits, target)
    # About 40 roundings in the tree of the sum, the same in its logarithm; then differences of that size.
    assert_within(out.logprob_T, exact, 40 * U32 + 4 * U32 * exact.abs())
    assert_within(out.logsumexp_T, total, 40 * U32 + 4 * U32 * total.abs())
    assert torch.equal(out.argmax_T, torch.from_numpy(logits.float().numpy().argmax(1)))  # numpy's is the first
    assert out.logprob_T[2] == 0


def test_strange_logits_and_targets() -> None:
    logits = torch.zeros(6, 9000)
    logits[0] = -math.inf
    logits[1, 5], logits[2, 8500] = math.inf, math.nan
    logits[5, 8999] = -math.inf
    target = torch.tensor([3, 4, 4, -1, 9000, 8999])
    with np.errstate(invalid="ignore", divide="ignore"):
        out = logprob_kernel.token_logprobs(logits, target)
    assert out.logprob_T[:5].isnan().all()
    assert out.logprob_T[5] == -math.inf
    assert torch.equal(out.logsumexp_T.isnan(), torch.tensor([False, True, True, False, False, False]))
    assert out.logsumexp_T[0] == -math.inf
    expected = logprob.token_logprobs(logits, target)
    assert torch.equal(out.logprob_T.isnan(), expected.logprob_T.isnan())
    assert torch.equal(out.logsumexp_T.isnan(), expected.logsumexp_T.isnan())


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 20000)
    logits[0, [8190, 8193, 19999]] = 2.0
    out = logprob_kernel.token_logprobs(logits, torch.tensor([0, 0]))
    assert out.argmax_T.tolist() == [8190, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [10, 9001])
def test_kl_divergence(vocabulary: int, dtype: torch.dtype) -> None:
    p, q = randn(5, vocabulary, dtype=dtype) * 3, randn(5, vocabulary, dtype=dtype, seed=1) * 3
    p[0, 3] = 60.0
    q[1] = p[1]
    p[2, :5] = q[2, :5] = -math.inf
    q[3, 1] = -math.inf
    log_p, log_q = p.double().log_softmax(1), q.double().log_softmax(1)
    exact = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum(1)
    out = logprob_kernel.kl_divergence(p, q)
    assert out[3] == exact[3] == math.inf
    rest = torch.tensor([0, 1, 2, 4])
    # Three sums that cancel: each as rounded as a log-probability, of terms up to the largest |p − q|.
    largest = (p.double() - q.double()).nan_to_num(0, 0, 0).abs().amax(1)[rest]
    assert_within(out[rest], exact[rest], 60 * U32 * (1 + largest))


def test_scratch_is_written_before_it_is_read() -> None:
    logits, target = randn(2, 9000, dtype=torch.float16), torch.tensor([5, 8999])
    room = [poisoned(2, dtype=torch.float32) for _ in range(2)]
    out = TokenLogprobs(room[0], room[1], torch.full((2,), -7))
    partial, ids = poisoned(2, 2, 2, dtype=torch.float32), torch.full((2, 2), -7, dtype=torch.int32)
    run(logprob_kernel.plan_token_logprobs(logits, target, partial, ids, out, SM90))
    assert torch.equal(out.logprob_T, logprob_kernel.token_logprobs(logits, target).logprob_T)
    assert torch.equal(out.argmax_T, logits.argmax(1))
