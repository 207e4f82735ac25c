"""A checkpoint as a model: which parts a block has follows from its spec."""

from __future__ import annotations

import math

import torch

from compress.arch import EMBEDDING, FINAL_NORM, HEAD, ModelSpec, block_prefix
from compress.checkpoint import Checkpoint
from compress.formats import map_linear
from compress.kernels.dispatch import prepare_linear, prepare_operations
from compress.kernels.operations import Operations
from compress.kernels.rotary import Rotation
from compress.rope import Rope, attention_scaling, inverse_frequencies
from compress.runtime.models.attention import load_grouped_attention
from compress.runtime.models.decoder import Block, Decoder
from compress.runtime.models.mla import load_latent_attention
from compress.runtime.models.mlp import load_mlp
from compress.runtime.models.moe import load_mixture
from compress.runtime.models.weights import Weights


def load_model(
    checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype, exact: bool = False
) -> Decoder:
    """Map a checkpoint and prepare its weights; on a CPU the linears and the embedding are read where they lie.

    `exact` keeps activations in `dtype` where the fast arithmetic would quantize them.
    """
    weights = Weights(checkpoint, device, dtype, exact)
    operations = prepare_operations(device)
    embedding_VC = checkpoint.map(f"{EMBEDDING}.weight").to(device)
    head_weight = embedding_VC if spec.tied else map_linear(checkpoint, HEAD)
    rotated_dim = spec.head_dim if spec.latent is None else spec.latent.rotated_dim

    def rotation(rope: Rope) -> Rotation:
        return Rotation(inverse_frequencies(rope, rotated_dim).to(device), attention_scaling(rope), dtype)

    return Decoder(
        spec=spec,
        embedding_VC=embedding_VC,
        embedding_scale=_embedding_scale(spec, dtype),
        rotations=tuple(rotation(rope) for rope in (spec.rope, spec.local_rope) if rope is not None),
        blocks=tuple(_load_block(weights, spec, layer, operations) for layer in range(spec.layers)),
        final_norm_C=weights.norm(FINAL_NORM),
        head=prepare_linear([head_weight], [None], device, dtype, exact),
        operations=operations,
    )


def _embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float | None:
    """Gemma's √C, rounded to the dtype of the embedded tokens as transformers does: 55.4256 is 55.5 in bfloat16."""
    return float(torch.tensor(math.sqrt(spec.hidden), dtype=dtype)) if spec.sandwich else None


def _load_block(weights: Weights, spec: ModelSpec, layer: int, operations: Operations) -> Block:
    prefix = block_prefix(layer)
    load_attention = load_grouped_attention if spec.latent is None else load_latent_attention
    load_feed_forward = load_mixture if spec.is_sparse(layer) else load_mlp
    local = spec.local_rope is not None and spec.windows[layer] is not None
    # Gemma's post_attention_layernorm is of what attention gives; Llama's, of what enters the MLP
    forward_norm = "pre_feedforward_layernorm" if spec.sandwich else "post_attention_layernorm"
    return Block(
        input_norm_C=weights.norm(f"{prefix}input_layernorm"),
        attention=load_attention(weights, spec, layer, operations),
        attended_norm_C=weights.norm(f"{prefix}post_attention_layernorm") if spec.sandwich else None,
        forward_norm_C=weights.norm(f"{prefix}{forward_norm}"),
        feed_forward=load_feed_forward(weights, spec, layer, operations),
        forwarded_norm_C=weights.norm(f"{prefix}post_feedforward_layernorm") if spec.sandwich else None,
        rotation=1 if local else 0,
    )
