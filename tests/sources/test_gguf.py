"""A GGUF file becomes the checkpoint that it was written from, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.arch import read_spec
from compress.checkpoint import Checkpoint, check_tensors, write_checkpoint
from compress.errors import UserError
from compress.rope import Rope, inverse_frequencies
from compress.sources import resolve, resolve_config
from compress.sources.gguf import unpermute
from tests.gguf_files import permute, write_gguf
from tests.tiny import tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors(head_dim: int = 16) -> np.ndarray:
    scaled = inverse_frequencies(Rope(10000.0, "llama3", 8.0, 8192, 1.0, 4.0), head_dim)
    return (inverse_frequencies(Rope(10000.0), head_dim) / scaled).float().numpy()


def logits(path: Path) -> torch.Tensor:
    ids = torch.arange(40)[None] * 5 % 256
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_conversion_gives_back_the_model(family: str, changes: dict, tmp_path: Path):
    """Rows 9 and 11: rows unpermuted, biases, norms and head_dim kept: bit-equal tensors and logits."""
    original = tiny_model(tmp_path / "source", family, **changes)
    source = resolve(str(write_gguf(tmp_path / "tiny.gguf", original)), tmp_path / "cache")
    before, after = Checkpoint.open(original), Checkpoint.open(source.path)
    tied = before.config["tie_word_embeddings"]
    assert after.config["tie_word_embeddings"] is tied
    assert set(after.names) == set(before.names)
    check_tensors(after, read_spec(after.config))
    for name in before.names:
        assert torch.equal(after.read(name), before.read(name)), name
    assert torch.equal(logits(source.path), logits(original))
    assert resolve_config(str(tmp_path / "tiny.gguf")) == after.config


def test_sidecars_of_the_conversion(tmp_path: Path):
    template = "{{ messages[0]['content'] }}"
    file = write_gguf(
        tmp_path / "tiny.gguf",
        tiny_model(tmp_path / "source"),
        settings={"tokenizer.chat_template": template},
    )
    path = resolve(str(file), tmp_path / "cache").path
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("Año 2024 é").input_ids) == "Año 2024 é"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (0, 1, 512)
    assert json.loads((path / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [1, 2]}
    source = json.loads((path / "source.json").read_text())
    assert (source["source"], source["license"], source["name"]) == ("tiny.gguf", "apache-2.0", "tiny")
    assert source["stored"] == {"F32": Checkpoint.open(path).total_bytes}


@pytest.mark.parametrize(
    ("matrices", "scale", "dtype"),
    [
        (GGMLQuantizationType.F32, 1.0, torch.float32),
        (GGMLQuantizationType.BF16, 1.0, torch.bfloat16),
        (GGMLQuantizationType.F16, 1.0, torch.float16),
        (GGMLQuantizationType.Q8_0, 1.0, torch.float16),
        (GGMLQuantizationType.Q8_0, 1e6, torch.bfloat16),  # beyond float16's 65504
    ],
)
def test_stored_dtype_holds_the_values(matrices, scale: float, dtype: torch.dtype, tmp_path: Path):
    plain = Checkpoint.open(tiny_model(tmp_path / "plain"))
    original = tmp_path / "source"
    write_checkpoint(original, {name: plain.read(name) * scale for name in plain.names}, plain.config, None)
    path = resolve(str(write_gguf(tmp_path / "tiny.gguf", original, matrices=matrices)), tmp_path / "cache").path
    before, after = Checkpoint.open(original), Checkpoint.open(path)
    assert after.config["dtype"] == str(dtype).removeprefix("torch.")
    # half a step of an int8 block, or of the stored type, of the largest value
    bound = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-7}[dtype]
    bound += 2**-7 if matrices == GGMLQuantizationType.Q8_0 else 0
    for name in before.names:
        wanted, stored = before.read(name), after.read(name)
        assert stored.dtype == dtype
        assert (stored.float() - wanted).abs().max() <= bound * wanted.abs().max()


def test_unpermute_inverts_the_converter():
    rows = torch.randn(48, 5)
    assert not torch.equal(permute(rows, 3), rows)
    assert torch.equal(unpermute(permute(rows, 3), 3), rows)


def test_llama3_rope_factors_become_rope_parameters(tmp_path: Path):
    """Row 13: a dropped rope scaling gives no error, only wrong text."""
    original = tiny_model(tmp_path / "source", rope_parameters=LLAMA3)
    file = write_gguf(tmp_path / "tiny.gguf", original, rope_factors=llama3_factors())
    path = resolve(str(file), tmp_path / "cache").path
    assert Checkpoint.open(path).config["rope_parameters"] == LLAMA3
    assert torch.equal(logits(path), logits(original))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported; supported: none"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8 differs from head_dim 16"),
        ({"split.count": 3}, "one part of a split GGUF"),
    ],
)
def test_what_changes_the_mathematics_is_refused(settings: dict, message: str, tmp_path: Path):
    """Row 13: by name, and before any weights are read."""
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "source"), settings=settings)
    for action in (resolve, resolve_config):
        with pytest.raises(UserError, match=message) as error:
            action(str(file), tmp_path / "cache")
        assert "\n" not in str(error.value)


def test_other_rope_factors_are_refused(tmp_path: Path):
    factors = llama3_factors()
    factors[3] *= 1.1
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "source"), rope_factors=factors)
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not Llama 3's rope scaling"):
        resolve(str(file), tmp_path / "cache")


def test_unsupported_architecture_lists_the_supported(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "source"), architecture="gemma2")
    with pytest.raises(UserError, match="'gemma2' is not supported; supported: llama, qwen2, qwen3"):
        resolve(str(file), tmp_path / "cache")


def test_unknown_tensor_is_refused(tmp_path: Path):
    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))

    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "source"), change=change)
    with pytest.raises(UserError, match=r"'blk\.0\.attn_sinks\.weight' has no place"):
        resolve(str(file), tmp_path / "cache")


@pytest.mark.parametrize("keep", [6, 300, -64])
def test_truncated_file(keep: int, tmp_path: Path):
    """Row 18."""
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "source"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"truncated|damaged|version") as error:
        resolve(str(file), tmp_path / "cache")
    assert "\n" not in str(error.value)
