"""Speculation as the engine runs it: whom to draft for, how many tokens, and what was learned from their fate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from compress.errors import UserError
from compress.runtime.draft_cost import ASSUMED, DraftCost
from compress.runtime.executor import Executor, load_executor
from compress.runtime.pages import PagePool
from compress.runtime.plan import Chunk
from compress.runtime.request import Request
from compress.runtime.speculate import DraftLength, DraftModelProposer, NgramProposer, Proposer, check_tokenizers
from compress.runtime.tokenizer import has_tokenizer, load_tokenizer

DEFAULT_DRAFTS = 5


class Drafting:
    """A proposer, and the length of drafts that has paid for each request: at most `maximum` tokens.

    The clock has a say in it for greedy requests alone, whose tokens are the same for any drafts. Where tokens are
    drawn, a seed reproduces them for the same lengths of drafts, so there a draft token is assumed to cost a tenth of a
    step, whatever the machine.
    """

    def __init__(self, proposer: Proposer, maximum: int) -> None:
        self.proposer = proposer
        self.maximum = maximum
        self.cost = DraftCost()
        self._lengths: dict[Request, DraftLength] = {}

    def propose(self, running: Sequence[Request], max_batched_tokens: int) -> None:
        """Give drafts to the requests that have generated something and have none for what follows.

        How many depends on the request alone, so that its output does not depend on its company; where it is greedy,
        also on what draft tokens cost.
        """
        asked = [r for r in running if r.drafts is None and len(r.token_ids) > r.prompt_length]
        if not asked:
            return
        limits, measured = [], self.cost.of(len(running))
        for request in asked:
            cost = measured if request.params.temperature == 0 else ASSUMED
            length = self._lengths.setdefault(request, DraftLength(self.maximum)).length(cost)
            # the last token that a request may have is never a draft: it need not be fed back
            limits.append(max(0, min(length, request.max_length - len(request.token_ids) - 1, max_batched_tokens - 1)))
        started = time.perf_counter()
        proposed = self.proposer.propose(asked, limits)
        self.cost.observe_drafting(max(limits), time.perf_counter() - started)
        for request, drafts in zip(asked, proposed, strict=True):
            request.drafts = drafts

    def time_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step has taken so long, from its plan to its tokens on the host; steps with prompts tell nothing here."""
        if all(chunk.catches_up and chunk.count == 1 + len(chunk.drafts) for chunk in chunks):
            self.cost.observe(sum(chunk.count for chunk in chunks), seconds)

    def settle(self, request: Request, accepted: int, hidden_C: torch.Tensor) -> None:
        """The request has its new tokens; of its drafts the first `accepted` were right."""
        if request.drafts is not None:
            self._lengths[request].observe(len(request.drafts.tokens), accepted)
        request.drafts = None
        self.proposer.update(request, hidden_C)

    def forget(self, request: Request) -> None:
        self._lengths.pop(request, None)
        self.proposer.forget(request)


def load_drafting(
    path: Path,
    executor: Executor,
    tokens: int,
    max_batched_tokens: int,
    draft: str | Path | None,
    speculate: int | None,
) -> Drafting | None:
    """Drafts by a model (`draft`, a checkpoint directory), or from the text itself where only `speculate` is given.

    `tokens` is what the draft model's cache holds. Raises UserError for a bad number or a draft model that does not
    share the model's tokens.
    """
    if draft is None and speculate is None:
        return None
    maximum = DEFAULT_DRAFTS if speculate is None else speculate
    if maximum < 1:
        raise UserError(f"speculate must be at least 1 draft token, not {maximum}")
    if draft is None:
        return Drafting(NgramProposer(), maximum)
    draft = Path(draft)
    if has_tokenizer(path) and has_tokenizer(draft):
        check_tokenizers(load_tokenizer(path), load_tokenizer(draft))
    model = executor.model
    small = load_executor(draft, executor.device, model.dtype, tokens, executor.page_size)
    pool = PagePool(small.cache.written[0].shape[0], executor.page_size, caching=False)
    return Drafting(DraftModelProposer(small, pool, model.spec.vocab, max_batched_tokens), maximum)
