"""Log-probabilities of given tokens, and the divergence of two models, for evaluation.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    logprob_T: torch.Tensor  # float32: log softmax(logits)[target]; NaN where the target is not in [0, V)
    logsumexp_T: torch.Tensor  # float32
    argmax_T: torch.Tensor  # int64: the first of the largest logits


def token_logprobs(logits_TV: torch.Tensor, target_T: torch.Tensor) -> TokenLogprobs:
    """In float32. Logits of −∞ have probability 0; a NaN or +∞ makes its row NaN, and its argmax any id."""
    wide_TV = logits_TV.float()
    known_T = (target_T >= 0) & (target_T < wide_TV.shape[1])
    picked_T = wide_TV.gather(1, torch.where(known_T, target_T, 0).long()[:, None])[:, 0]
    top_T, sum_T = wide_TV.amax(1), wide_TV.logsumexp(1)
    # From the largest logit: its rounding, not that of the sum, bounds the error of a likely token.
    above_T = (wide_TV - top_T[:, None]).exp().sum(1).log()
    logprob_T = torch.where(known_T, picked_T - top_T - above_T, torch.nan)
    sum_T = torch.where(top_T == torch.inf, torch.nan, sum_T)
    return TokenLogprobs(logprob_T, sum_T, wide_TV.argmax(1))


def kl_divergence(p_TV: torch.Tensor, q_TV: torch.Tensor) -> torch.Tensor:
    """KL(softmax p ‖ softmax q) of each row of logits, in nats: float32 [T]."""
    p_TV, q_TV = p_TV.float().log_softmax(1), q_TV.float().log_softmax(1)
    return torch.where(p_TV > -torch.inf, p_TV.exp() * (p_TV - q_TV), 0.0 * p_TV.exp()).sum(1)
