"""How many tokens to draft."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from compress.runtime.draft_cost import ASSUMED, LIMITS, NEEDED, DraftCost
from compress.runtime.drafting import Drafting
from compress.runtime.plan import Chunk
from compress.runtime.request import Drafts, Request, SamplingParams
from compress.runtime.speculate import DraftLength
from tests.runtime.laws import make_request


def test_the_length_of_drafts_follows_acceptance() -> None:
    """k maximises (1 + a + … + a^k) / (1 + c k); nothing is drafted where that does not pay, but for a try."""
    for rate, cost in itertools.product((0.0, 0.2, 0.5, 0.8, 0.95, 1.0), (0.0, 0.05, 0.2, 1.0)):
        values = [sum(rate**i for i in range(k + 1)) / (1 + cost * k) for k in range(9)]
        best = max(range(9), key=lambda k: (values[k], -k))
        chosen = DraftLength(8, rate).length(cost)
        assert values[chosen] == pytest.approx(values[best])
    length = DraftLength(8)
    for _ in range(20):
        length.observe(4, 4)
    assert length.length(0.1) >= 7
    for _ in range(60):
        length.observe(length.length(0.1), 0)
    assert length.rate < 0.11
    asked = []
    for _ in range(100):
        asked.append(length.length(0.1))
        length.observe(asked[-1], 0)
    assert set(asked) == {0, 1}
    assert 2 <= sum(asked) <= 4
    for _ in range(60):
        length.observe(1, 1)
    assert length.length(0.1) >= 7
    assert DraftLength(0).length(0.1) == 0


def test_the_rate_is_of_tokens_that_were_tried() -> None:
    """Behind a rejection nothing is tried: 1 of 4 is one success and one failure."""
    length = DraftLength(8, rate=0.5, weight=0.5)
    length.observe(4, 1)
    assert length.rate == (0.5 + 0.5 * 0.5) / 2


@pytest.mark.parametrize(("a", "b", "d"), [(30.0, 1.0, 0.0), (30.0, 1.0, 4.0), (1.0, 2.0, 0.0), (5.0, 0.0, 0.0)])
def test_the_cost_of_a_draft_token_is_measured(a: float, b: float, d: float) -> None:
    """From steps of many sizes, without noise and with half of the steps slowed down by as much as three times."""
    chance = random.Random(2)
    for slowed in (False, True):
        cost = DraftCost()
        for step in range(400):
            assert step >= NEEDED or cost.of(4) == ASSUMED
            tokens = chance.randint(2, 24)
            slow = 3.0 if slowed and step > 100 and step % 25 == 0 else 1.0
            cost.observe(tokens, slow * (a + b * tokens))
            cost.observe_drafting(3, 3 * d)
        for requests in (1, 4, 16):
            low, high = LIMITS
            true = min(max((b * requests + d) / (a + b * requests), low), high)
            assert cost.of(requests) == pytest.approx(true, rel=0.3 if slowed else 1e-6, abs=0.02 if slowed else 0)


def test_a_cost_that_changes_is_noticed() -> None:
    """Contexts grow, other work comes: 200 steps later the cost is the new one."""
    chance, cost = random.Random(3), DraftCost()
    for a, b in ((30.0, 0.5), (5.0, 5.0)):
        for _ in range(200):
            tokens = chance.randint(2, 24)
            cost.observe(tokens, a + b * tokens)
        assert cost.of(4) == pytest.approx(4 * b / (a + 4 * b), rel=0.02)


def test_steps_of_one_size_tell_nothing() -> None:
    """A slope through one point is noise: what was known stays, or what is assumed."""
    cost = DraftCost()
    for i in range(100):
        cost.observe(4, 1.0 + i % 7)
    assert cost.of(1) == ASSUMED
    for i in range(100):
        cost.observe(1 + i % 8, 10.0 + 2 * (1 + i % 8))
    known = cost.of(1)
    for i in range(500):
        cost.observe(4, 15.0 + i % 7)
    assert cost.of(1) == pytest.approx(known, rel=0.5)
    assert cost.slope is not None


@dataclass
class Asked:
    """A proposer that only notes for how many tokens it was asked."""

    limits: list[int] = field(default_factory=list)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Drafts]:
        self.limits = list(limits)
        return [Drafts(()) for _ in requests]

    def update(self, request: Request, hidden_C: torch.Tensor | None = None) -> None: ...

    def forget(self, request: Request) -> None: ...


def test_the_clock_decides_for_greedy_requests_alone() -> None:
    """Where tokens are drawn, their drafts, and so the outcome of a seed, may not depend on how long a step takes."""
    kinds = [SamplingParams(max_tokens=99), SamplingParams(max_tokens=99, temperature=0.5, seed=4)]
    asked = Asked()
    lengths = []
    for b in (1.0, 1e-3):  # another token costs as much as a step, or nothing
        drafting = Drafting(asked, 8)
        for tokens in (1, 2, 3, 4) * 8:
            request = make_request(SamplingParams(max_tokens=99))
            chunk = Chunk(request, len(request.token_ids) - 1, tokens, (5,) * (tokens - 1))
            drafting.time_step([chunk], 1e-3 + b * tokens)
            prompt = Chunk(request, 0, 2)
            drafting.time_step([prompt, chunk], 1e6)  # not a step of decoding: not counted
        requests = [make_request(params) for params in kinds]
        for request in requests:
            request.token_ids.append(7)
        drafting.propose(requests, 2048)
        lengths.append(asked.limits)
    assert lengths[0][0] < lengths[1][0]
    assert lengths[0][1] == lengths[1][1]
