"""Model families: one row each, which says what differs from Llama, and the keys that no row may pass over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MIXTRAL = ("block_sparse_moe", ("w1", "w3", "w2"))
QWEN = ("mlp", ("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True)
class Family:
    """What a `model_type` does differently. A string names the config key that decides; a bool is fixed."""

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    # which layers have a window: every one, those from max_window_layers on, or all but each n-th
    window: Literal["all", "upper", "pattern"] | None = None
    window_switch: bool = False  # only where use_sliding_window says so
    sandwich: bool = False
    latent: bool = False
    experts: tuple[str, tuple[str, str, str]] | None = None  # their module, and gate, up and down of one
    activations: tuple[str, ...] = ("silu", "swish")
    # what transformers takes for a key that is absent, where that differs from Llama's
    defaults: Mapping[str, Any] = field(default_factory=dict)


GEMMA = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Family(
        "MistralForCausalLM", window="all", defaults={"sliding_window": 4096, "max_position_embeddings": 131072}
    ),
    "qwen2": Family("Qwen2ForCausalLM", True, window="upper", window_switch=True, defaults=QWEN_DEFAULTS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "attention_bias",
        "attention_bias",
        qk_norm=True,
        window="upper",
        window_switch=True,
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "attention_bias",
        "attention_bias",
        window="pattern",
        sandwich=True,
        activations=("gelu_pytorch_tanh",),
        defaults=GEMMA
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
            "max_position_embeddings": 8192,
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "attention_bias",
        "attention_bias",
        qk_norm=True,
        window="pattern",
        sandwich=True,
        activations=("gelu_pytorch_tanh",),
        defaults=GEMMA
        | {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        mlp_bias="mlp_bias",
        latent=True,
        defaults=DEEPSEEK | {"first_k_dense_replace": 0},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        latent=True,
        defaults=DEEPSEEK | {"first_k_dense_replace": 3, "max_position_embeddings": 4096},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        window="all",
        experts=MIXTRAL,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "attention_bias",
        "attention_bias",
        qk_norm=True,
        window="all",
        window_switch=True,
        experts=QWEN,
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "max_position_embeddings": 32768,
        },
    ),
}
SUPPORTED = (
    "llama (Llama 2/3.x, SmolLM2), mistral, qwen2 (Qwen2, Qwen2.5), qwen3, gemma2, gemma3_text, "
    "deepseek_v2 and deepseek_v3 (dense), mixtral, qwen3_moe"
)

# Keys of other families that change the mathematics, and the values that do not. A config that states another is
# refused unless its family reads the key, although transformers would pass over it: the weights were trained with it.
FOREIGN: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "clip_qkv": (),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "rope_local_base_freq": (),
    "no_rope_layers": ([],),
    "alibi": (False,),
    "use_qkv_bias": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "use_bidirectional_attention": (False,),
    "attention_chunk_size": (),
    "kv_lora_rank": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "n_routed_experts": (0,),
    "rope_interleave": (False,),
}
READS = {  # which of them a family implements
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"},
    "gemma3_text": {"final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"},
    "deepseek_v2": {"kv_lora_rank", "n_routed_experts"},  # refused below where a layer has experts
    "deepseek_v3": {"kv_lora_rank", "n_routed_experts", "rope_interleave"},
    "mixtral": {"num_local_experts", "num_experts"},
    "qwen3_moe": {"num_local_experts", "num_experts"},
}
