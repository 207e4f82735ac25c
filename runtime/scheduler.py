"""Which tokens are computed next.

There are no phases: in every step the computed tokens of each request catch up with its known tokens, under one budget
of tokens. Prompts in chunks, decoding, verification of drafts and recomputation after preemption are the same rule.

A request never computes what another one is about to leave in the cache: it is admitted after that. What it waits for
is computed by a running request, and running requests wait for nobody, so the wait ends.

First come, first served, but a request that does not fit yet lets later ones pass, a bounded number of times: a short
prompt need not wait for the room of a long one, and the long one is never starved.
"""

from __future__ import annotations

from collections import deque

from compress.errors import UserError
from compress.runtime.pages import PagePool, page_hash
from compress.runtime.plan import Chunk, StepPlan, next_chunk
from compress.runtime.request import FinishReason, Request

PASSES = 32  # later requests that are let in before one that does not fit: then nobody is until it does
TRIES = 4  # requests in one step that turn out not to fit: trying costs time, and so many tell of a full cache


class Scheduler:
    """Running requests first, in order of arrival; then waiting ones while budget and pages last."""

    def __init__(
        self, pool: PagePool, max_batched_tokens: int, max_running: int = 64, window: int | None = None
    ) -> None:
        self.pool = pool
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.window = window  # the widest of all layers; None where a layer sees everything
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.prompt_tokens = 0  # of admitted requests
        self.cached_tokens = 0  # of those, found in the cache
        self._promised: dict[bytes, Request] = {}  # full pages that running requests are going to compute

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it could not end even with every page to itself."""
        need = self.pool.pages_for(max(request.prompt_length, request.max_length - 1))  # the last is never fed back
        if self.window is not None:
            need = min(need, self.pool.pages_for(self.window + self.max_batched_tokens) + 1)
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
        plan = StepPlan()
        budget = self.max_batched_tokens
        preemptions = self.preemptions
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            chunk = next_chunk(request, budget)
            if chunk is not None:
                if not self._make_room(request, chunk.end, plan):
                    break  # it was the last, and has preempted itself
                plan.chunks.append(chunk)
                budget -= chunk.count
            position += 1
        # a step that ran out of pages admits nobody, or the newcomer would be the next to go
        if self.preemptions == preemptions:
            self._admit(plan, budget)
        # given back only now: in between, a source could have become the destination of another copy
        self.pool.release([source for source, _ in plan.copies])
        return plan

    def _make_room(self, request: Request, end: int, plan: StepPlan) -> bool:
        """Pages for the tokens up to `end` of a running request, at the cost of those behind it, the last first."""
        self._drop(request)
        while not self._grow(request, end, plan):
            victim = self.running.pop()
            self._take_back(victim)
            victim.status = "waiting"
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, end: int, plan: StepPlan) -> bool:
        """Give a request what it writes up to `end`: new pages, and a copy of a page that is not its own alone."""
        first, held = request.num_computed // self.pool.page_size, len(request.pages)
        shared = first < held and not self.pool.writable(request.pages[first])
        pages = self.pool.allocate(max(0, self.pool.pages_for(end) - held) + shared)
        if pages is None:
            return False
        if shared:
            copy = pages.pop(0)
            plan.copies.append((request.pages[first], copy))
            request.pages[first] = copy
        request.pages += pages
        return True

    def _drop(self, request: Request) -> None:
        """Give back the pages that no layer sees from the next token on."""
        seen = self._first_seen(request.num_computed)
        if seen > request.dropped:
            self.pool.release(request.pages[request.dropped : seen])
            request.pages[request.dropped : seen] = [0] * (seen - request.dropped)
            request.dropped = seen

    def _first_seen(self, position: int) -> int:
        """The first page that the token at a position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.pool.page_size

    def _admit(self, plan: StepPlan, budget: int) -> None:
        later: list[Request] = []
        too_large: dict[Request, None] = {}  # do not fit yet, with their siblings, in order
        tries = TRIES
        while self.waiting and budget > 0 and tries > 0 and len(self.running) < self.max_running:
            if any(other.passed >= PASSES for other in too_large):
                break
            request = self.waiting[0]
            if request in too_large or self._awaited(request):
                later.append(self.waiting.popleft())
                continue
            chunk = self._start(request, budget, plan)
            if chunk is None:
                # what ran before and was preempted goes first: letting others in would only take its pages again
                if request.cached_tokens is not None or request.passed >= PASSES:
                    break
                tries -= 1
                too_large |= dict.fromkeys((request, *request.siblings))
                continue
            self.running.append(self.waiting.popleft())
            plan.chunks.append(chunk)
            budget -= chunk.count
            for other in too_large:
                other.passed += 1
        self.waiting.extendleft(reversed(later))

    def _awaited(self, request: Request) -> bool:
        """Whether a running request is about to compute what this one would compute first."""
        donor = self._donor(request)
        if donor is not None:
            return not donor.scored or donor.num_computed < request.prompt_length - 1
        names = self._searched(request)
        found = len(self.pool.find(names))
        return found < len(names) and names[found] in self._promised

    def _donor(self, request: Request) -> Request | None:
        """A running sample of the same prompt whose pages this one can share."""
        seen = self._first_seen(request.prompt_length - 1)
        running = [other for other in request.siblings if other.status == "running" and other.dropped <= seen]
        return max(running, key=lambda other: other.num_computed, default=None)

    def _searched(self, request: Request) -> list[bytes]:
        """Hashes of the pages that a request may take: not that of its last token, whose logits are wanted."""
        if not self.pool.caching or not request.scored:
            return []
        count = (len(request.token_ids) - 1) // self.pool.page_size
        return self._names(request, count)[:count]

    def _names(self, request: Request, count: int) -> list[bytes]:
        """The hashes of at least its first `count` full pages."""
        names, size = request.hashes, self.pool.page_size
        for page in range(len(names), count):
            tokens = request.token_ids[page * size : (page + 1) * size]
            names.append(page_hash(names[-1] if names else None, tokens, request.params.cache_salt))
        return names

    def _start(self, request: Request, budget: int, plan: StepPlan) -> Chunk | None:
        """Let a request in: with the pages it shares and new ones. None, and no change, where budget or pages lack."""
        donor, pages, dropped = self._donor(request), self.pool.find(self._searched(request)), 0
        computed = len(pages) * self.pool.page_size
        if donor is not None and computed < request.prompt_length - 1:
            computed, dropped = request.prompt_length - 1, donor.dropped
            pages = donor.pages[: self.pool.pages_for(computed)]
        self.pool.share(pages[dropped:])
        request.pages, request.dropped, request.num_computed = pages, dropped, computed
        self._drop(request)
        chunk = next_chunk(request, budget)
        # pages for all known tokens at once: a prompt that was let in is not preempted half-way for lack of them;
        # behind a window they become free on the way
        known = len(request.token_ids) if self.window is None else 0
        if chunk is None or not self._grow(request, max(known, chunk.end), plan):
            self._take_back(request)
            return None
        request.status = "running"
        if donor is not None and not request.scored:
            request.prompt_logprobs = donor.prompt_logprobs[: request.prompt_length]
        if self.pool.caching:
            size = self.pool.page_size
            for name in self._names(request, len(request.token_ids) // size)[computed // size :]:
                self._promised.setdefault(name, request)
        if request.cached_tokens is None:
            request.cached_tokens = min(computed, request.prompt_length)
            self.cached_tokens += request.cached_tokens
            self.prompt_tokens += request.prompt_length
        return chunk

    def commit(self, request: Request, computed: int) -> None:
        """Count the first `computed` tokens of a running request as computed; full pages can be found from now on."""
        size = self.pool.page_size
        first, request.num_computed = request.num_computed // size, computed
        if not self.pool.caching:
            return
        for page in range(first, computed // size):
            name = self._names(request, page + 1)[page]
            self.pool.register(request.pages[page], name)
            self._forget(name, request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a waiting or running request out, and its pages back."""
        if request.status == "waiting":
            self.waiting.remove(request)
        elif request.status == "running":
            self.running.remove(request)
        self._take_back(request)
        request.status, request.finish_reason, request.siblings = "finished", reason, ()

    def _take_back(self, request: Request) -> None:
        for name in request.hashes[request.num_computed // self.pool.page_size :]:
            self._forget(name, request)
        self.pool.release(request.pages[request.dropped :])
        request.pages, request.dropped, request.num_computed = [], 0, 0

    def _forget(self, name: bytes, request: Request) -> None:
        if self._promised.get(name) is request:
            del self._promised[name]

    def check(self) -> None:
        """Raise AssertionError unless every page is accounted for."""
        self.pool.check(request.pages[request.dropped :] for request in [*self.running, *self.waiting])
        if any(request.status != "running" for request in self._promised.values()):
            raise AssertionError("a page is promised by a request that does not run")
