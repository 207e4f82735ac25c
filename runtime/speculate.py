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

from compress.kernels.operations import Operations
from compress.kernels.sampling import select_rows
from compress.runtime.draft_model import DraftModelProposer, check_tokenizers
from compress.runtime.ngram import NgramProposer
from compress.runtime.request import Drafts, Request
from compress.runtime.sampler import Draw, adjust, choose, distributions

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


def decide(
    operations: Operations, logits_RV: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Drafts]
) -> list[Verdict]:
    """The next tokens of each request, from the model's float32 logits; requests without drafts are sampled.

    A request has a row for its last known token and one for each of its draft tokens, in this order. Tokens that
    were not drawn, or are drawn greedily, are accepted where they equal the token that would have been chosen
    without them: the same tokens as without speculation, by seed too. (A point mass is a distribution as well: this
    is what rejection sampling comes to, with one random number.) Tokens drawn from a distribution are verified by
    `Operations.verify_drafts`, which accepts more of them; there, seeds reproduce for the same lengths of drafts.
    All rows are computed together, and what comes of them is one copy to the host.
    """
    draws = [Draw.of(r, d.tokens[:i]) for r, d in zip(requests, drafts, strict=True) for i in range(len(d.tokens) + 1)]
    adjusted_RV = adjust(logits_RV, draws)
    starts = accumulate((len(one.tokens) + 1 for one in drafts), initial=0)
    rows_N = [range(start, end) for start, end in pairwise(starts)]
    drawn = [n for n, (r, d) in enumerate(zip(requests, drafts, strict=True)) if _is_drawn(r, d)]
    given = sorted(set(range(len(requests))) - set(drawn))
    rows = [row for n in given for row in rows_N[n]]
    parts = [choose(operations, select_rows(adjusted_RV, rows), [draws[row] for row in rows])]
    if drawn:
        parts += _verified(operations, adjusted_RV, draws, [rows_N[n] for n in drawn], [drafts[n] for n in drawn])
    chosen, *verified = [part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])]
    verdicts = dict(zip(drawn, map(Verdict, *verified), strict=True)) if drawn else {}
    own_tokens = iter(chosen)
    for n in given:
        own = [next(own_tokens) for _ in rows_N[n]]
        accepted = agreement(drafts[n].tokens, own)
        verdicts[n] = Verdict(accepted, own[accepted])
    return [verdicts[n] for n in range(len(requests))]


def _is_drawn(request: Request, drafts: Drafts) -> bool:
    return request.params.temperature > 0 and drafts.distributions is not None and len(drafts.tokens) > 0


def _verified(
    operations: Operations,
    adjusted_RV: torch.Tensor,
    draws: Sequence[Draw],
    rows_N: Sequence[range],
    drafts: Sequence[Drafts],
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of each request's drafts stand [N], and the token after them [N]."""
    rows = [row for own in rows_N for row in own]
    some = [draws[row] for row in rows]
    return operations.verify_drafts(
        distributions(operations, select_rows(adjusted_RV, rows), some),
        [one.distributions for one in drafts],
        [token for one in drafts for token in one.tokens],
        [draws[row].uniform(2) for own in rows_N for row in own[:-1]],
        [draw.uniform() for draw in some],
    )


def agreement(guessed: Sequence[int], own: Sequence[int]) -> int:
    """How many guesses hold before the first that does not."""
    for i, (guess, token) in enumerate(zip(guessed, own, strict=False)):
        if guess != token:
            return i
    return len(guessed)


@dataclass
class DraftLength:
    """How many tokens to draft for one request, from how many of its drafts were accepted.

    With acceptance rate a, k drafts are expected to yield 1 + a + … + a^k tokens (arXiv 2211.17192, eq. 1) for the
    time of 1 + c k plain steps; k is what maximises the quotient. The rate is a moving average over draft tokens that
    were tried: those accepted, and the first rejected. Where no k pays, one token is tried every 32 steps, so that a
    text that becomes predictable is noticed. It depends on the request alone, and on the cost.
    """

    maximum: int
    rate: float = 0.7  # a; the start is hopeful: a few rejections correct it
    weight: float = 0.1  # of the newest token in the average
    probe_after: int = 32
    idle: int = 0  # steps without a draft

    def length(self, cost: float) -> int:
        """Tokens to ask for now; `cost` is c: drafting and verifying one more token, in steps without drafts."""
        best, best_value, tokens = 0, 1.0, 1.0
        for k in range(1, self.maximum + 1):
            tokens += self.rate**k
            value = tokens / (1 + cost * k)
            if value > best_value:
                best, best_value = k, value
        return 1 if best == 0 and self.maximum > 0 and self.idle >= self.probe_after else best

    def observe(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` were taken."""
        self.idle = 0 if drafted else self.idle + 1
        for taken in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.rate += self.weight * (taken - self.rate)
