"""One HTTP request as the server follows it: the prompts that it asks for, and the news of its choices.

A choice is one answer to one prompt; a request for P prompts with n answers each has P · n of them, numbered in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from compress.runtime.request import FinishReason, Request, SamplingParams, TokenLogprobs
from compress.runtime.server.errors import ApiError


@dataclass(frozen=True)
class Ask:
    """One prompt, and how many answers to it."""

    ids: list[int]
    params: SamplingParams
    n: int = 1


@dataclass(frozen=True)
class News:
    """What a choice has gained since the last news of it."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # of these tokens; empty where not asked for
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or stop token id
    prompt_logprobs: list[TokenLogprobs | None] | None  # with the first news of a choice, where asked for
    cached_tokens: int
    offsets: list[int]  # of these tokens in the choice's text, in characters; empty without a tokenizer


@dataclass(eq=False)
class Track:
    """A request of the engine, and how much of it has been told; belongs to the engine's thread."""

    job: Job
    request: Request
    index: int
    told: int = 0  # generated tokens in past news
    counted: int = 0  # generated tokens seen
    scheduled_at: float | None = None  # seconds of the monotonic clock
    first_at: float | None = None
    last_at: float | None = None
    gap: float | None = None  # seconds between the last two steps with tokens

    def advance(self, now: float) -> int:
        """Note the time of a step; how many tokens it brought."""
        total = len(self.request.token_ids) - self.request.prompt_length
        gained, self.counted = total - self.counted, total
        if gained > 0:
            self.gap = None if self.last_at is None else now - self.last_at
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
        return gained

    def news(self) -> News:
        request, first = self.request, self.told
        start = request.prompt_length + first
        token_ids = request.token_ids[start:]
        self.told = first + len(token_ids)
        scored = request.params.prompt_logprobs is not None and first == 0
        return News(
            index=self.index,
            text=request.text.take() if request.text is not None else "",
            token_ids=token_ids,
            logprobs=request.logprobs[first : self.told],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            prompt_logprobs=list(request.prompt_logprobs) if scored else None,
            cached_tokens=request.cached_tokens or 0,
            offsets=request.text.offsets[first : self.told] if request.text is not None else [],
        )


@dataclass(eq=False)
class Job:
    """Belongs to the event loop, but for `tracks`."""

    asks: Sequence[Ask]
    stream: bool  # news at every step, not only at the end of a choice
    arrived_at: float = field(default_factory=monotonic)
    tracks: list[Track] = field(default_factory=list)  # the engine's thread alone
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.count = sum(ask.n for ask in self.asks)
        self.left = self.count  # choices that have not ended
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending: list[News] = []
        self._error: ApiError | None = None
        self._ready = asyncio.Event()

    def accept(self) -> None:
        if not self.admitted.done():
            self.admitted.set_result(None)

    def put(self, news: list[News], ended: int) -> None:
        self.left -= ended
        self._pending += news
        self._ready.set()

    def end(self, error: ApiError | None) -> None:
        """Nothing more will come."""
        self.left = 0
        self._error = self._error or error
        self._ready.set()
        if not self.admitted.done():
            if error is None:
                self.admitted.cancel()
            else:
                self.admitted.set_exception(error)

    def interrupt(self, error: ApiError) -> None:
        """Make `news` raise at once, whatever the engine is doing."""
        self._error = error
        self._ready.set()

    async def news(self) -> AsyncIterator[list[News]]:
        """What has come since the last time, until every choice has ended. Raises ApiError where that goes wrong."""
        open_choices = self.count
        while open_choices:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, []
            if self._error is not None:
                raise self._error
            open_choices -= sum(piece.finish_reason is not None for piece in pending)
            if pending:
                yield pending
