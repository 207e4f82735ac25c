"""The one walk over transformer blocks: in bounded memory, durable block by block.

For each block: load its tensors, let the technique see the calibration activations and change the weights, write what
changed to a part file, write the activations that the next block starts from, and only then mark the block as finished.
A killed run resumes after its last finished block, from those activations, and ends with the same bytes.

    work/block-00007.safetensors   tensors that the technique changed
    work/block-00007.json          its records; written last: the block is finished
    work/hidden-00008.bin          activations that follow block 7, float32 [T, hidden]

Shapes: T tokens of all calibration sequences, one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from compress.activations import Activations
from compress.arch import EMBEDDING, FINAL_NORM, HEAD, TAPS, ModelSpec, Tap, block_prefix
from compress.block import BlockForward
from compress.checkpoint import Checkpoint, save_part
from compress.errors import RunError
from compress.flow import Collector, Flow, Observation, Tokens
from compress.kernels.norm import rms_norm
from compress.progress import Phase, Reporter

HEAD_TAP = Tap("head_input", (HEAD,), FINAL_NORM)


@dataclass
class Changes:
    """What a technique did to one block: tensors by full name that replace those of `removed`, and records of it."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    transforms: list[dict[str, Any]] = field(default_factory=list)

    def replace(self, removed: str, tensors: dict[str, torch.Tensor]) -> None:
        self.removed.append(removed)
        self.tensors |= tensors

    def merge(self, other: Changes) -> None:
        self.tensors |= other.tensors
        self.removed += other.removed
        self.layers += other.layers
        self.transforms += other.transforms


class Technique(Protocol):
    def block(self, block: Block) -> Changes:
        """Change one block, through the views that `block` offers."""
        ...

    def head(self, head: HeadBlock) -> Changes:
        """Change the language-model head; called where `wants_head`."""
        ...

    @property
    def wants_head(self) -> bool: ...


class Block:
    """One block as a technique sees it: its weights, and what flows through it."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: dict[str, torch.Tensor],
        dtypes: dict[str, torch.dtype],
        flow: Flow | None,
    ) -> None:
        self.spec = spec
        self.index = index
        self.prefix = block_prefix(index)
        self.weights = weights  # float32, by local name; the forward pass uses what stands here
        self.dtypes = dtypes  # what the checkpoint stores them in
        self._flow = flow
        self._forward = BlockForward(spec, index)

    @property
    def has_data(self) -> bool:
        return self._flow is not None

    def observe(self, hold_out: bool = False, propagate: bool = False) -> dict[str, Observation]:
        """All taps at once under the present weights; `propagate` also makes the outputs the next block's input."""
        flow = self._data()
        collectors = [Collector(tap, self.prefix, hold_out, magnitudes=True) for tap in TAPS]
        for chunk in flow.steps(share=1.0):
            hidden, forward, weights = flow.rows(chunk), self._forward, self.weights
            x = collectors[0].add(forward.attention_input(hidden, weights), chunk)
            context = collectors[1].add(forward.attention_output(x, weights, chunk.lengths), chunk)
            middle = forward.after_attention(hidden, context, weights)
            x = collectors[2].add(forward.mlp_input(middle, weights), chunk)
            gated = collectors[3].add(forward.mlp_output(x, weights), chunk)
            if propagate and flow.target is not None:
                flow.target.write(chunk.start, forward.after_mlp(middle, gated, weights))
        return {collector.tap.name: collector.observation() for collector in collectors}

    def sequential(self) -> Iterator[Observation]:
        """Tap by tap; whatever weights the caller sets between two taps, the next tap already feels.

        The statistics hold Gram matrices alone. Each linear is applied once. The outputs under the final weights become
        the next block's input.
        """
        flow, forward, weights = self._data(), self._forward, self.weights
        context = flow.scratch("context", self.spec.heads * self.spec.head_dim)
        middle = flow.scratch("middle", self.spec.hidden)
        gated = flow.scratch("gated", self.spec.intermediate)
        with context, middle, gated:
            seen = Collector(TAPS[0], self.prefix)
            for chunk in flow.steps(share=0.05):
                seen.add(forward.attention_input(flow.rows(chunk), weights), chunk)
            yield seen.observation()
            seen = Collector(TAPS[1], self.prefix)
            for chunk in flow.steps(share=0.25):
                x = forward.attention_input(flow.rows(chunk), weights)
                context.write(chunk.start, seen.add(forward.attention_output(x, weights, chunk.lengths), chunk))
            yield seen.observation()
            seen = Collector(TAPS[2], self.prefix)
            for chunk in flow.steps(share=0.1):
                hidden = forward.after_attention(flow.rows(chunk), flow.rows(chunk, context), weights)
                middle.write(chunk.start, hidden)
                seen.add(forward.mlp_input(hidden, weights), chunk)
            yield seen.observation()
            seen = Collector(TAPS[3], self.prefix)
            for chunk in flow.steps(share=0.4):
                x = forward.mlp_input(flow.rows(chunk, middle), weights)
                gated.write(chunk.start, seen.add(forward.mlp_output(x, weights), chunk))
            yield seen.observation()
            if flow.target is not None:
                for chunk in flow.steps(share=0.2):
                    rows = forward.after_mlp(flow.rows(chunk, middle), flow.rows(chunk, gated), weights)
                    flow.target.write(chunk.start, rows)

    def advance(self) -> None:
        """Run the block under the present weights; its outputs become the next block's input."""
        flow, forward, weights = self._data(), self._forward, self.weights
        if flow.target is None:
            return
        for chunk in flow.steps(share=1.0):
            hidden = flow.rows(chunk)
            x = forward.attention_input(hidden, weights)
            hidden = forward.after_attention(hidden, forward.attention_output(x, weights, chunk.lengths), weights)
            gated = forward.mlp_output(forward.mlp_input(hidden, weights), weights)
            flow.target.write(chunk.start, forward.after_mlp(hidden, gated, weights))

    def _data(self) -> Flow:
        if self._flow is None:
            raise ValueError("this walk has no calibration data")
        return self._flow


class HeadBlock:
    """The head as a technique sees it: its float32 weight [vocab, hidden], and the normed states before it."""

    def __init__(self, weight: torch.Tensor, norm: torch.Tensor, eps: float, flow: Flow | None) -> None:
        self.weight = weight
        self._norm, self._eps, self._flow = norm, eps, flow

    def observe(self) -> Observation | None:
        if self._flow is None:
            return None
        seen = Collector(HEAD_TAP)
        for chunk in self._flow.steps(share=1.0):
            seen.add(rms_norm(self._flow.rows(chunk), self._norm, self._eps), chunk)
        return seen.observation()


@dataclass(frozen=True)
class Walk:
    """What a walk over a checkpoint needs to know. `tokens` None walks without data."""

    checkpoint: Checkpoint
    spec: ModelSpec
    tokens: Tokens | None
    work: Path
    reporter: Reporter
    device: str = "cpu"

    def run(self, technique: Technique, name: str) -> Changes:
        """Let the technique change every block (and the head where it wants to); resumes after finished blocks.

        The tensors of the result are not in it but in the part files: see `parts`.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        total = Changes()
        steps = self.spec.layers + technique.wants_head
        finished = self._finished(steps)
        with torch.inference_mode(), self.reporter.phase(name, steps) as phase:
            phase.resume_at(finished)
            if finished:
                self.reporter.say(f"{name}: resuming after block {finished} of {steps}")
            elif self.tokens is not None:
                self._embed()
            for index in range(finished, steps):
                self._step(index, technique, phase)
        for index in range(steps):
            record = json.loads(self._record(index).read_text())
            total.merge(Changes(removed=record["removed"], layers=record["layers"], transforms=record["transforms"]))
        return total

    def parts(self, steps: int) -> list[Path]:
        """The part files of all finished blocks."""
        return [self._part(index) for index in range(steps)]

    def _step(self, index: int, technique: Technique, phase: Phase) -> None:
        is_head = index == self.spec.layers
        last = index + 1 == self.spec.layers + technique.wants_head
        flow = self._flow(index, last, phase)
        if is_head:
            changes = technique.head(self._head(flow))
        else:
            phase.advance(0, f"block {index}")
            changes = technique.block(self._block(index, flow))
        save_part(self._part(index), {name: tensor.cpu() for name, tensor in changes.tensors.items()})
        if flow is not None:
            if flow.target is not None:
                flow.target.flush()
                flow.target.close()
            flow.source.close()
        record = {"removed": changes.removed, "layers": changes.layers, "transforms": changes.transforms}
        write_durably(self._record(index), json.dumps(record))
        phase.advance(index + 1 - phase.done)
        self._recycle(index, last)
        for name in ("context", "middle", "gated") if last else ():
            (self.work / f"{name}.tmp").unlink(missing_ok=True)

    def _block(self, index: int, flow: Flow | None) -> Block:
        prefix = block_prefix(index)
        names = self.spec.block_tensors()
        weights = {name: self._read(prefix + name) for name in names}
        dtypes = {name: self.checkpoint.dtype(prefix + name) for name in names}
        return Block(self.spec, index, weights, dtypes, flow)

    def _head(self, flow: Flow | None) -> HeadBlock:
        name = f"{EMBEDDING if self.spec.tied else HEAD}.weight"
        return HeadBlock(self._read(name), self._read(f"{FINAL_NORM}.weight"), self.spec.norm_eps, flow)

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.checkpoint.read(name).to(self.device, torch.float32)
        if not all(torch.isfinite(end) for end in torch.aminmax(tensor)):  # a NaN is both ends; needs no copy
            raise RunError(f"{self.checkpoint.path}: {name} holds a number that is not finite; the model is damaged")
        return tensor

    def _flow(self, index: int, last: bool, phase: Phase) -> Flow | None:
        if self.tokens is None:
            return None
        rows = len(self.tokens.ids_T)
        source = Activations(self._hidden(index), rows, self.spec.hidden)
        target = None if last else Activations(self._hidden(index + 1), rows, self.spec.hidden)

        def advance(steps: float) -> None:
            # A technique may take more passes than one: the block is never shown as done before it is.
            phase.advance(min(steps, max(0.0, index + 0.99 - phase.done)))

        return Flow(source, target, self.tokens, self.work, self.device, advance)

    def _embed(self) -> None:
        assert self.tokens is not None
        table = self.checkpoint.read(f"{EMBEDDING}.weight")
        with Activations(self._hidden(0), len(self.tokens.ids_T), self.spec.hidden) as hidden:
            for chunk in self.tokens.chunks:
                hidden.write(chunk.start, F.embedding(self.tokens.ids_T[chunk.start : chunk.stop], table).float())
            hidden.flush()

    def _finished(self, steps: int) -> int:
        """How many blocks are finished, with the activations that follow them."""
        done = 0
        while done < steps and self._record(done).exists():
            done += 1
        if self.tokens is None or done == steps:
            return done
        size = 4 * len(self.tokens.ids_T) * self.spec.hidden
        hidden = self._hidden(done)
        if done and not (hidden.exists() and hidden.stat().st_size == size):
            return 0
        return done

    def _recycle(self, index: int, last: bool) -> None:
        """Hand the file that is no longer needed to the block after the next: fresh pages cost more than old ones."""
        if self._hidden(index).exists():
            if last:
                self._hidden(index).unlink()
            else:
                self._hidden(index).rename(self._hidden(index + 2))

    def _part(self, index: int) -> Path:
        return self.work / f"block-{index:05d}.safetensors"

    def _record(self, index: int) -> Path:
        return self.work / f"block-{index:05d}.json"

    def _hidden(self, index: int) -> Path:
        return self.work / f"hidden-{index:05d}.bin"


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)
