"""Speculation as the engine runs it: whom to draft for, how many tokens, and what was learned from their fate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from compress.errors import UserError
from compress.runtime.executor import Executor, load_executor
from compress.runtime.pages import PagePool
from compress.runtime.request import Request
from compress.runtime.speculate import DraftLength, DraftModelProposer, NgramProposer, Proposer, check_tokenizers
from compress.runtime.tokenizer import has_tokenizer, load_tokenizer

DEFAULT_DRAFTS = 5


class Drafting:
    """A proposer, and the length of drafts that has paid for each request: at most `maximum` tokens."""

    def __init__(self, proposer: Proposer, maximum: int) -> None:
        self.proposer = proposer
        self.maximum = maximum
        self._lengths: dict[Request, DraftLength] = {}

    def propose(self, running: Sequence[Request], max_batched_tokens: int) -> None:
        """Give drafts to the requests that have generated something and have none for what follows.

        How many depends on the request alone, so that its output does not depend on its company.
        """
        asked = [r for r in running if r.drafts is None and len(r.token_ids) > r.prompt_length]
        if not asked:
            return
        limits = []
        for request in asked:
            length = self._lengths.setdefault(request, DraftLength(self.maximum)).length()
            # the last token that a request may have is never a draft: it need not be fed back
            limits.append(max(0, min(length, request.max_length - len(request.token_ids) - 1, max_batched_tokens - 1)))
        for request, drafts in zip(asked, self.proposer.propose(asked, limits), strict=True):
            request.drafts = drafts

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
