"""The numbers of a model, read off its config.json; what changes the mathematics is implemented or refused by name."""

from __future__ import annotations

from typing import Literal

from compress.errors import UserError, nearest
from compress.families import FAMILIES, FOREIGN, READS, SUPPORTED, Family
from compress.fields import Config, count, count_or_none, positive, positive_or_none
from compress.rope import Rope, read_rope, yarn_magnitude
from compress.spec import (
    BLOCK_LINEARS,
    EMBEDDING,
    FINAL_NORM,
    FUSED_DOWN,
    FUSED_GATE_UP,
    HEAD,
    TAPS,
    Experts,
    Latent,
    ModelSpec,
    Tap,
    block_prefix,
)

__all__ = [
    "BLOCK_LINEARS",
    "EMBEDDING",
    "FAMILIES",
    "FINAL_NORM",
    "FUSED_DOWN",
    "FUSED_GATE_UP",
    "HEAD",
    "SUPPORTED",
    "TAPS",
    "Experts",
    "Latent",
    "ModelSpec",
    "Tap",
    "block_prefix",
    "read_spec",
    "require_llama_blocks",
]

GATES: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_spec(config: Config, where: str = "config.json") -> ModelSpec:
    """Read a Hugging Face config, in the spelling of transformers 4 (`rope_scaling`, `torch_dtype`) or 5.

    Raises UserError for a family, an activation, a rope type or a field that is not implemented, naming those that
    are, and for a value that is not what its key wants.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = nearest(str(kind), FAMILIES)
        raise UserError(f"{where}: model_type {kind!r} is not supported; supported families: {SUPPORTED}{hint}")
    family = FAMILIES[kind]
    _refuse_foreign(config, kind, where)
    config = {**family.defaults, **config}
    hidden, heads = count(config, "hidden_size", where), count(config, "num_attention_heads", where)
    kv_heads = count(config, "num_key_value_heads", where, heads)
    layers = count(config, "num_hidden_layers", where)
    latent = _read_latent(config, kind, heads, kv_heads, layers, where) if family.latent else None
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = count(config, "head_dim", where, max(hidden // heads, 1))
    if latent is not None:
        head_dim = latent.plain_dim + latent.rotated_dim
    elif head_dim % 2:
        raise UserError(f"{where}: head_dim {head_dim} is odd; rotary embeddings need pairs")
    rope, local_rope = _read_ropes(config, kind, where)
    windows = _read_windows(config, family, layers, where)

    def switch(rule: bool | str) -> bool:
        return bool(config.get(rule, False)) if isinstance(rule, str) else rule

    return ModelSpec(
        family=kind,
        vocab=count(config, "vocab_size", where),
        hidden=hidden,
        intermediate=count(config, "intermediate_size", where),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=positive(config, "rms_norm_eps", where, 1e-6),
        rope=rope,
        max_positions=count(config, "max_position_embeddings", where, 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=switch(family.qkv_bias),
        o_bias=switch(family.o_bias),
        mlp_bias=switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=windows,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        gate=_read_gate(config, family, where),
        sandwich=family.sandwich,
        attention_scale=_read_scale(config, family, latent, rope, where),
        attention_cap=positive_or_none(config, "attn_logit_softcapping", where) if family.sandwich else None,
        logit_cap=positive_or_none(config, "final_logit_softcapping", where) if family.sandwich else None,
        local_rope=local_rope,
        latent=latent,
        experts=_read_experts(config, kind, family, layers, where),
    )


def require_llama_blocks(spec: ModelSpec, what: str, where: str) -> None:
    """Raises UserError for a model whose blocks are not Llama's, where `what` knows only those."""
    if not spec.compressible:
        known = ", ".join(name for name, row in FAMILIES.items() if not (row.sandwich or row.latent or row.experts))
        raise UserError(f"{where}: {what} does not support model_type {spec.family!r}; supported: {known}")


def _refuse_foreign(config: Config, kind: str, where: str) -> None:
    for key, neutral in FOREIGN.items():
        value = config.get(key)
        if value is None or key in READS.get(kind, ()) or value in neutral:
            continue
        shown = f"; supported: {neutral[-1]}" if neutral else ""
        raise UserError(f"{where}: {key} is not supported for {kind}: {str(value)[:60]}{shown}")


def _read_gate(config: Config, family: Family, where: str) -> Literal["silu", "gelu_tanh"]:
    key = "hidden_activation" if family.sandwich else "hidden_act"
    stated = config.get(key, family.activations[0])
    if isinstance(stated, str) and stated in family.activations:
        return GATES[stated]
    raise UserError(f"{where}: {key} {stated!r} is not supported; supported: {family.activations[0]}")


def _read_scale(config: Config, family: Family, latent: Latent | None, rope: Rope, where: str) -> float | None:
    if family.sandwich:
        return positive(config, "query_pre_attn_scalar", where) ** -0.5
    if latent is None:
        return None
    # DeepSeek's YaRN sharpens the softmax as well, by the square of the factor that is for all dimensions
    sharpened = rope.kind != "default" and rope.mscale_all_dim
    magnitude = yarn_magnitude(rope.factor, rope.mscale_all_dim) if sharpened else 1.0
    return (latent.plain_dim + latent.rotated_dim) ** -0.5 * magnitude**2


def _read_ropes(config: Config, kind: str, where: str) -> tuple[Rope, Rope | None]:
    """The rotation of every layer, or of the layers without a window and of those with one."""
    interleaved = kind == "deepseek_v2" or (kind == "deepseek_v3" and bool(config.get("rope_interleave", True)))
    if kind != "gemma3_text":
        return read_rope(config, where, interleaved), None
    stated = config.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        raise UserError(f"{where}: rope_parameters must be an object, not {stated!r}")
    wide, local = stated.get("full_attention") or {}, stated.get("sliding_attention") or {}
    plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    return (
        read_rope(plain | {"rope_scaling": config.get("rope_scaling"), "rope_parameters": wide}, where),
        read_rope(plain | {"rope_theta": config["rope_local_base_freq"], "rope_parameters": local}, where),
    )


def _read_latent(config: Config, kind: str, heads: int, kv_heads: int, layers: int, where: str) -> Latent:
    dense = config["first_k_dense_replace"]
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < layers:
        raise UserError(
            f"{where}: first_k_dense_replace {dense!r} leaves layers with experts, which are not supported for {kind}; "
            f"supported: {layers} (all layers dense)"
        )
    if kv_heads != heads:
        raise UserError(f"{where}: num_key_value_heads {kv_heads} is not num_attention_heads {heads}, as latents want")
    rotated = count(config, "qk_rope_head_dim", where)
    if rotated % 2:
        raise UserError(f"{where}: qk_rope_head_dim {rotated} is odd; rotary embeddings need pairs")
    return Latent(
        query_rank=count_or_none(config, "q_lora_rank", where),
        rank=count(config, "kv_lora_rank", where),
        plain_dim=count(config, "qk_nope_head_dim", where),
        rotated_dim=rotated,
        value_dim=count(config, "v_head_dim", where),
        bias=bool(config.get("attention_bias", False)),
    )


def _read_experts(config: Config, kind: str, family: Family, layers: int, where: str) -> Experts | None:
    if family.experts is None:
        return None
    module, names = family.experts
    # transformers calls it num_local_experts in one family and num_experts in the other, and reads both in either
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts, chosen = count(config, key, where), count(config, "num_experts_per_tok", where)
    if chosen > experts:
        raise UserError(f"{where}: num_experts_per_tok {chosen} is more than {key} {experts}")
    width = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    step = count(config, "decoder_sparse_step", where, 1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise UserError(f"{where}: mlp_only_layers must be a list of layers, not {plain!r}")
    return Experts(
        count=experts,
        per_token=chosen,
        intermediate=count(config, width, where),
        normalized=kind == "mixtral" or bool(config.get("norm_topk_prob", False)),
        sparse=tuple(kind == "mixtral" or (i not in plain and (i + 1) % step == 0) for i in range(layers)),
        module=module,
        names=names,
    )


def _read_windows(config: Config, family: Family, layers: int, where: str) -> tuple[int | None, ...]:
    if family.window is None or (config.get("sliding_window") is None and family.window != "pattern"):
        return (None,) * layers
    if family.window_switch and not config.get("use_sliding_window", False):
        return (None,) * layers
    window = count(config, "sliding_window", where)
    if family.window == "all":
        return (window,) * layers
    types = config.get("layer_types")
    if types is None and family.window == "upper":
        first = config.get("max_window_layers", layers)
        if not isinstance(first, int):
            raise UserError(f"{where}: max_window_layers must be an integer, not {first!r}")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    elif types is None:
        each = count(config, "sliding_window_pattern", where)
        types = ["sliding_attention" if (i + 1) % each else "full_attention" for i in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise UserError(f"{where}: layer_types must be a list of {layers}, each one of: {', '.join(known)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
