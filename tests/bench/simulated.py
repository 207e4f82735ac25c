"""An engine whose times are known: it moves a clock by fixed amounts, and computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from compress.runtime.engine import SamplingParams
from compress.runtime.stats import Stats
from tests.evaluate.test_speed import Clock


@dataclass(eq=False)
class SimulatedRequest:
    prompt: list[int]
    limit: int
    generated: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class SimulatedEngine:
    """A step takes `token` seconds, and `prompt` more for each new request, which then gets its first token."""

    clock: Clock
    prompt: float = 1.0
    token: float = 0.1
    width: int = 1  # tokens of a request in every further step, as accepted drafts would give
    fails_at: int | None = None  # the step that runs out of memory
    ends_early: int | None = None  # tokens after which a request stops, whatever was asked
    running: list[SimulatedRequest] = field(default_factory=list)
    seen: list[tuple[int, ...]] = field(default_factory=list)
    steps: int = 0
    most: int = 0  # requests in one step
    stats: Stats = field(default_factory=Stats)

    def add(self, prompt: list[int], params: SamplingParams) -> SimulatedRequest:
        assert params.ignore_eos
        assert params.temperature == 0
        self.running.append(SimulatedRequest(prompt, params.max_tokens))
        self.seen.append(tuple(prompt))
        return self.running[-1]

    def step(self) -> list[SimulatedRequest]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("out of memory\n  in some kernel")
        gained = list(self.running)
        self.most = max(self.most, len(gained))
        self.clock.spend(self.token + self.prompt * sum(not request.generated for request in gained))
        for request in gained:
            count = min(self.width if request.generated else 1, request.limit - len(request.generated))
            request.generated += [7] * count
            if len(request.generated) == request.limit:
                request.finish_reason = "length"
            elif self.ends_early is not None and len(request.generated) >= self.ends_early:
                request.finish_reason = "stop"
        self.running = [request for request in self.running if request.finish_reason is None]
        return gained

    def abort(self, request: SimulatedRequest) -> None:
        self.running.remove(request)
