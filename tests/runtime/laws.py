"""Distributions that are known, requests, and drafts drawn from a law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from compress.kernels.operations import Operations
from compress.runtime.request import Drafts, Request, SamplingParams, request_key
from compress.runtime.sampler import Draw, adjust, distributions

Law = Callable[[tuple[int, ...]], torch.Tensor]  # the tokens before → probabilities [V] of the next


def random_law(vocab: int, seed: int, zeros: float = 0.0, allowed: Sequence[int] | None = None) -> Law:
    """float64 probabilities that depend on every token before; a share of them zero, or all outside `allowed`.

    They are multiples of 2^-20 that sum to 1, so that float32 holds them exactly.
    """

    @cache
    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)  # hashes of integers are fixed
        probs_V = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 3
        probs_V[torch.rand(vocab, generator=generator) < zeros] = 0
        if allowed is not None:
            probs_V[[i for i in range(vocab) if i not in allowed]] = 0
        if probs_V.sum() == 0:
            probs_V[allowed[0] if allowed else 0] = 1
        units_V = (probs_V / probs_V.sum() * 2**20).floor()
        units_V[units_V.argmax()] += 2**20 - units_V.sum()
        return units_V / 2**20

    return law


def make_request(params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), sample_number: int = 0) -> Request:
    key = request_key(list(prompt), sample_number)
    return Request(list(prompt), len(prompt), params, key, frozenset(), len(prompt) + params.max_tokens)


def law_logits(law: Law, request: Request, drafted: Sequence[int]) -> torch.Tensor:
    """Logits [1 + k, V] of a law after the request's output and each draft token."""
    output = tuple(request.generated)
    return torch.stack([law((*output, *drafted[:i])).log().float() for i in range(len(drafted) + 1)])


def drafted_by(ops: Operations, law: Law, requests: Sequence[Request], k: int) -> list[Drafts]:
    """As a draft model would: from its law under the request's rules, by stream 1."""
    drafts = []
    for request in requests:
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(k):
            draw = Draw.of(request, tuple(tokens))
            logits_V = law_logits(law, request, tokens)[-1]
            rows.append(distributions(ops, adjust(logits_V[None], [draw]), [draw])[0])
            tokens.append(int(ops.pick_tokens(rows[-1][None], [draw.uniform(1)])))
        drafts.append(Drafts(tuple(tokens), torch.stack(rows) if rows else None))
    return drafts
