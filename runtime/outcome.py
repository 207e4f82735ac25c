"""What a step's hidden states mean for its requests: log-probabilities of prompts, next tokens, verified drafts.

Shapes: T tokens, N rows (one for each token that may come next), V vocabulary, C hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.kernels.operations import Operations
from compress.kernels.sampling import select_rows
from compress.runtime.batch import Batch
from compress.runtime.executor import Executor
from compress.runtime.plan import Chunk
from compress.runtime.request import Drafts, Request, TokenLogprobs
from compress.runtime.sampler import logprobs
from compress.runtime.speculate import decide

NO_DRAFTS = Drafts(())


@dataclass(frozen=True)
class Outcome:
    """The tokens that a request gains: accepted drafts, then one of the model's own."""

    chunk: Chunk
    tokens: list[int]
    logprobs: list[TokenLogprobs]  # of each; empty where they are not asked for
    hidden_C: torch.Tensor  # before the final norm, of the token that the last of them follows


def score_prompts(executor: Executor, batch: Batch, hidden_TC: torch.Tensor) -> None:
    """Append what the step tells of the prompts' log-probabilities to the requests that ask for them."""
    rows: list[int] = []
    wanted: list[tuple[Request, int]] = []
    for chunk, first in zip(batch.chunks, batch.query_starts, strict=False):
        request = chunk.request
        if request.scored:
            continue
        request.prompt_logprobs = request.prompt_logprobs or [None]
        for position in range(len(request.prompt_logprobs), min(chunk.end + 1, request.prompt_length)):
            rows.append(first + position - 1 - chunk.start)
            wanted.append((request, request.token_ids[position]))
    done = 0
    for logits_NV in executor.logits_in_parts(hidden_TC, rows):
        part = wanted[done : done + len(logits_NV)]
        counts = [request.params.prompt_logprobs or 0 for request, _ in part]
        scores = logprobs(executor.model.operations, logits_NV, [token for _, token in part], counts)
        for (request, _), score in zip(part, scores, strict=True):
            request.prompt_logprobs.append(score)
        done += len(part)


def choose_tokens(executor: Executor, batch: Batch, hidden_TC: torch.Tensor) -> list[Outcome]:
    """The next tokens of every request that has caught up and wants some."""
    sampled = [(chunk, row) for chunk, row in batch.sampled if chunk.request.params.max_tokens > 0]
    if not sampled:
        return []
    logits_NV = executor.logits(hidden_TC, [row + i for chunk, row in sampled for i in range(len(chunk.drafts) + 1)])
    # a chunk has all drafts of its request, or it has not caught up
    drafts = [chunk.request.drafts or NO_DRAFTS for chunk, _ in sampled]
    operations = executor.model.operations
    verdicts = decide(operations, logits_NV, [chunk.request for chunk, _ in sampled], drafts)
    chosen = [verdict.tokens(own) for verdict, own in zip(verdicts, drafts, strict=True)]
    scores = _scores(operations, logits_NV, sampled, chosen)
    return [
        Outcome(chunk, tokens, score, hidden_TC[row + len(tokens) - 1])
        for (chunk, row), tokens, score in zip(sampled, chosen, scores, strict=True)
    ]


def _scores(
    operations: Operations, logits_NV: torch.Tensor, sampled: list[tuple[Chunk, int]], chosen: list[list[int]]
) -> list[list[TokenLogprobs]]:
    """Log-probabilities of the chosen tokens under the model's own distribution."""
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    first = 0
    for (chunk, _), own in zip(sampled, chosen, strict=True):
        count = chunk.request.params.logprobs
        if count is not None:
            rows += range(first, first + len(own))
            tokens += own
            counts += [count] * len(own)
        first += len(chunk.drafts) + 1
    if not rows:
        return [[] for _ in chosen]
    found = iter(logprobs(operations, select_rows(logits_NV, rows), tokens, counts))
    return [
        [next(found) for _ in own] if chunk.request.params.logprobs is not None else []
        for (chunk, _), own in zip(sampled, chosen, strict=True)
    ]
