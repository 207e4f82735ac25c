"""The block's forward pass equals Hugging Face's, for every family and switch, on ragged sequences without padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.arch import block_prefix, read_spec
from compress.block import BlockForward
from compress.checkpoint import Checkpoint
from compress.errors import UserError
from tests.tiny import tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama mha, biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn rope": ("llama", {"rope_parameters": YARN}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral, window 16": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, window in layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3, head_dim 32": ("qwen3", {"head_dim": 32}),
    "llama, head_dim 32": ("llama", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_hugging_face(tmp_path: Path, case: str) -> None:
    """Rows 9, 11 and 13. Bound: 1e-4 of values of order ten; a dropped bias or rope scaling moves them by > 0.1."""
    family, changes = CASES[case]
    directory = tiny_model(tmp_path / "model", family, **changes)
    checkpoint = Checkpoint.open(directory)
    spec = read_spec(checkpoint.config)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    lengths = [128, 128, 40, 7]
    ids = torch.randint(0, 256, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    hidden = model.get_input_embeddings()(ids).detach()
    for index in range(spec.layers):
        forward = BlockForward(spec, index)
        weights = {name: checkpoint.read(block_prefix(index) + name) for name in spec.block_tensors()}
        x = forward.attention_input(hidden, weights)
        hidden = forward.after_attention(hidden, forward.attention_output(x, weights, lengths), weights)
        gated = forward.mlp_output(forward.mlp_input(hidden, weights), weights)
        hidden = forward.after_mlp(hidden, gated, weights)
    ours = hidden.split(lengths)
    with torch.inference_mode():
        for ids_S, ours_SC in zip(ids.split(lengths), ours, strict=True):
            captured: list[torch.Tensor] = []
            handle = model.model.norm.register_forward_pre_hook(lambda _, args, into=captured: into.append(args[0][0]))
            model(ids_S[None])
            handle.remove()
            assert (captured[0] - ours_SC).abs().max() < 1e-4 * captured[0].abs().max()


def test_the_spec_lists_exactly_the_tensors_that_are_stored(tmp_path: Path) -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        checkpoint = Checkpoint.open(tiny_model(tmp_path / family, family))
        stored = {name: checkpoint.shape(name) for name in checkpoint.names}
        assert read_spec(checkpoint.config).tensors() == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "lama"},
            "model_type 'lama' is not supported; supported families: llama .*did you mean 'llama'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Rows 13 and 38: never guess the architecture."""
    config = json.loads((tiny_model(tmp_path / "model") / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        read_spec(config | change)


@pytest.mark.parametrize("nonsense", ["x", -1, 0, None, [1], {"a": 1}, 1.5, True, float("inf"), [[1]]])
def test_nonsense_in_a_config_is_refused_or_means_the_default(tmp_path: Path, nonsense: Any) -> None:
    """Row 38: whatever stands in a key, the answer is a spec or one line that names the key, never another error."""
    config = json.loads((tiny_model(tmp_path / "model") / "config.json").read_text())
    more = ("rope_scaling", "layer_types", "sliding_window", "max_window_layers", "rope_theta")
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        whole = config | {"model_type": family, "use_sliding_window": True, "sliding_window": 8}
        for key in [*config, *more]:
            refused_or_read(whole | {key: nonsense}, key)
    for key in ("rope_type", "factor", "original_max_position_embeddings", "attention_factor", "rope_theta"):
        scaling = {"rope_type": "yarn", "factor": 2.0}
        refused_or_read(config | {"rope_parameters": scaling | {key: nonsense}}, key.replace("rope_type", "rope type"))


def refused_or_read(config: dict[str, Any], key: str) -> None:
    told = ""
    try:
        spec = read_spec(config)
    except UserError as error:
        told = str(error)
    else:
        assert spec.head_dim % 2 == 0
        assert len(spec.windows) == spec.layers
    assert not told or any(name in told for name in (key, "num_attention_heads", "head_dim"))
    assert "\n" not in told


def test_old_and_new_spellings_of_a_config_agree(tmp_path: Path) -> None:
    config = json.loads((tiny_model(tmp_path / "model", rope_parameters=LLAMA3) / "config.json").read_text())
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old |= {"rope_theta": 10000.0, "rope_scaling": scaling, "torch_dtype": "float32"}
    assert read_spec(old) == read_spec(config)
