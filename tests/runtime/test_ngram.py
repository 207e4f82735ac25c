"""Prompt lookup against a search through the text."""

from __future__ import annotations

import random

from compress.runtime.ngram import NgramProposer
from compress.runtime.request import SamplingParams
from tests.runtime.laws import make_request


def looked_up(known: list[int], longest: int, limit: int) -> tuple[int, ...]:
    """Prompt lookup by search: the longest suffix that occurs earlier, where it occurs last."""
    for length in range(min(longest, len(known) - 1), 0, -1):
        for start in range(len(known) - length - 1, -1, -1):
            if known[start : start + length] == known[-length:]:
                text = list(known)
                for i in range(limit):
                    text.append(text[start + length + i])
                return tuple(text[len(known) :])
    return ()


def test_prompt_lookup_equals_a_search() -> None:
    """As the request grows, by one or several tokens a step."""
    chance = random.Random(1)
    for alphabet in (2, 4, 30):
        proposer = NgramProposer(longest=3)
        request = make_request(SamplingParams(max_tokens=200), [chance.randrange(alphabet) for _ in range(5)])
        for step in range(60):
            limit = step % 6
            drafts = proposer.propose([request], [limit])[0]
            assert drafts.distributions is None
            assert drafts.tokens == (looked_up(request.token_ids, 3, limit) if limit else ())
            for _ in range(chance.randint(1, 3)):
                request.append(chance.randrange(alphabet))
            if step % 2:
                proposer.update(request)
        proposer.forget(request)
        proposer.forget(request)
        assert not proposer._indices


def test_prompt_lookup_by_hand() -> None:
    def guess(known: list[int], limit: int = 4) -> tuple[int, ...]:
        return NgramProposer().propose([make_request(SamplingParams(), known)], [limit])[0].tokens

    assert guess([1]) == ()
    assert guess([1, 2, 3]) == ()
    assert guess([7, 7]) == (7, 7, 7, 7)
    assert guess([1, 2, 3, 4, 1, 2]) == (3, 4, 1, 2)
    assert guess([5, 1, 2, 8, 2, 9, 1, 2]) == (8, 2, 9, 1)  # the longer match wins over the later one
