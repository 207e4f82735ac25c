"""The engine's thread, and the bridge to the event loop.

One thread owns the engine: nothing else calls it. The event loop posts commands (admit, abort) and wakes the thread;
after each step the thread hands all news to the event loop in one call. Neither side polls, and no task is made for a
token.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from compress.errors import UserError
from compress.runtime.request import Request, SamplingParams
from compress.runtime.server.errors import ApiError, refusal
from compress.runtime.server.job import Ask, Job, News, Track

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the loop needs of an engine; compress.runtime.engine.Engine is one."""

    @property
    def stats(self) -> Any: ...
    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request: ...
    def fork(self, prompt: Sequence[int], params: SamplingParams, n: int) -> Sequence[Request]: ...
    def step(self) -> Sequence[Request]: ...
    def abort(self, request: Request) -> None: ...


class Observer(Protocol):
    """Who counts and times; called in the engine's thread."""

    def token(self, track: Track, tokens: int, now: float) -> None: ...
    def finished(self, track: Track, reason: str, now: float) -> None: ...


class EngineLoop:
    """Start and stop it, and submit to it, from the event loop that it was made in."""

    def __init__(self, engine: Engine, observer: Observer, capacity: int) -> None:
        self.engine = engine
        self.observer = observer
        self.capacity = capacity  # choices that may be open at once
        self.open = 0
        self.dead: str | None = None  # why the engine can serve no more
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._tracks: dict[Request, Track] = {}  # the engine's thread alone
        self._unscheduled: list[Track] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # In the event loop.

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Abort what still runs, and end the thread after its step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def idle(self, timeout: float) -> bool:
        """Wait until nothing is open; False where that takes longer than `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def submit(self, asks: Sequence[Ask], stream: bool) -> Job:
        """A job whose prompts are all admitted to the engine's queue; news come from `job.news()`.

        Raises ApiError: 400 for what the engine refuses, 429 where the queue is full, 503 where the engine is dead.
        """
        job = Job(asks, stream)
        if self.dead:
            raise ApiError(503, f"the engine has failed: {self.dead}")
        if job.count > self.capacity:
            field = "n" if job.count > len(asks) else "prompt"
            raise ApiError(400, f"{field}: {job.count} choices in one request; at most {self.capacity} can wait", field)
        if self.open + job.count > self.capacity:
            message = f"{self.open} choices are running or waiting, {self.capacity} at most; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self._account(job.count)
        self._post(lambda: self._admit(job))
        try:
            await job.admitted
        except asyncio.CancelledError:
            self.cancel(job)
            raise
        return job

    def cancel(self, job: Job) -> None:
        """Abort what is left of a job; nothing happens to one that has ended."""
        if job.left and not job.cancelled:
            job.cancelled = True
            self._post(lambda: self._abort(job))

    def cancel_all(self) -> None:
        """Abort every job, telling clients that the server stops."""
        self._post(lambda: self._fail(ApiError(503, "the server is shutting down")))

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _account(self, choices: int) -> None:
        self.open += choices
        if self.open:
            self._idle.clear()
        else:
            self._idle.set()

    def _deliver(self, batch: list[tuple[Job, list[News]]]) -> None:
        for job, news in batch:
            ended = sum(piece.finish_reason is not None for piece in news)
            self._account(-ended)
            job.put(news, ended)

    def _end(self, job: Job, error: ApiError | None) -> None:
        self._account(-job.left)
        job.end(error)

    # In the engine's thread.

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop has closed: nobody is left to be told
            self._stopping = True

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._tracks or self._stopping):
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            if self._stopping:
                self._fail(ApiError(503, "the server is shutting down"))
                return
            if self._tracks:
                try:
                    self._step()
                except Exception as failed:
                    # Which request is to blame is not known, and the batch is half done: all end, the engine goes on.
                    log.exception("a step of the engine failed; its requests end")
                    self._fail(ApiError(500, f"the engine failed: {type(failed).__name__}: {failed}"))

    def _admit(self, job: Job) -> None:
        error = self._start(job)
        if error is None:
            self._call(job.accept)
        else:
            self._drop(job)
            self._call(self._end, job, error)

    def _start(self, job: Job) -> ApiError | None:
        """Give the job's prompts to the engine, all or none; why not, where it refuses."""
        if self.dead:
            return ApiError(503, f"the engine has failed: {self.dead}")
        index = 0
        for number, ask in enumerate(job.asks):
            try:
                if ask.n == 1:
                    requests: Sequence[Request] = [self.engine.add(ask.ids, ask.params)]
                else:
                    requests = self.engine.fork(ask.ids, ask.params, ask.n)
            except UserError as refused:
                return refusal(refused)
            except Exception as failed:
                return ApiError(500, f"the engine failed on prompt {number}: {failed}")
            for request in requests:
                track = Track(job, request, index)
                self._tracks[request] = track
                self._unscheduled.append(track)
                job.tracks.append(track)
                index += 1
        return None

    def _abort(self, job: Job) -> None:
        now = monotonic()
        for track in job.tracks:
            if track.request in self._tracks:
                self.observer.finished(track, "abort", now)
        self._drop(job)
        self._call(self._end, job, None)

    def _drop(self, job: Job) -> None:
        """Take a job's requests out of the engine; an engine that cannot even do that is dead."""
        for track in job.tracks:
            if self._tracks.pop(track.request, None) is None:
                continue
            try:
                self.engine.abort(track.request)
            except Exception as failed:
                self.dead = f"{type(failed).__name__}: {failed}"
        self._unscheduled = [track for track in self._unscheduled if track.job is not job]

    def _fail(self, error: ApiError) -> None:
        """End every job with an error, and leave the engine empty."""
        for job in {track.job: None for track in self._tracks.values()}:
            self._drop(job)
            self._call(self._end, job, error)

    def _step(self) -> None:
        started = monotonic()
        gained = self.engine.step()
        now = monotonic()
        if self._unscheduled:
            self._mark_scheduled(started)
        batch: dict[Job, list[News]] = {}
        ended: list[Request] = []
        for request in gained:
            track = self._tracks.get(request)
            if track is None:
                continue
            tokens = track.advance(now)
            if tokens:
                self.observer.token(track, tokens, now)
            if request.finish_reason is not None:
                ended.append(request)
                self.observer.finished(track, request.finish_reason, now)
            if track.job.stream or request.finish_reason is not None:
                batch.setdefault(track.job, []).append(track.news())
        if batch:
            self._call(self._deliver, list(batch.items()))
        for request in ended:  # only now: a job that has a track is told of a failure
            del self._tracks[request]

    def _mark_scheduled(self, now: float) -> None:
        for track in self._unscheduled:
            if track.request.status != "waiting":
                track.scheduled_at = now
        self._unscheduled = [track for track in self._unscheduled if track.scheduled_at is None]
