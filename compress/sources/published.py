"""Configs of published models that the recipes name, so that `compress plan` needs neither network nor licence.

A run never uses these: it reads the config.json beside the weights.
"""

from __future__ import annotations

from typing import Any

LLAMA2_13B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}

LLAMA31_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-13b-hf": LLAMA2_13B,
    "meta-llama/Llama-2-13b-chat-hf": LLAMA2_13B,
    "meta-llama/Llama-3.1-8B": LLAMA31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA31_8B,
    "Qwen/Qwen2.5-7B": QWEN25_7B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN25_7B,
}
