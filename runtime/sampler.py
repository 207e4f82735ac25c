"""Choosing the next token: requests' rules in a form that one operation takes for all rows of a step.

Every random number is a hash of (seed, request key, position, stream), so a request draws the same whatever else is
running, in whatever order, and again after preemption.

Shapes: N rows (a request has one, or one for each draft token to verify and one more), n some of them, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from compress.kernels.operations import Operations
from compress.kernels.sampling import Rules
from compress.runtime.penalties import Draw, adjust
from compress.runtime.request import SamplingParams, TokenLogprobs

__all__ = ["Draw", "adjust", "choose", "distributions", "logprobs", "rules_of", "sample"]


def sample(operations: Operations, logits_NV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of the model's float32 logits, under the rules of its request."""
    return choose(operations, adjust(logits_NV, draws), draws).tolist()


def choose(operations: Operations, logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """One token [N] for each row of logits that penalties and biases have changed; on the device, without a wait."""
    # no number is drawn for a greedy row: a hash costs as much as a row's argmax
    uniforms = [draw.uniform() if draw.params.temperature > 0 else 0.0 for draw in draws]
    return operations.sample_tokens(logits_NV, rules_of([draw.params for draw in draws], logits_NV.shape[1]), uniforms)


def distributions(operations: Operations, logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The float32 probabilities [N, V] that `choose` draws from: temperature, then top-k, top-p and min-p.

    Greedy puts everything on the likeliest token, so that speculation treats it like any other distribution.
    """
    return operations.token_distributions(logits_NV, rules_of([draw.params for draw in draws], logits_NV.shape[1]))


def rules_of(params: Sequence[SamplingParams], vocab: int) -> Rules:
    """What may be drawn in each row."""
    return Rules(
        temperature=[one.temperature for one in params],
        top_k=[one.top_k or vocab for one in params],
        top_p=[one.top_p for one in params],
        min_p=[one.min_p for one in params],
    )


def logprobs(
    operations: Operations, logits_NV: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probability of a token of each row and of so many of the likeliest, under the model's own distribution.

    For sampled tokens, or a prompt's next ones. −∞ where a token is impossible.
    """
    if not tokens:
        return []
    found = operations.top_logprobs(logits_NV, tokens, max(counts))
    # one copy to the host; float64 holds the ids too
    parts = (found.chosen_N[:, None], found.values_Nk, found.ids_Nk)
    values = torch.cat([part.double() for part in parts], dim=1).tolist()
    width = found.ids_Nk.shape[1]
    return [
        TokenLogprobs(
            _number(row[0]),
            {
                int(token): _number(value)
                for token, value in zip(row[1 + width :][:count], row[1:][:count], strict=True)
            },
        )
        for row, count in zip(values, counts, strict=True)
    ]


def _number(logprob: float) -> float:
    """A model whose logits overflow has no probabilities; nobody may be sent NaN."""
    return -math.inf if math.isnan(logprob) else logprob
