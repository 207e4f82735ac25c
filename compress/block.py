"""The forward pass of one transformer block, cut at its taps.

Tokens lie flat, sequence after sequence, without padding; only attention knows where a sequence ends. So nothing masked
can leak into a statistic, and no padding token is needed.

Shapes: T tokens, C hidden, H query heads, K KV heads, D head dim, S sequence length, N sequences of one length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from compress.arch import ModelSpec
from compress.kernels.norm import rms_norm
from compress.kernels.rotary import rotary_tables, rotate
from compress.rope import attention_scaling, inverse_frequencies

Weights = Mapping[str, torch.Tensor]  # by local name, such as self_attn.q_proj.weight


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


@dataclass(frozen=True)
class BlockForward:
    """The four places where a block's linears take their input, and what connects them."""

    spec: ModelSpec
    index: int

    def attention_input(self, hidden_TC: torch.Tensor, weights: Weights) -> torch.Tensor:
        return rms_norm(hidden_TC, weights["input_layernorm.weight"], self.spec.norm_eps)

    def attention_output(self, x_TC: torch.Tensor, weights: Weights, lengths: Sequence[int]) -> torch.Tensor:
        """The input of o_proj [T, H·D], from the normed hidden state of whole sequences."""
        spec = self.spec
        q_THD = linear(x_TC, weights, "self_attn.q_proj").unflatten(-1, (spec.heads, spec.head_dim))
        k_TKD = linear(x_TC, weights, "self_attn.k_proj").unflatten(-1, (spec.kv_heads, spec.head_dim))
        v_TKD = linear(x_TC, weights, "self_attn.v_proj").unflatten(-1, (spec.kv_heads, spec.head_dim))
        if spec.qk_norm:
            q_THD = rms_norm(q_THD, weights["self_attn.q_norm.weight"], spec.norm_eps)
            k_TKD = rms_norm(k_TKD, weights["self_attn.k_norm.weight"], spec.norm_eps)
        inverse_F = inverse_frequencies(spec.rope, spec.head_dim).to(x_TC.device)
        positions_T = torch.cat([torch.arange(length, device=x_TC.device) for length in lengths])
        cos_TF, sin_TF = rotary_tables(inverse_F, positions_T, attention_scaling(spec.rope), x_TC.dtype)
        q_THD, k_TKD = rotate(q_THD, cos_TF, sin_TF), rotate(k_TKD, cos_TF, sin_TF)
        window = spec.windows[self.index]
        parts, start = [], 0
        for length, run in groupby(lengths):
            stop = start + length * len(list(run))
            parts.append(_attend(q_THD[start:stop], k_TKD[start:stop], v_TKD[start:stop], length, window))
            start = stop
        return torch.cat(parts)

    def after_attention(self, hidden_TC: torch.Tensor, context: torch.Tensor, weights: Weights) -> torch.Tensor:
        return hidden_TC + linear(context, weights, "self_attn.o_proj")

    def mlp_input(self, hidden_TC: torch.Tensor, weights: Weights) -> torch.Tensor:
        return rms_norm(hidden_TC, weights["post_attention_layernorm.weight"], self.spec.norm_eps)

    def mlp_output(self, x_TC: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The input of down_proj [T, intermediate]."""
        # in place, and before the other half exists: these are the widest activations of a block
        gate_TI = F.silu(linear(x_TC, weights, "mlp.gate_proj"), inplace=True)
        return gate_TI.mul_(linear(x_TC, weights, "mlp.up_proj"))

    def after_mlp(self, hidden_TC: torch.Tensor, gated: torch.Tensor, weights: Weights) -> torch.Tensor:
        return hidden_TC + linear(gated, weights, "mlp.down_proj")


def _attend(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, length: int, window: int | None
) -> torch.Tensor:
    """Causal attention within each of T / length sequences of one length; returns [T, H·D]."""
    heads, kv_heads = q_THD.shape[1], k_TKD.shape[1]

    def by_sequence(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, length)).transpose(1, 2)  # [N, heads, S, D]

    q, k, v = by_sequence(q_THD), by_sequence(k_TKD), by_sequence(v_TKD)
    if kv_heads != heads:
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    if window is not None and window < length:
        position_S = torch.arange(length, device=q.device)
        distance_SS = position_S[:, None] - position_S[None, :]
        seen_SS = (distance_SS >= 0) & (distance_SS < window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_SS)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(0, 1).flatten(1)
