"""Choosing the next token.

Every random number is a hash of (seed, request key, position), so a request draws the same whatever else is running,
in whatever order, and again after preemption.

Shapes: N requests, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.runtime.request import SamplingParams, TokenLogprobs

NUCLEUS_FIRST_TRY = 1024  # a sort of so many tokens nearly always holds the nucleus; the whole vocabulary seldom must


@dataclass(frozen=True)
class Draw:
    """One token to choose: by what rules, and as which draw."""

    params: SamplingParams
    key: bytes
    position: int  # of the token to come


def sample(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of float32 logits."""
    tokens = logits_NV.argmax(-1).tolist()
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            probs_V = distribution(logits_NV[row], draw.params)
            tokens[row] = pick(probs_V, uniform(draw.params.seed, draw.key, draw.position))
    return tokens


def distribution(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities [V] that a token is drawn from: temperature, then top-k, top-p and min-p; float32.

    Greedy puts everything on the likeliest token, so that speculation treats it like any other distribution.
    """
    if params.temperature == 0:
        return torch.zeros_like(logits_V).scatter(0, logits_V.argmax(-1, keepdim=True), 1.0)
    # Shifted first, and the temperature held above float32's zero: a tiny one must give neither infinity nor 0 / 0.
    temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
    probs_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)
    return filter_probabilities(probs_V, params.top_k, params.top_p, params.min_p)


def filter_probabilities(probs_V: torch.Tensor, top_k: int | None, top_p: float, min_p: float) -> torch.Tensor:
    """Zero what the filters drop, and scale the rest to sum to 1.

    top_k keeps the k likeliest. top_p then keeps the fewest of those whose share reaches p (arXiv 1904.09751). min_p
    keeps what is at least min_p times as likely as the likeliest (arXiv 2407.01082). The likeliest always stays.
    """
    vocab = probs_V.shape[0]
    limit = min(top_k or vocab, vocab)
    if limit < vocab or top_p < 1:
        kept_V = _likeliest(probs_V, limit, top_p)
        probs_V = torch.zeros_like(probs_V).scatter(0, kept_V, probs_V[kept_V])
    if min_p > 0:
        probs_V = torch.where(probs_V >= min_p * probs_V.max(), probs_V, 0.0)
    return probs_V / probs_V.sum()


def _likeliest(probs_V: torch.Tensor, limit: int, top_p: float) -> torch.Tensor:
    """Ids of the tokens that top-k and top-p keep, likeliest first."""
    count = limit if top_p == 1 else min(limit, NUCLEUS_FIRST_TRY)
    sorted_k, ids_k = torch.topk(probs_V, count)
    if top_p == 1:
        return ids_k
    total = 1.0 if limit == probs_V.shape[0] else float(sorted_k.double().sum())
    if count < limit and float(sorted_k.double().sum()) < top_p:
        sorted_k, ids_k = torch.topk(probs_V, limit)
        total = float(sorted_k.double().sum())
    before_k = sorted_k.double().cumsum(0) - sorted_k.double()
    return ids_k[before_k < top_p * total]


def pick(probs_V: torch.Tensor, u: float) -> int:
    """The token at which the cumulative probability passes u ∈ [0, 1)."""
    # float64: a float32 sum over 100,000 tokens is off by more than many of them weigh
    cumulative_V = probs_V.double().cumsum(0)
    point = torch.tensor([u], dtype=torch.float64, device=probs_V.device) * cumulative_V[-1]
    return int(torch.searchsorted(cumulative_V, point, right=True))


def uniform(seed: int, key: bytes, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 48 bits; `stream` tells apart several draws for one position."""
    digest = hashlib.blake2b(f"{seed},{position},{stream}".encode(), key=key, digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def logprobs_of(logits_V: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probability of `token` and of the `count` likeliest, under the model's own distribution."""
    logprobs_V = torch.log_softmax(logits_V.float(), dim=-1)
    values, ids = torch.topk(logprobs_V, count)
    return TokenLogprobs(float(logprobs_V[token]), dict(zip(ids.tolist(), values.tolist(), strict=True)))
