"""Prompt lookup: the tokens that followed the last time the request's end occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from compress.runtime.request import Drafts, Request


@dataclass
class _Index:
    """Where each n-gram of the first `indexed` tokens was last continued: the place of the token after it."""

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class NgramProposer:
    """The longest suffix, of `longest` tokens down to `shortest`, that occurred before in the request's own tokens.

    Drafts are not drawn, so they have no distributions. A step costs as many look-ups as there are lengths and new
    tokens; the index holds an entry for each length and token.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest = longest
        self.shortest = shortest
        self._indices: dict[Request, _Index] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Drafts]:
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose(self, request: Request, limit: int) -> Drafts:
        if limit <= 0:
            return Drafts(())
        self.update(request)
        known, follows = request.token_ids, self._indices[request].follows
        for length in range(min(self.longest, len(known) - 1), self.shortest - 1, -1):
            start = follows.get(tuple(known[-length:]))
            if start is not None:
                break
        else:
            return Drafts(())
        # a match that reaches the end goes round: the text repeats with that period
        period = len(known) - start
        return Drafts(tuple(known[start + i % period] for i in range(limit)))

    def update(self, request: Request, hidden_C: torch.Tensor | None = None) -> None:
        """Index n-grams up to the last token but one: the end must find what was before it, not itself."""
        index = self._indices.setdefault(request, _Index())
        known = request.token_ids
        for end in range(max(1, index.indexed), len(known)):
            for length in range(self.shortest, min(self.longest, end) + 1):
                index.follows[tuple(known[end - length : end])] = end
        index.indexed = len(known)

    def forget(self, request: Request) -> None:
        self._indices.pop(request, None)
