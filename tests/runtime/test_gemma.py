"""Gemma-2 and 3: windows by layer, soft caps, norms by 1 + w, four norms a block, scaled embeddings, two ropes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.arch import read_spec
from compress.checkpoint import Checkpoint, read_config
from compress.errors import UserError
from compress.quant.scheme import Scheme
from compress.runtime.models.load import load_model
from tests.runtime.agreement import BOUND, Pair, prompts, quantized_error, ragged
from tests.tiny import tiny_model

GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16, "num_hidden_layers": 4}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 30.0}  # row 13: a cap that bites
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", GEMMA),
    "gemma2-caps": ("gemma2", GEMMA | CAPS),
    "gemma2-tied-biases": ("gemma2", GEMMA | {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma2-no-caps": ("gemma2", GEMMA | dict.fromkeys(CAPS)),
    "gemma3": ("gemma3_text", GEMMA | {"sliding_window_pattern": 3}),
    "gemma3-ropes": ("gemma3_text", GEMMA | {"sliding_window_pattern": 2, "rope_parameters": ROPES}),
    "gemma3-logit-cap": ("gemma3_text", GEMMA | {"sliding_window_pattern": 3, "final_logit_softcapping": 5.0}),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, changes = CASES[request.param]
    return Pair.load(tiny_model(tmp_path_factory.mktemp(request.param), family, **changes))


def test_logits_equal_transformers(pair: Pair) -> None:
    assert pair.full_error(prompts(2, 128)) < BOUND


def test_decoding_from_the_cache_equals_transformers(pair: Pair) -> None:
    """Windows of 16 are shorter than the longest prompts."""
    assert pair.cached_error(ragged(), tokens=20) < BOUND


def config_of(directory: Path, family: str, **changes: Any) -> dict[str, Any]:
    return json.loads((tiny_model(directory, family, **(GEMMA | changes)) / "config.json").read_text())


def test_windows_and_ropes_follow_the_layer(tmp_path: Path) -> None:
    spec = read_spec(config_of(tmp_path, "gemma3_text", sliding_window_pattern=3, rope_parameters=ROPES))
    assert spec.windows == (16, 16, None, 16)
    assert spec.local_rope is not None
    assert (spec.rope.theta, spec.rope.kind, spec.rope.factor) == (1e6, "linear", 8.0)
    assert (spec.local_rope.theta, spec.local_rope.kind) == (100.0, "default")


def test_old_and_new_spellings_agree(tmp_path: Path) -> None:
    """transformers 4 writes two bases and one scaling, which is of the layers without a window, and no layer types."""
    config = config_of(tmp_path, "gemma3_text", sliding_window_pattern=3, rope_parameters=ROPES)
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert read_spec(old | {"sliding_window_pattern": 3}) == read_spec(config)


def test_absent_keys_mean_what_transformers_takes_for_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma2")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "layer_types"):
        del config[key]
    spec = read_spec(config)
    assert (spec.attention_cap, spec.logit_cap, spec.attention_scale) == (50.0, 30.0, 1 / 16)
    assert spec.windows == (16, None, 16, None)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; supported: gelu_pytorch"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported for gemma2"),
        # transformers reads it and does nothing with it, so there is nothing to be equal to
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported for gemma3_text"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window must be a positive integer, not None"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, not 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, family)
    with pytest.raises(UserError, match=message):
        read_spec(config | change)


def test_quantized_linears_equal_their_dequantized_weights(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "gemma3_text", **GEMMA)
    assert quantized_error(source, tmp_path, [Scheme(4, 16, False), Scheme(8, 16, True)], torch.float16) < BOUND


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_embeddings_are_scaled_in_the_dtype_of_the_computation(family: str, tmp_path: Path) -> None:
    """√96 is 9.797959 in float32 and 9.8125 in bfloat16, which transformers multiplies by."""
    changes: dict[str, Any] = GEMMA | {"hidden_size": 96}
    directory = tiny_model(tmp_path, family, **changes)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(Checkpoint.open(directory), read_spec(read_config(directory)), torch.device("cpu"), dtype)
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).get_input_embeddings()
        ids_T = torch.arange(40)
        assert torch.equal(model.inputs(ids_T, ids_T).embedded_TC, reference(ids_T))


def no_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a model without blocks attends to nothing")
