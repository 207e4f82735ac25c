"""Model families: one row each, and the numbers of one model read off its config.json.

All supported families share Llama's layout, so the names of blocks, norms and linears are one table; a row says what
differs. Anything that changes the mathematics is implemented or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import UserError, nearest
from compress.rope import Rope

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
HEAD = "lm_head"


def block_prefix(index: int) -> str:
    return f"model.layers.{index}."


@dataclass(frozen=True)
class Tap:
    """A place in a block where one activation feeds one or more linears.

    `producer` is the module whose output channels are this activation's input channels, so that a scale divided out of
    the producer can be multiplied into the linears.
    """

    name: str
    linears: tuple[str, ...]
    producer: str


TAPS = (
    Tap("attention_input", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    Tap("attention_output", ("self_attn.o_proj",), "self_attn.v_proj"),
    Tap("mlp_input", ("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    Tap("mlp_output", ("mlp.down_proj",), "mlp.up_proj"),
)
BLOCK_LINEARS = tuple(linear for tap in TAPS for linear in tap.linears)


@dataclass(frozen=True)
class Family:
    """What a `model_type` does differently. A string names the config key that decides; a bool is fixed."""

    architecture: str
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    window: str | None  # how sliding windows are configured: for every layer, or by layer type


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias", False, None),
    "mistral": Family("MistralForCausalLM", False, False, False, False, "all"),
    "qwen2": Family("Qwen2ForCausalLM", True, False, False, False, "layer_types"),
    "qwen3": Family("Qwen3ForCausalLM", "attention_bias", "attention_bias", False, True, "layer_types"),
}
SUPPORTED = "llama (Llama 2/3.x, SmolLM2), mistral, qwen2 (Qwen2, Qwen2.5), qwen3"


@dataclass(frozen=True)
class ModelSpec:
    """The dimensions and switches that the forward pass needs."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens
    dtype: str  # "float16", "bfloat16" or "float32": what config.json states

    def linear_shape(self, linear: str) -> tuple[int, int]:
        """[out, in] of a linear of a block, by its local name."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }[linear]

    def linears(self) -> dict[str, tuple[int, int]]:
        """Every linear by its full name, with [out, in]; the head last."""
        shapes = {
            block_prefix(i) + linear: self.linear_shape(linear) for i in range(self.layers) for linear in BLOCK_LINEARS
        }
        return shapes | {HEAD: (self.vocab, self.hidden)}

    def block_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of one dense block by its local name, with its shape."""
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        bias = dict.fromkeys(TAPS[0].linears, self.qkv_bias) | {"self_attn.o_proj": self.o_bias}
        for linear in BLOCK_LINEARS:
            shapes[f"{linear}.weight"] = self.linear_shape(linear)
            if bias.get(linear, self.mlp_bias):
                shapes[f"{linear}.bias"] = self.linear_shape(linear)[:1]
        return shapes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the dense checkpoint by its full name, with its shape. A tied head is stored once."""
        shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            shapes |= {block_prefix(i) + name: shape for name, shape in self.block_tensors().items()}
        shapes[f"{FINAL_NORM}.weight"] = (self.hidden,)
        return shapes if self.tied else shapes | {f"{HEAD}.weight": (self.vocab, self.hidden)}


def read_spec(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Read a Hugging Face config, in the spelling of transformers 4 (`rope_scaling`, `torch_dtype`) or 5.

    Raises UserError for a family, an activation or a rope type that is not implemented, naming those that are, and for
    a value that is not what its key wants.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = nearest(str(kind), FAMILIES)
        raise UserError(f"{where}: model_type {kind!r} is not supported; supported families: {SUPPORTED}{hint}")
    family = FAMILIES[kind]
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"{where}: hidden_act {activation!r} is not supported; supported: silu")
    hidden, heads = _count(config, "hidden_size", where), _count(config, "num_attention_heads", where)
    kv_heads = _count(config, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _count(config, "head_dim", where, max(hidden // heads, 1))
    if head_dim % 2:
        raise UserError(f"{where}: head_dim {head_dim} is odd; rotary embeddings need pairs")
    layers = _count(config, "num_hidden_layers", where)

    def switch(rule: bool | str) -> bool:
        return bool(config.get(rule, False)) if isinstance(rule, str) else rule

    return ModelSpec(
        family=kind,
        vocab=_count(config, "vocab_size", where),
        hidden=hidden,
        intermediate=_count(config, "intermediate_size", where),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_positive(config, "rms_norm_eps", where, 1e-6),
        rope=_read_rope(config, where),
        max_positions=_count(config, "max_position_embeddings", where, 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=switch(family.qkv_bias),
        o_bias=switch(family.o_bias),
        mlp_bias=switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_read_windows(config, family, layers, where),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _count(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} must be a positive integer, not {value!r}")
    return value


def _positive(config: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = default if config.get(key) is None else config[key]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < math.inf:
        raise UserError(f"{where}: {key} must be a positive number, not {value!r}")
    return number


def _read_windows(config: Mapping[str, Any], family: Family, layers: int, where: str) -> tuple[int | None, ...]:
    if family.window is None or config.get("sliding_window") is None:
        return (None,) * layers
    if family.window == "layer_types" and not config.get("use_sliding_window", False):
        return (None,) * layers
    window = _count(config, "sliding_window", where)
    if family.window == "all":
        return (window,) * layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", layers)
        if not isinstance(first, int):
            raise UserError(f"{where}: max_window_layers must be an integer, not {first!r}")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise UserError(f"{where}: layer_types must be a list of {layers}, each one of: {', '.join(known)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _read_rope(config: Mapping[str, Any], where: str) -> Rope:
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        stated = config.get(key) or {}
        if not isinstance(stated, dict):
            raise UserError(f"{where}: {key} must be an object, not {stated!r}")
        scaling |= stated
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    known = ("default", "linear", "llama3", "yarn")
    if kind not in known:
        raise UserError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(known)}")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor is not supported; supported: 1.0")
    for key in ("mscale", "mscale_all_dim"):
        if scaling.get(key):
            raise UserError(f"{where}: rope field {key!r} is not supported for {config['model_type']}")
    if kind != "default" and "factor" not in scaling:
        raise UserError(f"{where}: rope type {kind!r} needs 'factor'")
    longest = _count(config, "max_position_embeddings", where, 2048)

    def positive(key: str, default: float) -> float:
        return _positive(scaling, key, f"{where}: rope", default)

    return Rope(
        theta=positive("rope_theta", _positive(config, "rope_theta", where, 10000.0)),
        kind=kind,
        factor=positive("factor", 1.0),
        original_max_position=_count(scaling, "original_max_position_embeddings", f"{where}: rope", longest),
        low_freq_factor=positive("low_freq_factor", 1.0),
        high_freq_factor=positive("high_freq_factor", 4.0),
        beta_fast=positive("beta_fast", 32.0),
        beta_slow=positive("beta_slow", 1.0),
        attention_factor=None if scaling.get("attention_factor") is None else positive("attention_factor", 1.0),
        truncate=bool(scaling.get("truncate", True)),
    )
