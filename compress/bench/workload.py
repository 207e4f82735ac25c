"""What is asked and when: requests of random token ids, in a closed loop of clients or as a Poisson process.

Everything follows from the seed. Lengths and arrivals are the same in every run of a level, so that runs can be
paired; the ids differ from run to run, so that no run finds its prompts in a prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compress.errors import UserError

LENGTHS, ARRIVALS, IDS, PREFIX = range(4)  # each a stream of random numbers of its own


@dataclass(frozen=True)
class Span:
    """A number of tokens: fixed, or uniform between both ends, which belong to it."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Clients:
    """A closed loop: each client sends its next request when its last one is answered."""

    count: int

    def __str__(self) -> str:
        return f"{self.count} client" if self.count == 1 else f"{self.count} clients"


@dataclass(frozen=True)
class Arrivals:
    """An open loop: requests arrive as a Poisson process, whether or not earlier ones are answered."""

    rate: float  # requests per second

    def __str__(self) -> str:
        return f"{self.rate:g} req/s"


Level = Clients | Arrivals


@dataclass(frozen=True)
class Workload:
    prompt: Span
    output: Span
    vocab: int  # ids are below it
    seed: int = 0
    shared_prefix: int = 0  # tokens with which every prompt of every run begins


@dataclass(frozen=True)
class Ask:
    """One request to make."""

    prompt: list[int]
    output: int  # tokens to generate, exactly
    due: float = 0.0  # seconds after the run begins; a closed loop does not read it


def asks_for(workload: Workload, level: Level, count: int, run: int) -> list[Ask]:
    """The `count` requests of the run of this number. Deterministic in all arguments."""
    lengths = np.random.default_rng([workload.seed, LENGTHS])
    prompts = lengths.integers(workload.prompt.low, workload.prompt.high, count, endpoint=True)
    outputs = lengths.integers(workload.output.low, workload.output.high, count, endpoint=True)
    prefix = np.random.default_rng([workload.seed, PREFIX]).integers(workload.vocab, size=workload.shared_prefix)
    key = level.count if isinstance(level, Clients) else round(1e6 * level.rate)
    ids = np.random.default_rng([workload.seed, IDS, isinstance(level, Clients), key, run])
    due = arrivals(level.rate, count, workload.seed) if isinstance(level, Arrivals) else np.zeros(count)
    return [
        Ask([*prefix.tolist(), *ids.integers(workload.vocab, size=int(p) - len(prefix)).tolist()], int(o), float(at))
        for p, o, at in zip(prompts, outputs, due, strict=True)
    ]


def arrivals(rate: float, count: int, seed: int) -> np.ndarray:
    """Seconds at which `count` requests of a Poisson process of `rate` per second arrive; the first at 0."""
    gaps = np.random.default_rng([seed, ARRIVALS]).exponential(1 / rate, count - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])


def check_fits(workload: Workload, positions: int, what: str) -> None:
    """Raises UserError where the longest request exceeds the model's positions."""
    length = workload.prompt.high + workload.output.high
    if length > positions:
        raise UserError(
            f"--prompt-tokens {workload.prompt} and --output-tokens {workload.output}: together up to {length}, but "
            f"{what} has {positions} positions"
        )
