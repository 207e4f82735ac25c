"""Which tokens are computed next.

There are no phases: in every step the computed tokens of each request catch up with its known tokens, under one budget
of tokens. Prompts in chunks, decoding, and recomputation after preemption are the same rule.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from compress.errors import UserError
from compress.runtime.pages import PagePool
from compress.runtime.request import FinishReason, Request


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + count` of a request."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def catches_up(self) -> bool:
        """Whether the last known token is in it, so that the next one can be chosen."""
        return self.end == len(self.request.token_ids)


StepPlan = list[Chunk]


class Scheduler:
    """Running requests first, in order of arrival; then waiting ones while budget and pages last."""

    def __init__(self, pool: PagePool, max_batched_tokens: int) -> None:
        self.pool = pool
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it could not end even with every page to itself."""
        cached = request.max_length - 1  # the last token is never fed back
        need = self.pool.pages_for(cached)
        if need > self.pool.total:
            new = request.max_length - request.prompt_length
            raise UserError(
                f"prompt of {request.prompt_length} tokens with up to {new} new ones needs {need} cache pages of "
                f"{self.pool.page_size} tokens; the cache has {self.pool.total} "
                f"({self.pool.total * self.pool.page_size} tokens)"
            )
        self.waiting.append(request)

    def plan(self) -> StepPlan:
        """The chunks of the next step, their pages allocated; empty when nothing is left to do."""
        plan: StepPlan = []
        budget = self.max_batched_tokens
        preemptions = self.preemptions
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            count = min(len(request.token_ids) - request.num_computed, budget)
            if not self._make_room(request, request.num_computed + count):
                break  # it was the last, and has preempted itself
            plan.append(Chunk(request, request.num_computed, count))
            budget -= count
            position += 1
        # a step that ran out of pages admits nobody, or the newcomer would be the next to go
        while self.waiting and budget > 0 and self.preemptions == preemptions:
            request = self.waiting[0]
            # pages for all known tokens at once: a prompt that was let in is not preempted half-way for lack of them
            pages = self.pool.allocate(self.pool.pages_for(len(request.token_ids)))
            if pages is None:
                break
            self.waiting.popleft()
            request.pages, request.status = pages, "running"
            self.running.append(request)
            count = min(len(request.token_ids), budget)
            plan.append(Chunk(request, 0, count))
            budget -= count
        return plan

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Pages for the first `tokens` of a running request, at the cost of those behind it, the last first."""
        missing = self.pool.pages_for(tokens) - len(request.pages)
        while missing > 0:
            pages = self.pool.allocate(missing)
            if pages is not None:
                request.pages += pages
                return True
            victim = self.running.pop()
            self.pool.release(victim.pages)
            victim.pages, victim.num_computed, victim.status = [], 0, "waiting"
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is request:
                return False
        return True

    def commit(self, plan: StepPlan) -> None:
        """Count the step's tokens as computed."""
        for chunk in plan:
            chunk.request.num_computed = chunk.end

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a waiting or running request out, and its pages back."""
        if request.status == "waiting":
            self.waiting.remove(request)
        elif request.status == "running":
            self.running.remove(request)
        self.pool.release(request.pages)
        request.pages, request.status, request.finish_reason = [], "finished", reason

    def check(self) -> None:
        """Raise AssertionError unless every page is accounted for."""
        self.pool.check(request.pages for request in [*self.running, *self.waiting])
