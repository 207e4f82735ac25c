"""Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1; V3 is the same).

A token leaves a latent c and a rotated key k for all heads. A head's key is [W_K c, k] and its value W_V c; W_K is
absorbed into the query (q·W_K c = W_Kᵀq·c) and W_V is applied to the summed latents, so the cache is never expanded.

Shapes: T tokens, C hidden, H heads, N plain and E rotated dimensions of a query, R latent rank, X = R + E, D value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.arch import Latent, ModelSpec, block_prefix
from compress.formats import map_linear
from compress.kernels.dispatch import dense
from compress.kernels.linear import Linear
from compress.kernels.operations import Operations
from compress.kernels.queries import AttentionOptions
from compress.runtime.models.model import Attend, CacheLayout
from compress.runtime.models.weights import Weights

LATENT_EPS = 1e-6  # of the norms of the latents, whatever rms_norm_eps says: as in transformers and DeepSeek's own code


@dataclass(frozen=True)
class HeadsOnGPU:
    """A weight for each head in one batched product."""

    weight_HIO: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.weight_HIO.nbytes

    def __call__(self, x_THI: torch.Tensor) -> torch.Tensor:
        return (x_THI.transpose(0, 1) @ self.weight_HIO).transpose(0, 1)


@dataclass(frozen=True)
class HeadsOnCPU:
    """A linear for each head: a batched product's bits would depend on the number of tokens."""

    linears: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)

    def __call__(self, x_THI: torch.Tensor) -> torch.Tensor:
        return torch.stack([linear(x_THI[:, head]) for head, linear in enumerate(self.linears)], dim=1)


Heads = HeadsOnGPU | HeadsOnCPU


@dataclass(frozen=True)
class LatentAttention:
    heads: int
    latent: Latent
    interleaved: bool
    down: Linear  # queries, or their latents; then the latents and the rotated keys
    query_norm_R: torch.Tensor | None
    query_up: Linear | None
    latent_norm_R: torch.Tensor
    key_heads: Heads  # W_Kᵀ: [T, H, N] → [T, H, R]
    value_heads: Heads  # W_V: [T, H, R] → [T, H, D]
    output: Linear
    options: AttentionOptions
    operations: Operations

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout(1, self.latent.rank, self.latent.rotated_dim, latent=True)

    @property
    def nbytes(self) -> int:
        parts = (self.down, self.query_norm_R, self.query_up, self.latent_norm_R, self.key_heads, self.value_heads)
        return self.output.nbytes + sum(part.nbytes for part in parts if part is not None)

    def __call__(
        self, layer: int, x_TC: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        latent, ops = self.latent, self.operations
        down = self.down(x_TC)
        q, c_TR, k_TE = down.split(
            (down.shape[1] - latent.rank - latent.rotated_dim, latent.rank, latent.rotated_dim), 1
        )
        if self.query_up is not None and self.query_norm_R is not None:
            q = self.query_up(ops.rms_norm(q, self.query_norm_R, LATENT_EPS))
        q_THN, q_THE = q.unflatten(1, (self.heads, -1)).split((latent.plain_dim, latent.rotated_dim), 2)
        c_TR = ops.rms_norm(c_TR, self.latent_norm_R, LATENT_EPS)
        q_THE = ops.rotate(q_THE, cos_TF, sin_TF, self.interleaved)
        k_T1E = ops.rotate(k_TE[:, None], cos_TF, sin_TF, self.interleaved)
        q_THX = torch.cat((self.key_heads(q_THN), q_THE), dim=2)
        return self.output(self.value_heads(attend(layer, q_THX, c_TR[:, None], k_T1E)).flatten(1))


def load_latent_attention(weights: Weights, spec: ModelSpec, layer: int, operations: Operations) -> LatentAttention:
    latent = spec.latent
    assert latent is not None
    prefix = block_prefix(layer) + "self_attn."
    ranked = latent.query_rank is not None
    key_weight_HNR, value_weight_HDR = _up_weights(weights, spec.heads, latent, f"{prefix}kv_b_proj")
    return LatentAttention(
        heads=spec.heads,
        latent=latent,
        interleaved=spec.rope.interleaved,
        down=weights.linear(prefix + ("q_a_proj" if ranked else "q_proj"), f"{prefix}kv_a_proj_with_mqa"),
        query_norm_R=weights.norm(f"{prefix}q_a_layernorm") if ranked else None,
        query_up=weights.linear(f"{prefix}q_b_proj") if ranked else None,
        latent_norm_R=weights.norm(f"{prefix}kv_a_layernorm"),
        key_heads=_heads(weights, key_weight_HNR.mT),
        value_heads=_heads(weights, value_weight_HDR),
        output=weights.linear(f"{prefix}o_proj"),
        options=AttentionOptions(scale=spec.attention_scale),
        operations=operations,
    )


def _up_weights(weights: Weights, heads: int, latent: Latent, module: str) -> tuple[torch.Tensor, ...]:
    """What makes keys [H, N, R] and values [H, D, R] of latents; dequantized, since half of it meets queries."""
    stored = map_linear(weights.checkpoint, module)
    if weights.device.type == "cpu" and isinstance(stored, torch.Tensor):
        weight_OR = stored  # read where it lies, in whatever dtype
    else:
        weight_OR = dense(stored, weights.device, weights.dtype)
    return weight_OR.unflatten(0, (heads, -1)).split((latent.plain_dim, latent.value_dim), dim=1)


def _heads(weights: Weights, weight_HOI: torch.Tensor) -> Heads:
    if weights.device.type == "cpu":
        return HeadsOnCPU(tuple(weights.dense(weight_OI.contiguous()) for weight_OI in weight_HOI))
    return HeadsOnGPU(weight_HOI.mT.contiguous())
