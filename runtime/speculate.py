"""Speculative sampling: a cheap proposer guesses tokens, one pass of the model verifies them, the distribution stays.

What a proposer says can only cost time: a token is accepted with a probability that makes the outcome the model's own
(arXiv 2211.17192, 2302.01318), whatever it was drawn from.

Shapes: N requests, R rows (1 + k for a request with k draft tokens), k draft tokens, V vocabulary, C hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from compress.runtime.draft_model import DraftModelProposer, check_tokenizers
from compress.runtime.ngram import NgramProposer
from compress.runtime.request import Drafts, Request
from compress.runtime.sampler import Draw, adjust, choose, distributions, pick, select_rows

__all__ = ["DraftLength", "DraftModelProposer", "NgramProposer", "Proposer", "Verdict", "check_tokenizers"]


class Proposer(Protocol):
    """Where drafts come from. Keeps what it knows of a request until that is forgotten."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Drafts]:
        """At most so many tokens for each request; none is fine."""
        ...

    def update(self, request: Request, hidden_C: torch.Tensor | None = None) -> None:
        """The request has new tokens. `hidden_C` is the model's state at the last token it has computed."""
        ...

    def forget(self, request: Request) -> None:
        """Drop all state of a request; nothing happens where there is none."""
        ...


@dataclass(frozen=True)
class Verdict:
    """Of a request's draft tokens the first `accepted` stand, and `token`, the model's own, follows them."""

    accepted: int
    token: int

    def tokens(self, drafts: Drafts) -> list[int]:
        return [*drafts.tokens[: self.accepted], self.token]


def decide(logits_RV: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Drafts]) -> list[Verdict]:
    """The next tokens of each request, from the model's float32 logits; requests without drafts are sampled.

    A request has a row for its last known token and one for each of its draft tokens, in this order. Tokens that
    were not drawn, or are drawn greedily, are accepted where they equal the token that would have been chosen
    without them: the same tokens as without speculation, by seed too. Tokens drawn from a distribution go through
    `verify`, which accepts more of them; there, seeds reproduce for the same lengths of drafts.
    """
    draws = [Draw.of(r, d.tokens[:i]) for r, d in zip(requests, drafts, strict=True) for i in range(len(d.tokens) + 1)]
    adjusted_RV = adjust(logits_RV, draws)
    starts = list(accumulate((len(one.tokens) + 1 for one in drafts), initial=0))
    rows_N = [range(start, end) for start, end in pairwise(starts)]
    drawn_N = [
        request.params.temperature > 0 and one.distributions is not None and len(one.tokens) > 0
        for request, one in zip(requests, drafts, strict=True)
    ]
    plain = [row for rows, drawn in zip(rows_N, drawn_N, strict=True) if not drawn for row in rows]
    others = [row for rows, drawn in zip(rows_N, drawn_N, strict=True) if drawn for row in rows]
    chosen = dict(zip(plain, choose(select_rows(adjusted_RV, plain), [draws[row] for row in plain]), strict=True))
    target_RV = distributions(select_rows(adjusted_RV, others), [draws[row] for row in others])
    verdicts = []
    for one, rows, drawn in zip(drafts, rows_N, drawn_N, strict=True):
        if drawn:
            target_kV, target_RV = target_RV[: len(rows)], target_RV[len(rows) :]
            chances = [draws[row].uniform(2) for row in rows[:-1]]
            verdicts.append(
                verify(target_kV, one.tokens, one.distributions, chances, [draws[row].uniform() for row in rows])
            )
        else:
            own = [chosen[row] for row in rows]
            accepted = _agreement(one.tokens, own)
            verdicts.append(Verdict(accepted, own[accepted]))
    return verdicts


def _agreement(guessed: Sequence[int], own: Sequence[int]) -> int:
    """How many guesses hold before the first that does not."""
    for i, (guess, token) in enumerate(zip(guessed, own, strict=False)):
        if guess != token:
            return i
    return len(guessed)


def verify(
    target_probs: torch.Tensor,
    tokens: Sequence[int],
    draft_probs: torch.Tensor | None,
    chances: Sequence[float],
    uniforms: Sequence[float],
) -> Verdict:
    """Modified rejection sampling (arXiv 2211.17192, algorithm 1).

    `target_probs` [k + 1, V] are p, `draft_probs` [k, V] are q, from which the k tokens were drawn, each after the
    ones before it. Token x is accepted with probability min(1, p(x) / q(x)); `chances` [k] decide. At the first
    rejection the next token is drawn from norm(max(p − q, 0)), after k acceptances from the last row of p;
    `uniforms` [k + 1] decide. Without `draft_probs`, q is a point mass on each token: a draw from p that is
    accepted where it equals the token has the same distribution, and needs no second number.
    """
    if draft_probs is None:
        own = [pick(p_V, u) for p_V, u in zip(target_probs, uniforms, strict=True)]
        accepted = _agreement(tokens, own)
        return Verdict(accepted, own[accepted])
    index_k1 = torch.tensor(tokens, dtype=torch.long, device=target_probs.device)[:, None]
    target_k = target_probs[:-1].gather(1, index_k1)[:, 0].tolist()
    draft_k = draft_probs.gather(1, index_k1)[:, 0].tolist()
    for i, chance in enumerate(chances):
        if not chance * draft_k[i] < target_k[i]:
            return Verdict(i, pick(residual(target_probs[i], draft_probs[i]), uniforms[i]))
    return Verdict(len(tokens), pick(target_probs[-1], uniforms[-1]))


def residual(target_V: torch.Tensor, draft_V: torch.Tensor) -> torch.Tensor:
    """What a rejected token is replaced from: max(p − q, 0) in float64, not scaled; p where nothing is left.

    Nothing is left only where p = q, and then a rejection is itself a rounding error.
    """
    rest_V = (target_V.double() - draft_V.double()).clamp_(min=0)
    return rest_V if bool(rest_V.any()) else target_V.double()


@dataclass
class DraftLength:
    """How many tokens to draft for one request, from how many of its drafts were accepted.

    With acceptance rate a, k drafts are expected to yield 1 + a + … + a^k tokens (arXiv 2211.17192, eq. 1) for the
    time of 1 + c k plain steps; k is what maximises the quotient. The rate is a moving average over draft tokens that
    were tried: those accepted, and the first rejected. Where no k pays, one token is tried every 32 steps, so that a
    text that becomes predictable is noticed. It depends on the request alone.
    """

    maximum: int
    cost: float = 0.1  # c: drafting and verifying one more token, in steps without drafts
    rate: float = 0.7  # a; the start is hopeful: a few rejections correct it
    weight: float = 0.1  # of the newest token in the average
    probe_after: int = 32
    idle: int = 0  # steps without a draft

    def length(self) -> int:
        """Tokens to ask for now."""
        best, best_value, tokens = 0, 1.0, 1.0
        for k in range(1, self.maximum + 1):
            tokens += self.rate**k
            value = tokens / (1 + self.cost * k)
            if value > best_value:
                best, best_value = k, value
        return 1 if best == 0 and self.maximum > 0 and self.idle >= self.probe_after else best

    def observe(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` were taken."""
        self.idle = 0 if drafted else self.idle + 1
        for taken in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.rate += self.weight * (taken - self.rate)
