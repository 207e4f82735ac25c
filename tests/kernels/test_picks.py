"""Tokens picked from probabilities, and drafts verified, on every path of a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from compress.kernels import sampling
from tests.kernels.sampled_rows import PATHS, operations


def verify(
    path: str, p: list, q: list, tokens: Sequence[int], chances: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[int]]:
    accepted, token = operations(path).verify_drafts(
        torch.tensor(p), [torch.tensor(one) for one in q], tokens, chances, uniforms
    )
    return accepted.tolist(), token.tolist()


@pytest.mark.parametrize("path", PATHS)
def test_verification_by_hand(path: str) -> None:
    """Three requests: one rejected at once, one with a token of p = 0, one accepted whole."""
    p = [[0.25, 0.75], [0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.25, 0.75]]
    q = [[[0.5, 0.5]], [[0.5, 0.5]], [[0.125, 0.875]]]
    # 0.25 / 0.5 is the chance of the first; the residual of a rejection is all on token 1
    assert verify(path, p, q, [0, 1, 0], [0.5, 0.0, 0.99], [0.0, 0.9, 0.0, 0.9, 0.9, 0.2]) == ([0, 0, 1], [1, 0, 0])
    assert verify(path, p, q, [0, 0, 1], [0.499, 0.9, 0.6], [0.9, 0.9, 0.9, 0.9, 0.3, 0.9]) == ([1, 1, 0], [1, 1, 0])


@pytest.mark.parametrize("path", PATHS)
def test_requests_are_verified_as_alone(path: str) -> None:
    """Drafts of 1 to 5 tokens, wide vocabularies, numbers at random; both ends are reached."""
    generator = torch.Generator().manual_seed(1)
    lengths, vocab = [1, 5, 2, 3, 1, 4, 4, 2, 5], 700
    p = torch.rand(sum(lengths) + len(lengths), vocab, generator=generator) ** 6
    drafts = [torch.rand(k, vocab, generator=generator) ** 6 for k in lengths]
    p /= p.sum(1, keepdim=True)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    for n, draft in enumerate(drafts):
        draft /= draft.sum(1, keepdim=True)
        if n % 2:
            draft[:] = p[starts[n] + n : starts[n] + n + lengths[n]]
    tokens = [int(torch.multinomial(row, 1, generator=generator)) for draft in drafts for row in draft]
    chances = torch.rand(sum(lengths), generator=generator, dtype=torch.float64).tolist()
    uniforms = torch.rand(len(p), generator=generator, dtype=torch.float64).tolist()
    accepted, token = operations(path).verify_drafts(p, drafts, tokens, chances, uniforms)
    assert all(accepted[n] == lengths[n] for n in range(1, 9, 2)), "p = q: all stand"
    assert any(accepted[n] < lengths[n] for n in range(0, 9, 2))
    for n, k in enumerate(lengths):
        first = starts[n]
        alone = operations(path).verify_drafts(
            p[first + n : first + n + k + 1],
            [drafts[n]],
            tokens[first : first + k],
            chances[first : first + k],
            uniforms[first + n : first + n + k + 1],
        )
        assert (int(alone[0]), int(alone[1])) == (int(accepted[n]), int(token[n]))
    expected = sampling.verify_drafts(p.double(), [draft.double() for draft in drafts], tokens, chances, uniforms)
    assert torch.equal(accepted, expected[0])
    assert torch.equal(token, expected[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_a_pick_agrees_with_a_search_through_all_tokens(path: str, dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs_V = torch.rand(vocab, generator=generator, dtype=dtype) ** 4 + 1e-4
    probs_V[torch.rand(vocab, generator=generator) < 0.5] = 0
    probs_V[vocab // 2] = 0.5
    ends_V = probs_V.double().cumsum(0)
    tokens = probs_V.nonzero()[:, 0].tolist()
    points = [
        float(ends_V[token] - float(probs_V[token]) * part) / float(ends_V[-1])
        for token in tokens
        for part in (1 - 1e-9, 0.5, 1e-9)
    ]
    found = operations(path).pick_tokens(probs_V.expand(len(points), -1), points).tolist()
    assert found == [token for token in tokens for _ in range(3)]
    ends = operations(path).pick_tokens(probs_V.expand(2, -1), [0.0, 1 - 2**-48]).tolist()
    assert ends == [tokens[0], tokens[-1]]
