"""Model families: one row each, and the numbers of one model read off its config.json.

All supported families share Llama's layout, so the names of blocks, norms and linears are one table; a row says what
differs. Anything that changes the mathematics is implemented or refused by name.
"""

from __future__ import annotations

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

    Raises UserError for a family, an activation or a rope type that is not implemented, naming those that are.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        hint = nearest(str(kind), FAMILIES)
        raise UserError(f"{where}: model_type {kind!r} is not supported; supported families: {SUPPORTED}{hint}")
    family = FAMILIES[kind]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise UserError(f"{where}: {key} must be a positive integer, not {config.get(key)!r}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"{where}: hidden_act {activation!r} is not supported; supported: silu")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    layers = config["num_hidden_layers"]

    def switch(rule: bool | str) -> bool:
        return bool(config.get(rule, False)) if isinstance(rule, str) else rule

    return ModelSpec(
        family=kind,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_read_rope(config, where),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=switch(family.qkv_bias),
        o_bias=switch(family.o_bias),
        mlp_bias=switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_read_windows(config, family, layers),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _read_windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family.window is None or window is None:
        return (None,) * layers
    if family.window == "all":
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", layers)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _read_rope(config: Mapping[str, Any], where: str) -> Rope:
    scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
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
    original = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048)
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        original_max_position=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
        truncate=bool(scaling.get("truncate", True)),
    )
