"""Tiny GGUF files written from tiny Hugging Face checkpoints, as llama.cpp's converter does it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from compress.checkpoint import Checkpoint

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Change = Callable[[GGUFWriter], object]


def write_gguf(
    path: Path,
    source: Path,
    architecture: str | None = None,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: np.ndarray | None = None,
    settings: Mapping[str, Any] | None = None,
    change: Change | None = None,
) -> Path:
    """Write the checkpoint `source` as GGUF; matrices in the given type, vectors in float32."""
    checkpoint = Checkpoint.open(source)
    config = checkpoint.config
    kind = architecture or config["model_type"].replace("mistral", "llama")
    writer = GGUFWriter(path, kind)
    _write_settings(writer, config)
    _write_tokens(writer)
    for key, value in (settings or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    if change is not None:
        change(writer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in checkpoint.names:
        tensor = checkpoint.read(name).float()
        module = name.split(".")[-2]
        if kind == "llama" and module in heads:
            tensor = permute(tensor, heads[module])
        stored = matrices if tensor.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(tensor.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (i, i + D/2) of each head next to each other: llama.cpp rotates neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return f"blk.{match[1]}.{NAMES[match[2]]}.{leaf}" if match else f"{NAMES[module]}.{leaf}"


def _write_settings(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _write_tokens(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens[tokens.index("ÿ")] = "ab"  # byte 255 occurs in no text; there must be at least one merge
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(False)
