"""What a draft token costs: measured as the engine runs, since it depends on model, machine and batch.

Decoding reads all weights for one token or for several, so a few more tokens may cost next to nothing, or, where
arithmetic is what takes the time, as much as the first.

Shapes: T tokens of a step, N requests in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ASSUMED = 0.1  # of a step without drafts: before anything is measured, and where time must not decide
NEEDED = 16  # steps, before they are believed
SPREAD = 0.1  # of the mean T: with less, a slope is noise
LIMITS = (0.01, 2.0)


@dataclass
class DraftCost:
    """Seconds of a step over T tokens as the line a + b T, by least squares over moving averages.

    One more draft token for each of N requests then takes b N seconds more, and d to draft, where a step without drafts
    takes a + b N.
    """

    weight: float = 0.05  # of the newest step
    steps: int = 0
    tokens: float = 0.0  # averages: T, seconds, and their products
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    drafting: float = 0.0  # d
    drafts: int = 0  # calls that it was measured in
    slope: tuple[float, float] | None = None  # a and b, as last known

    def observe(self, tokens: int, seconds: float) -> None:
        """A step that computed nothing but the last tokens of requests and their drafts."""
        self.steps += 1
        if self.slope is not None:  # another process may have had the processor
            seconds = min(seconds, 2 * (self.slope[0] + self.slope[1] * tokens))
        weight = max(self.weight, 1 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.squares += weight * (tokens**2 - self.squares)
        self.products += weight * (tokens * seconds - self.products)
        variance = self.squares - self.tokens**2
        if self.steps >= NEEDED and math.sqrt(max(variance, 0.0)) > SPREAD * self.tokens:
            # neither more tokens nor a step takes less than no time
            most = self.seconds / self.tokens
            b = min(max((self.products - self.tokens * self.seconds) / variance, 0.0), most)
            self.slope = (self.seconds - b * self.tokens, b)

    def observe_drafting(self, longest: int, seconds: float) -> None:
        """Drafts of up to so many tokens were proposed."""
        if longest:
            self.drafts += 1
            self.drafting += max(self.weight, 1 / self.drafts) * (seconds / longest - self.drafting)

    def of(self, requests: int) -> float:
        """Cost of one more draft token for each of N requests, in steps without drafts."""
        if self.slope is None:
            return ASSUMED
        a, b = self.slope
        low, high = LIMITS
        return min(max((b * requests + self.drafting) / (a + b * requests), low), high)
