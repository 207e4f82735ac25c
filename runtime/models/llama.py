"""Llama and its kin (Mistral, Qwen2, Qwen3) as one pure function of token ids, positions and an attention.

Everything but attention runs on the tokens of all requests packed into one [T, C] tensor.

Shapes: T tokens, C hidden, V vocabulary, H query heads, K KV heads, D head dim, F = D/2, O out features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from compress.arch import EMBEDDING, FINAL_NORM, HEAD, ModelSpec, block_prefix
from compress.checkpoint import Checkpoint
from compress.formats import map_linear
from compress.kernels.attention import AttentionOptions
from compress.kernels.dispatch import prepare_linear, prepare_operations
from compress.kernels.linear import Linear
from compress.kernels.operations import Operations
from compress.kernels.rotary import rotary_tables
from compress.rope import attention_scaling, inverse_frequencies
from compress.runtime.models.model import Attend, CacheLayout


@dataclass(frozen=True)
class Block:
    input_norm_C: torch.Tensor
    qkv: Linear
    qk_norm_HD: torch.Tensor | None  # a weight for each of the H + K heads
    output: Linear
    post_norm_C: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Llama:
    spec: ModelSpec
    embedding_VC: torch.Tensor
    blocks: tuple[Block, ...]
    final_norm_C: torch.Tensor
    head: Linear
    inverse_F: torch.Tensor
    operations: Operations
    replayable = True

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm_C.dtype

    @cached_property
    def attention(self) -> tuple[AttentionOptions, ...]:
        return tuple(AttentionOptions(window=window) for window in self.spec.windows)

    @cached_property
    def cache_layout(self) -> tuple[CacheLayout, ...]:
        return (CacheLayout(self.spec.kv_heads, self.spec.head_dim, self.spec.head_dim),) * self.spec.layers

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [T, C] before the final norm."""
        dtype = self.final_norm_C.dtype
        hidden_TC = F.embedding(ids_T, self.embedding_VC).to(dtype)
        cos_TF, sin_TF = rotary_tables(self.inverse_F, positions_T, attention_scaling(self.spec.rope), dtype)
        ops, eps = self.operations, self.spec.norm_eps
        update_TC = None  # what the last linear adds to the hidden states: summed where it is normalized
        for layer, block in enumerate(self.blocks):
            if update_TC is None:
                x_TC = ops.rms_norm(hidden_TC, block.input_norm_C, eps)
            else:
                x_TC, hidden_TC = ops.add_rms_norm(update_TC, hidden_TC, block.input_norm_C, eps)
            update_TC = self._attention(layer, block, x_TC, cos_TF, sin_TF, attend)
            x_TC, hidden_TC = ops.add_rms_norm(update_TC, hidden_TC, block.post_norm_C, eps)
            update_TC = block.down(ops.gated(block.gate_up(x_TC), "silu"))
        return hidden_TC if update_TC is None else hidden_TC + update_TC

    def _attention(
        self,
        layer: int,
        block: Block,
        x_TC: torch.Tensor,
        cos_TF: torch.Tensor,
        sin_TF: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        qkv_THD = block.qkv(x_TC).view(-1, heads + 2 * kv_heads, self.spec.head_dim)
        qk_THD, v_TKD = torch.split_with_sizes(qkv_THD, (heads + kv_heads, kv_heads), 1)
        if block.qk_norm_HD is not None:
            qk_THD = self.operations.rms_norm(qk_THD, block.qk_norm_HD, self.spec.norm_eps)
        q_THD, k_TKD = torch.split_with_sizes(self.operations.rotate(qk_THD, cos_TF, sin_TF), (heads, kv_heads), 1)
        return block.output(attend(layer, q_THD, k_TKD, v_TKD).flatten(1))

    def final_norm(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        return self.operations.rms_norm(hidden_TC, self.final_norm_C, self.spec.norm_eps)

    def logits(self, normed_TC: torch.Tensor) -> torch.Tensor:
        """float32 logits [T, V] of hidden states after the final norm."""
        return self.head(normed_TC).float()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held; a tied head counts once."""
        total = self.embedding_VC.nbytes + self.final_norm_C.nbytes + (0 if self.spec.tied else self.head.nbytes)
        for block in self.blocks:
            total += sum(linear.nbytes for linear in (block.qkv, block.output, block.gate_up, block.down))
            total += block.input_norm_C.nbytes + block.post_norm_C.nbytes
            total += block.qk_norm_HD.nbytes if block.qk_norm_HD is not None else 0
        return total


def load_llama(
    checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype, exact: bool = False
) -> Llama:
    """Map a checkpoint and prepare its weights; on a CPU the linears and the embedding are read where they lie.

    `exact` keeps activations in `dtype` where the fast arithmetic would quantize them.
    """
    embedding_VC = checkpoint.map(f"{EMBEDDING}.weight").to(device)
    head_weight = embedding_VC if spec.tied else map_linear(checkpoint, HEAD)
    return Llama(
        spec=spec,
        embedding_VC=embedding_VC,
        blocks=tuple(_load_block(checkpoint, block_prefix(i), spec, device, dtype, exact) for i in range(spec.layers)),
        final_norm_C=checkpoint.read(f"{FINAL_NORM}.weight").to(device=device, dtype=dtype),
        head=prepare_linear([head_weight], [None], device, dtype, exact),
        inverse_F=inverse_frequencies(spec.rope, spec.head_dim).to(device),
        operations=prepare_operations(device),
    )


def _load_block(
    checkpoint: Checkpoint, prefix: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, exact: bool
) -> Block:
    def linear(*names: str) -> Linear:
        modules = [prefix + name for name in names]
        return prepare_linear(
            [map_linear(checkpoint, module) for module in modules],
            [checkpoint.read(f"{module}.bias") if f"{module}.bias" in checkpoint else None for module in modules],
            device,
            dtype,
            exact,
        )

    def norm(name: str) -> torch.Tensor:
        return checkpoint.read(f"{prefix}{name}.weight").to(device=device, dtype=dtype)

    qk_norm_HD = None
    if spec.qk_norm:
        q_norm_D, k_norm_D = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        qk_norm_HD = torch.cat((q_norm_D.expand(spec.heads, -1), k_norm_D.expand(spec.kv_heads, -1)))
    return Block(
        input_norm_C=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm_HD=qk_norm_HD,
        output=linear("self_attn.o_proj"),
        post_norm_C=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
