"""Configs of every family: what is read, what transformers takes for an absent key, what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from compress.arch import read_spec, require_llama_blocks
from compress.checkpoint import Checkpoint, check_tensors
from compress.errors import UserError
from compress.families import FAMILIES, FOREIGN, READS
from compress.pipeline import plan
from compress.recipe import load_recipe
from compress.rope import attention_scaling
from tests.tiny import BASE, tiny_model

MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "gemma2": {"attention_bias": True},
    "gemma3_text": {"attention_bias": True},
    "deepseek_v2": MLA | {"q_lora_rank": None, "mlp_bias": True, "attention_bias": True},
    "deepseek_v3": MLA | {"q_lora_rank": 24, "attention_bias": True},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "attention_bias": True},
}

# Keys of transformers' configs that are read, or that change nothing of what an inference computes.
READ = """
    attention_bias attn_logit_softcapping decoder_sparse_step dtype final_logit_softcapping first_k_dense_replace
    head_dim hidden_act hidden_activation hidden_size intermediate_size kv_lora_rank layer_types max_position_embeddings
    max_window_layers mlp_bias mlp_only_layers model_type moe_intermediate_size n_routed_experts norm_topk_prob
    num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts
    q_lora_rank qk_nope_head_dim qk_rope_head_dim query_pre_attn_scalar rms_norm_eps rope_interleave rope_parameters
    sliding_window sliding_window_pattern tie_word_embeddings torch_dtype use_bidirectional_attention use_sliding_window
    v_head_dim vocab_size
"""
HARMLESS = {
    "training": "attention_dropout initializer_range router_aux_loss_coef router_jitter_noise",
    "of DeepSeek's experts": "n_group n_shared_experts routed_scaling_factor topk_group topk_method",
    "of modules that are not the model": "num_nextn_predict_layers num_mtp_layers",
    "the same sum cut in another way": "pretraining_tp",
    "follow from others": "qk_head_dim _sliding_window_pattern",
    "tokens": "bos_token_id eos_token_id pad_token_id",
    "what is returned": "output_attentions output_hidden_states output_router_logits return_dict use_cache",
    "of other tasks": "chunk_size_feed_forward id2label is_encoder_decoder label2id problem_type",
    "names": "_name_or_path architectures transformers_version",
}
KNOWN = {*READ.split(), *(key for keys in HARMLESS.values() for key in keys.split())}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_is_accounted_for(family: str) -> None:
    """Row 13: a new release that gives a family another field fails here, not in a user's logits."""
    unknown = set(AutoConfig.for_model(family).to_dict()) - KNOWN
    assert not unknown


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_spec_lists_exactly_the_tensors_that_are_stored(family: str, tied: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = CHANGES.get(family, {}) | {"tie_word_embeddings": tied}
    checkpoint = Checkpoint.open(tiny_model(tmp_path, family, **changes))
    spec = read_spec(checkpoint.config)
    assert spec.tensors() == {name: checkpoint.shape(name) for name in checkpoint.names}
    assert {name.rpartition(".")[0] for name in spec.tensors()} >= set(spec.linears()) - (
        {"lm_head"} if tied else set()
    )
    check_tensors(checkpoint, spec)


# what shapes a tensor has no silent fault: a wrong default is refused by check_tensors
SHAPES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type"}


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_transformers_takes_for_them(family: str, tmp_path: Path) -> None:
    """Each key of a written config alone is dropped, and the whole class read again by transformers."""
    whole = AutoConfig.for_model(family, **({k: BASE[k] for k in SHAPES & BASE.keys()} | CHANGES.get(family, {})))
    stated = {key: value for key, value in whole.to_dict().items() if key != "transformers_version"}
    for key in sorted(set(stated) - SHAPES - {"dtype", "layer_types", "rope_parameters", "first_k_dense_replace"}):
        fewer = {name: value for name, value in stated.items() if name != key}
        expected = AutoConfig.for_model(family, **{k: v for k, v in fewer.items() if k != "model_type"}).to_dict()
        try:
            wanted = read_spec(expected)
        except UserError:
            continue  # transformers' default is what we refuse: bidirectional, fewer KV heads than latents want
        assert read_spec(fewer) == wanted, key


@pytest.mark.parametrize("key", FOREIGN)
@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_other_families_are_refused_by_name(family: str, key: str, tmp_path: Path) -> None:
    """Row 13: where transformers would pass over a field that the weights were trained with."""
    if key in READS.get(family, ()):
        return
    config = {"model_type": family, **BASE, **CHANGES.get(family, {})}
    for neutral in (None, *FOREIGN[key]):
        read_spec(config | {key: neutral})
    with pytest.raises(UserError, match=f"^config.json: {key} is not supported for {family}: "):
        read_spec(config | {key: 0.25})


def test_other_families_are_refused(tmp_path: Path) -> None:
    """Row 13: StableLM's partial rotation and layer norms are not read as Llama's."""
    config = AutoConfig.for_model("stablelm", **BASE).to_dict()
    with pytest.raises(UserError, match=r"model_type 'stablelm' is not supported; supported families: llama \("):
        read_spec(config)
    with pytest.raises(UserError, match=r"partial_rotary_factor is not supported; supported: 1\.0"):
        read_spec(config | {"model_type": "llama"})


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "scaling", [{}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"mscale": 0.7}, {"attention_factor": 2}]
)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_magnitudes_of_yarn_equal_transformers(scaling: dict[str, Any], family: str, tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = YARN | scaling
    config = AutoConfig.for_model(family, **(BASE | CHANGES[family] | {"rope_parameters": rope}))
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    spec = read_spec(config.to_dict())
    assert attention_scaling(spec.rope) == pytest.approx(factor)
    if family == "deepseek_v3":
        sharpened = 1 + 0.1 * scaling.get("mscale_all_dim", 0) * 3.6888794541139363  # ln 40
        assert spec.attention_scale == pytest.approx(24**-0.5 * sharpened**2)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "mistral", "qwen2", "qwen3")])
def test_compression_refuses_what_only_the_runtime_serves(family: str, tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model", family, **CHANGES[family])
    spec = read_spec(Checkpoint.open(directory).config)
    message = f"does not support model_type '{family}'; supported: llama, mistral, qwen2, qwen3$"
    with pytest.raises(UserError, match=f"^x: compression {message}"):
        require_llama_blocks(spec, "compression", "x")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {directory}\noutput: {tmp_path / 'out'}\nstages:\n  - quantize: {{method: rtn, bits: 4}}\n"
    )
    with pytest.raises(UserError, match=message):
        plan(load_recipe(recipe))
