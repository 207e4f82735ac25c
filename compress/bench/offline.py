"""The engine in this process as an arm: its steps are driven and timed one by one, with no server between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from compress.bench.timing import Run, Timing
from compress.bench.workload import Ask, Clients, Level
from compress.errors import RunError
from compress.runtime.engine import SamplingParams
from compress.runtime.stats import Stats


class Steps(Protocol):
    """What is driven of the engine."""

    @property
    def stats(self) -> Stats: ...
    def add(self, prompt: list[int], params: SamplingParams) -> Any: ...
    def step(self) -> list[Any]: ...
    def abort(self, request: Any) -> None: ...


@dataclass
class Flight:
    """One request under way."""

    ask: Ask
    start: float
    pieces: list[float]
    tokens: int = 0


@dataclass(frozen=True)
class OfflineArm:
    name: str
    engine: Steps
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def run(self, asks: Sequence[Ask], level: Level, tick: Callable[[], None] = lambda: None) -> Run:
        """Make all requests as the level says; `tick` is called after each.

        Raises RunError where the engine fails; nothing is left in it then.
        """
        waiting, flights, done = deque(asks), {}, list[Timing]()
        before, began = self.engine.stats.preemptions, self.clock()
        try:
            while waiting or flights:
                self._admit(waiting, flights, level, began)
                if not flights:
                    self.sleep(max(0.0, began + waiting[0].due - self.clock()))
                    continue
                for timing in self._step(flights):
                    done.append(timing)
                    tick()
        except RuntimeError as error:  # torch's: out of memory, a kernel that fails
            reason = str(error).strip().partition("\n")[0]
            raise RunError(f"{self.name}: the engine failed after {len(done)} requests: {reason}") from error
        finally:
            for request in flights:
                self.engine.abort(request)
        return Run(done, self.clock() - began, self.engine.stats.preemptions - before)

    def _admit(self, waiting: deque[Ask], flights: dict[Any, Flight], level: Level, began: float) -> None:
        """Add what a free client sends, or what has arrived by now: an arrival during a step counts from its time."""
        now = self.clock()
        while waiting:
            closed = isinstance(level, Clients)
            if len(flights) >= level.count if closed else began + waiting[0].due > now:
                return
            ask = waiting.popleft()
            params = SamplingParams(max_tokens=ask.output, temperature=0.0, ignore_eos=True)
            flights[self.engine.add(ask.prompt, params)] = Flight(ask, now if closed else began + ask.due, [])

    def _step(self, flights: dict[Any, Flight]) -> list[Timing]:
        """One step; the requests that it finished."""
        gained = self.engine.step()
        now, finished = self.clock(), []
        for request in gained:
            flight = flights[request]
            tokens = len(request.generated)
            if tokens > flight.tokens:
                flight.tokens = tokens
                flight.pieces.append(now)
            if request.finish_reason is not None:
                finished.append(landed(flights.pop(request), request.finish_reason))
        return finished


def landed(flight: Flight, reason: str) -> Timing:
    """A request whose end is not its length was not answered as asked."""
    return Timing(
        start=flight.start,
        pieces=tuple(flight.pieces),
        prompt_tokens=len(flight.ask.prompt),
        output_tokens=flight.tokens,
        asked_tokens=flight.ask.output,
        error=None if reason == "length" else f"finished for {reason!r}",
    )
