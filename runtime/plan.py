"""What a step computes: chunks of requests, and the pages that are copied before."""

from __future__ import annotations

from dataclasses import dataclass, field

from compress.runtime.request import Request


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + count` of a request; the last ones are its drafts."""

    request: Request
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def catches_up(self) -> bool:
        """Whether the last known token is in it, so that the next one can be chosen."""
        return self.end - len(self.drafts) == len(self.request.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """What a step computes, after it has copied pages (source, destination). No destination is a source."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


def next_chunk(request: Request, budget: int) -> Chunk | None:
    """What a request computes next: as much as the budget allows, but the last token and its drafts in one step.

    So the number of drafts does not depend on the company. None where nothing of it fits.
    """
    start, drafts = request.num_computed, request.draft_tokens
    left = len(request.token_ids) - start
    if left + len(drafts) <= budget:
        return Chunk(request, start, left + len(drafts), drafts)
    count = min(left - 1 if drafts else left, budget)
    return Chunk(request, start, count) if count else None
