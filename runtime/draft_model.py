"""A small model that drafts for a large one.

Shapes: N requests, T tokens, C hidden, V the large model's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compress.errors import UserError
from compress.kernels.operations import Operations
from compress.runtime.batch import build_batch
from compress.runtime.executor import Executor
from compress.runtime.pages import PagePool
from compress.runtime.plan import Chunk, StepPlan
from compress.runtime.request import Drafts, Request
from compress.runtime.sampler import Draw, adjust, choose, distributions


@dataclass(eq=False)
class _Shadow:
    """A request as the draft model knows it: the tokens that are certain, then its own drafts."""

    request: Request
    certain: int = 0


class DraftModelProposer:
    """Drafts by a model with its own cache, drawn under the rules of each request.

    `vocab` is the large model's. Where the draft model has fewer tokens it never drafts the others, and reads token 0
    in their place; where it has more, those are impossible. A request for which the pool has no pages, or whose length
    the draft model does not take, gets no drafts.
    """

    def __init__(self, executor: Executor, pool: PagePool, vocab: int, max_batched_tokens: int = 2048) -> None:
        self.executor = executor
        self.pool = pool
        self.vocab = vocab
        self.max_batched_tokens = max_batched_tokens
        self._shadows: dict[Request, _Shadow] = {}  # the least recently used first

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Drafts]:
        rooms = [self._admit(r, limit, requests) for r, limit in zip(requests, limits, strict=True)]
        tokens: list[list[int]] = [[] for _ in requests]
        probs: list[list[torch.Tensor]] = [[] for _ in requests]
        while active := [i for i, room in enumerate(rooms) if len(tokens[i]) < room]:
            shadows = [self._shadows[requests[i]].request for i in active]
            draws = [Draw.of(requests[i], tuple(tokens[i])) for i in active]
            logits_NV = adjust(self._fit(self._next_logits(shadows)), draws)
            drawn, probs_NV = _draw(self.executor.model.operations, logits_NV, draws)
            for row, (i, shadow, token) in enumerate(zip(active, shadows, drawn, strict=True)):
                tokens[i].append(token)
                shadow.token_ids.append(token)
                if probs_NV is not None and requests[i].params.temperature > 0:
                    probs[i].append(probs_NV[row])
        return [Drafts(tuple(t), torch.stack(p) if p else None) for t, p in zip(tokens, probs, strict=True)]

    def update(self, request: Request, hidden_C: torch.Tensor | None = None) -> None:
        """Keep of the cache what the accepted tokens share with the drafts."""
        shadow = self._shadows.get(request)
        if shadow is None:
            return
        own, known = shadow.request.token_ids, request.token_ids
        limit = self.executor.model.spec.vocab
        same = shadow.certain
        while same < min(len(own), len(known)) and own[same] == known[same]:
            same += 1
        own[same:] = [token if token < limit else 0 for token in known[same:]]
        # the last token is always computed again: its logits are what is asked for
        shadow.request.num_computed = min(shadow.request.num_computed, same, len(known) - 1)
        shadow.certain = len(known)

    def forget(self, request: Request) -> None:
        shadow = self._shadows.pop(request, None)
        if shadow is not None:
            self.pool.release(shadow.request.pages)

    def check(self) -> None:
        """Raise AssertionError unless every page of the draft model's pool is accounted for."""
        self.pool.check(shadow.request.pages for shadow in self._shadows.values())

    def _admit(self, request: Request, limit: int, company: Sequence[Request]) -> int:
        """How many tokens can be drafted, at most `limit`, with pages for them; the shadow is then up to date."""
        # all but the last draft token are fed back
        limit = min(limit, self.executor.model.spec.max_positions - len(request.token_ids) + 1)
        if limit <= 0:
            return 0
        shadow = self._shadows.pop(request, None)
        if shadow is None:
            own = Request([], request.prompt_length, request.params, request.key, frozenset(), 0)
            shadow = _Shadow(own)
        self._shadows[request] = shadow
        self.update(request)
        missing = self.pool.pages_for(len(request.token_ids) + limit - 1) - len(shadow.request.pages)
        pages = self.pool.allocate(max(0, missing))
        while pages is None:
            victim = next((other for other in self._shadows if other not in company), None)
            if victim is None:
                return 0
            self.forget(victim)
            pages = self.pool.allocate(missing)
        shadow.request.pages += pages
        return limit

    def _next_logits(self, shadows: Sequence[Request]) -> torch.Tensor:
        """Compute all tokens that are not; float32 logits [N, draft vocabulary] after the last of each."""
        rows: dict[Request, torch.Tensor] = {}
        while waiting := [shadow for shadow in shadows if shadow not in rows]:
            chunks, budget = [], self.max_batched_tokens
            for shadow in waiting:
                count = min(len(shadow.token_ids) - shadow.num_computed, budget)
                if count:
                    chunks.append(Chunk(shadow, shadow.num_computed, count))
                budget -= count
            batch = build_batch(StepPlan(chunks), self.pool.page_size, self.executor.device)
            hidden_TC = self.executor.run(batch)
            ends = batch.sampled
            if ends:
                logits_NV = self.executor.logits(hidden_TC, [row for _, row in ends])
                rows |= {chunk.request: logits_V for (chunk, _), logits_V in zip(ends, logits_NV, strict=True)}
            for chunk in chunks:
                chunk.request.num_computed = chunk.end
        return torch.stack([rows[shadow] for shadow in shadows])

    def _fit(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Logits over the large model's vocabulary: −∞ for what the draft model lacks."""
        missing = self.vocab - logits_NV.shape[1]
        if missing <= 0:
            return logits_NV[:, : self.vocab].contiguous()
        return torch.nn.functional.pad(logits_NV, (0, missing), value=-math.inf)


def _draw(
    operations: Operations, logits_NV: torch.Tensor, draws: Sequence[Draw]
) -> tuple[list[int], torch.Tensor | None]:
    """A token for each row by stream 1, and the distributions; None where all rows are greedy."""
    if all(draw.params.temperature == 0 for draw in draws):
        return choose(operations, logits_NV, draws).tolist(), None
    probs_NV = distributions(operations, logits_NV, draws)
    return operations.pick_tokens(probs_NV, [draw.uniform(1) for draw in draws]).tolist(), probs_NV


def check_tokenizers(target: Any, draft: Any, field: str = "draft") -> None:
    """Raises UserError unless no id means one token to the model and another to its draft model, or its baseline.

    Ids that only one of them names are padding or added tokens to the other: they cost drafts, not correctness.
    Either tokenizer may be transformers' or a `tokenizers.Tokenizer`.
    """
    names = {token_id: token for token, token_id in target.get_vocab().items()}
    others = {token_id: token for token, token_id in draft.get_vocab().items()}
    differing = sorted(i for i in names.keys() & others.keys() if names[i] != others[i])
    if differing or not names.keys() & others.keys():
        first = f"; id {differing[0]} is {others[differing[0]]!r}, not {names[differing[0]]!r}" if differing else ""
        raise UserError(
            f"{field}: its tokenizer is not the model's: {len(differing)} of {len(names)} token ids differ{first}"
        )
