"""Attention with grouped KV heads (arXiv 2305.13245): Llama's, with biases or norms of queries and keys.

Shapes: T tokens, C hidden, H query heads, K KV heads, D head dim, F = D/2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.arch import ModelSpec, block_prefix
from compress.kernels.linear import Linear
from compress.kernels.operations import Operations
from compress.kernels.queries import AttentionOptions
from compress.runtime.models.model import Attend, CacheLayout
from compress.runtime.models.weights import Weights


@dataclass(frozen=True)
class GroupedAttention:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    unit_offset: bool
    qkv: Linear
    qk_norm_HD: torch.Tensor | None  # a weight for each of the H + K heads
    output: Linear
    options: AttentionOptions
    operations: Operations

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout(self.kv_heads, self.head_dim, self.head_dim)

    @property
    def nbytes(self) -> int:
        norm = 0 if self.qk_norm_HD is None else self.qk_norm_HD.nbytes
        return self.qkv.nbytes + self.output.nbytes + norm

    def __call__(
        self, layer: int, x_TC: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        qkv_THD = self.qkv(x_TC).view(-1, heads + 2 * kv_heads, self.head_dim)
        qk_THD, v_TKD = torch.split_with_sizes(qkv_THD, (heads + kv_heads, kv_heads), 1)
        if self.qk_norm_HD is not None:
            qk_THD = self.operations.rms_norm(qk_THD, self.qk_norm_HD, self.eps, self.unit_offset)
        q_THD, k_TKD = torch.split_with_sizes(self.operations.rotate(qk_THD, cos_TF, sin_TF), (heads, kv_heads), 1)
        return self.output(attend(layer, q_THD, k_TKD, v_TKD).flatten(1))


def load_grouped_attention(weights: Weights, spec: ModelSpec, layer: int, operations: Operations) -> GroupedAttention:
    prefix = block_prefix(layer) + "self_attn."
    qk_norm_HD = None
    if spec.qk_norm:
        q_norm_D, k_norm_D = weights.norm(f"{prefix}q_norm"), weights.norm(f"{prefix}k_norm")
        qk_norm_HD = torch.cat((q_norm_D.expand(spec.heads, -1), k_norm_D.expand(spec.kv_heads, -1)))
    return GroupedAttention(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        eps=spec.norm_eps,
        unit_offset=spec.sandwich,
        qkv=weights.linear(f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj"),
        qk_norm_HD=qk_norm_HD,
        output=weights.linear(f"{prefix}o_proj"),
        options=AttentionOptions(window=spec.windows[layer], scale=spec.attention_scale, soft_cap=spec.attention_cap),
        operations=operations,
    )
