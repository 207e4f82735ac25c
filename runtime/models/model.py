"""What the engine asks of a model, whatever its family.

Shapes: T tokens, C hidden, V vocabulary, H query heads, K KV heads, D head dim, F rotated pairs, R latent rank,
E rotated dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from compress.arch import ModelSpec
from compress.kernels.operations import Operations
from compress.kernels.queries import AttentionOptions


class Attend(Protocol):
    """Causal attention of one layer, which also keeps what the tokens leave in its cache.

    Grouped heads: q [T, H, D], k and v [T, K, D] → [T, H, D]. Latents: q [T, H, R + E], whose first R dimensions meet
    the latents k [T, 1, R] and the rest the rotated keys v [T, 1, E] → Σ p c, [T, H, R].
    """

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Inputs:
    """What a pass over the blocks starts from: embedded tokens, and cos and sin [T, F] of each rotation."""

    embedded_TC: torch.Tensor
    rotations: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.embedded_TC, *(table for tables in self.rotations for table in tables))


@dataclass(frozen=True)
class CacheLayout:
    """What a token leaves in the cache of a layer: K heads of so many numbers for keys and for values.

    `latent`: the "keys" are latents and the "values" rotated keys, of one head, and both are slices of one tensor.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def numbers(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class Model(Protocol):
    """A pure function of ids, positions and an attention. Everything but attention runs on the packed tokens."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def operations(self) -> Operations: ...

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        ...

    @property
    def embedding_VC(self) -> torch.Tensor: ...

    @property
    def attention(self) -> tuple[AttentionOptions, ...]:
        """Of each layer."""
        ...

    @property
    def cache_layout(self) -> tuple[CacheLayout, ...]:
        """Of each layer."""
        ...

    @property
    def replayable(self) -> bool:
        """Which kernels run depends on shapes alone, never on numbers: a CUDA graph can hold the forward pass."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held; a tied head counts once."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Of the experts of a mixture, which a step reads in part."""
        ...

    def inputs(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> Inputs: ...

    def hidden(self, inputs: Inputs, attend: Attend) -> torch.Tensor:
        """Hidden states [T, C] before the final norm."""
        ...

    def final_norm(self, hidden_TC: torch.Tensor) -> torch.Tensor: ...

    def logits(self, normed_TC: torch.Tensor) -> torch.Tensor:
        """float32 logits [T, V] of hidden states after the final norm."""
        ...
