"""What flows through a block: calibration tokens in chunks, activations in files, statistics of what passes.

Shapes: T tokens of all calibration sequences, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compress.activations import Activations
from compress.arch import Tap
from compress.statistics import Statistics

HELD_OUT_EVERY = 8  # one sequence in so many is kept apart to judge what the others decided


@dataclass(frozen=True)
class Observation:
    """What the linears of one tap take as input, over the calibration tokens."""

    tap: Tap
    statistics: Statistics
    held_out: Statistics | None  # of sequences that are not in `statistics`; None where all of them are


@dataclass(frozen=True)
class Chunk:
    """Rows start to stop: whole sequences of these lengths."""

    start: int
    stop: int
    lengths: tuple[int, ...]
    held_out: torch.Tensor  # bool [stop − start]


@dataclass(frozen=True)
class Tokens:
    """The calibration sequences in the walk's order (by length, so that equal ones share a batch), cut into chunks."""

    ids_T: torch.Tensor
    chunks: tuple[Chunk, ...]


def arrange(ids_T: torch.Tensor, lengths: Sequence[int], chunk_tokens: int) -> Tokens:
    """Order sequences by length and group them into chunks of at most `chunk_tokens`, a longer one alone."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    ordered = torch.cat([ids_T[starts[i] : starts[i] + lengths[i]] for i in order])
    chunks: list[Chunk] = []
    start, members = 0, list[int]()

    def close() -> None:
        nonlocal start, members
        sizes = tuple(lengths[i] for i in members)
        apart = torch.tensor([i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for i in members])
        mask = apart.repeat_interleave(torch.tensor(sizes))
        chunks.append(Chunk(start, start + sum(sizes), sizes, mask))
        start, members = start + sum(sizes), []

    for i in order:
        if members and sum(lengths[j] for j in members) + lengths[i] > chunk_tokens:
            close()
        members.append(i)
    close()
    return Tokens(ordered, tuple(chunks))


class Collector:
    """Gathers the statistics of one tap, with one sequence in HELD_OUT_EVERY apart where asked."""

    def __init__(self, tap: Tap, prefix: str = "", hold_out: bool = False, magnitudes: bool = False) -> None:
        self.tap = tap
        self._name = f"input of {prefix}{tap.linears[0]}"
        self._hold_out = hold_out
        self._magnitudes = magnitudes
        self._kept: Statistics | None = None
        self._apart: Statistics | None = None

    def add(self, x: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Count these rows; returns them unchanged."""
        if self._kept is None:
            self._kept = Statistics.empty(x.shape[1], self._name, x.device)
            self._apart = Statistics.empty(x.shape[1], self._name, x.device) if self._hold_out else None
        if self._apart is not None and bool(chunk.held_out.any()):
            apart = chunk.held_out.to(x.device)
            self._apart.add(x[apart], self._magnitudes)
            self._kept.add(x[~apart], self._magnitudes)
        else:
            self._kept.add(x, self._magnitudes)
        return x

    def observation(self) -> Observation:
        assert self._kept is not None
        apart = self._apart if self._apart is not None and self._apart.tokens else None
        return Observation(self.tap, self._kept, apart)


@dataclass
class Flow:
    """The activations into and out of one block."""

    source: Activations
    target: Activations | None  # None after the last block, unless the head wants them
    tokens: Tokens
    work: Path
    device: str
    advance: Callable[[float], None]

    def rows(self, chunk: Chunk, activations: Activations | None = None) -> torch.Tensor:
        """A chunk's rows of `activations` (by default of the block's input) on the device."""
        return (activations or self.source).read(chunk.start, chunk.stop).to(self.device)

    def steps(self, share: float) -> Iterator[Chunk]:
        """The chunks in order, telling progress; `share` is this pass's part of the block's time."""
        for chunk in self.tokens.chunks:
            yield chunk
            self.advance(share / len(self.tokens.chunks))

    def scratch(self, name: str, width: int) -> Activations:
        return Activations(self.work / f"{name}.tmp", len(self.tokens.ids_T), width)
