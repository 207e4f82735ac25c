"""A decoder as one pure function of token ids, positions and an attention.

Everything but attention runs on the tokens of all requests packed into one [T, C] tensor. What differs between
families is which attention and which feed-forward a block has, and its norms.

Shapes: T tokens, C hidden, V vocabulary, F rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from compress.arch import ModelSpec
from compress.kernels.linear import Linear
from compress.kernels.operations import Operations
from compress.kernels.queries import AttentionOptions
from compress.kernels.rotary import Rotation
from compress.runtime.models.model import Attend, CacheLayout, Inputs


class Attention(Protocol):
    @property
    def options(self) -> AttentionOptions: ...

    @property
    def cache_layout(self) -> CacheLayout: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(
        self, layer: int, x_TC: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """What the block adds to its normed input's tokens, [T, C]."""
        ...


class FeedForward(Protocol):
    @property
    def replayable(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def expert_bytes(self) -> int: ...  # among them

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Block:
    input_norm_C: torch.Tensor
    attention: Attention
    attended_norm_C: torch.Tensor | None  # Gemma: of what attention gives, before it is added
    forward_norm_C: torch.Tensor
    feed_forward: FeedForward
    forwarded_norm_C: torch.Tensor | None
    rotation: int  # which of the decoder's

    @property
    def nbytes(self) -> int:
        norms = (self.input_norm_C, self.attended_norm_C, self.forward_norm_C, self.forwarded_norm_C)
        return self.attention.nbytes + self.feed_forward.nbytes + sum(n.nbytes for n in norms if n is not None)


@dataclass(frozen=True)
class Decoder:
    spec: ModelSpec
    embedding_VC: torch.Tensor
    embedding_scale: float | None
    rotations: tuple[Rotation, ...]
    blocks: tuple[Block, ...]
    final_norm_C: torch.Tensor
    head: Linear
    operations: Operations

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm_C.dtype

    @cached_property
    def attention(self) -> tuple[AttentionOptions, ...]:
        return tuple(block.attention.options for block in self.blocks)

    @cached_property
    def cache_layout(self) -> tuple[CacheLayout, ...]:
        return tuple(block.attention.cache_layout for block in self.blocks)

    @cached_property
    def replayable(self) -> bool:
        return all(block.feed_forward.replayable for block in self.blocks)

    @property
    def weight_bytes(self) -> int:
        head = 0 if self.spec.tied else self.head.nbytes
        return self.embedding_VC.nbytes + self.final_norm_C.nbytes + head + sum(block.nbytes for block in self.blocks)

    @property
    def expert_bytes(self) -> int:
        return sum(block.feed_forward.expert_bytes for block in self.blocks)

    def inputs(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> Inputs:
        hidden_TC = F.embedding(ids_T, self.embedding_VC).to(self.dtype)
        if self.embedding_scale is not None:
            hidden_TC = hidden_TC * self.embedding_scale
        return Inputs(hidden_TC, tuple(rotation.tables(positions_T) for rotation in self.rotations))

    def hidden(self, inputs: Inputs, attend: Attend) -> torch.Tensor:
        """Hidden states [T, C] before the final norm."""
        hidden_TC = inputs.embedded_TC
        update_TC = None  # what the last linear adds to the hidden states: summed where it is normalized
        for layer, block in enumerate(self.blocks):
            x_TC, hidden_TC = self._add(update_TC, hidden_TC, block.input_norm_C)
            update_TC = block.attention(layer, x_TC, *inputs.rotations[block.rotation], attend)
            update_TC = self._norm(update_TC, block.attended_norm_C)
            x_TC, hidden_TC = self._add(update_TC, hidden_TC, block.forward_norm_C)
            update_TC = self._norm(block.feed_forward(x_TC), block.forwarded_norm_C)
        return self._add(update_TC, hidden_TC, self.final_norm_C)[1]  # the norm is of the rows that are looked at

    def _add(
        self, update_TC: torch.Tensor | None, hidden_TC: torch.Tensor, weight_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum."""
        eps, offset = self.spec.norm_eps, self.spec.sandwich
        if update_TC is None:
            return self.operations.rms_norm(hidden_TC, weight_C, eps, offset), hidden_TC
        return self.operations.add_rms_norm(update_TC, hidden_TC, weight_C, eps, offset)

    def _norm(self, x_TC: torch.Tensor, weight_C: torch.Tensor | None) -> torch.Tensor:
        if weight_C is None:
            return x_TC
        return self.operations.rms_norm(x_TC, weight_C, self.spec.norm_eps, self.spec.sandwich)

    def final_norm(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden_TC, self.final_norm_C)

    def logits(self, normed_TC: torch.Tensor) -> torch.Tensor:
        """float32 logits [T, V] of hidden states after the final norm; a cap c makes them c · tanh(logits / c)."""
        logits_TV = self.head(normed_TC).float()
        cap = self.spec.logit_cap
        return logits_TV if cap is None else logits_TV.div_(cap).tanh_().mul_(cap)
