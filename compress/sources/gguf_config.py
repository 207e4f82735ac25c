"""GGUF metadata → Hugging Face config.json.

Every metadata key of the architecture is read, known to be harmless, or refused by name: a dropped key would change
the mathematics in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from compress.arch import FAMILIES
from compress.errors import UserError
from compress.rope import Rope, inverse_frequencies
from compress.sources.gguf_header import GgufHeader

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # GGUF calls Mistral "llama" too
ROPE_FACTORS = "rope_freqs.weight"
_READ = frozenset(
    (
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
    )
)
_HARMLESS = frozenset(("tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon"))
# How Llama 3.1 and later wrote their factors; only `factor` differs between the releases.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def check_architecture(header: GgufHeader) -> str:
    """The GGUF architecture. Raises UserError for one that is not supported, or a part of a split file."""
    kind = header.fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{header.path}: GGUF architecture {kind!r} is not supported; supported: {known}")
    if header.fields.get("split.count", 1) > 1:
        raise UserError(f"{header.path}: one part of a split GGUF; join it with `llama-gguf-split --merge` first")
    return kind


def read_gguf_config(header: GgufHeader, rope_factors: np.ndarray | None, dtype: str) -> dict[str, Any]:
    """config.json of the model; `rope_factors` float32 [head_dim / 2] is `rope_freqs.weight` where the file has it.

    Raises UserError for a missing key and for a key whose effect is not implemented.
    """
    kind = check_architecture(header)
    keys = {key[len(kind) + 1 :]: value for key, value in header.fields.items() if key.startswith(f"{kind}.")}
    for key, value in keys.items():
        if key not in _READ | _HARMLESS and value not in (0, False, None):
            raise UserError(f"{header.path}: {kind}.{key} = {str(value)[:60]} is not supported")

    def need(key: str) -> Any:
        if key not in keys or isinstance(keys[key], list):
            raise UserError(f"{header.path}: {kind}.{key} is missing or differs between layers, which is not supported")
        return keys[key]

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise UserError(f"{header.path}: {kind}.{key} {keys[key]} differs from head_dim {head_dim}: not supported")
    window = keys.get("attention.sliding_window") or None
    family = "mistral" if kind == "llama" and window else kind
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        "dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_parameters": _rope(header, kind, keys, head_dim, rope_factors),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "use_cache": True,
    }
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if kind == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if window:
        config["sliding_window"] = window
        config |= {"use_sliding_window": True} if kind != "llama" else {}
    return config | special_tokens(header)


def special_tokens(header: GgufHeader) -> dict[str, int]:
    """The ids of the special tokens under their config.json names."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: header.fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: token for name, token in found.items() if token is not None}


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """generation_config.json: the special tokens, with every id that ends a turn or a text."""
    tokens: dict[str, Any] = dict(special_tokens(header))
    ends = [header.fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if unique:
        tokens["eos_token_id"] = unique if len(unique) > 1 else unique[0]
    return tokens


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(
    header: GgufHeader, kind: str, keys: Mapping[str, Any], head_dim: int, factors: np.ndarray | None
) -> dict[str, Any]:
    theta = _shortest(keys.get("rope.freq_base", 10000.0))
    scaling = keys.get("rope.scaling.type", "none")
    if factors is not None:
        if scaling != "none":
            raise UserError(f"{header.path}: {kind}.rope.scaling.type {scaling!r} together with {ROPE_FACTORS}")
        return {"rope_theta": theta, **_llama3(header, theta, head_dim, factors)}
    if scaling == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if scaling not in ("linear", "yarn") or "rope.scaling.factor" not in keys:
        raise UserError(
            f"{header.path}: {kind}.rope.scaling.type {scaling!r} is not supported; supported: none, linear, yarn"
        )
    rope = {"rope_theta": theta, "rope_type": scaling, "factor": _shortest(keys["rope.scaling.factor"])}
    if scaling == "yarn":
        original = keys.get("rope.scaling.original_context_length", keys["context_length"])
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3(header: GgufHeader, theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """The rope parameters whose frequencies are the default ones divided by `factors`, checked against every factor."""
    factor = _shortest(factors.max())
    plain = inverse_frequencies(Rope(theta), head_dim)
    scaled = inverse_frequencies(
        Rope(
            theta,
            "llama3",
            factor,
            int(_LLAMA3["original_max_position_embeddings"]),
            _LLAMA3["low_freq_factor"],
            _LLAMA3["high_freq_factor"],
        ),
        head_dim,
    )
    expected = (plain / scaled).numpy()
    # float32 throughout, so a true match agrees to a few units in the last place of each step
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3) or math.isnan(factor):
        raise UserError(f"{header.path}: {ROPE_FACTORS} is not Llama 3's rope scaling; other factors are not supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
