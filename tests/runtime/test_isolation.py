"""A request whose numbers are not finite spoils its own answer alone: 0 times a NaN that lies in the cache is a NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compress.kernels.dispatch import force
from compress.runtime.engine import Completion, Engine, SamplingParams
from tests.tiny import tiny_model

BROKEN = 200  # a token whose embedding is not finite
GOOD = [[i % 150 + 2 for i in range(length)] for length in (90, 7, 33)]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "window": ("mistral", {"sliding_window": 20, "head_dim": 16}),
    "full-20": ("llama", {"head_dim": 20}),  # not a compiled kernel's width
    "window-20": ("mistral", {"sliding_window": 20, "head_dim": 20}),
    "latents": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 28,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
        },
    ),
}


def broken_model(directory: Path, family: str, value: float) -> Path:
    name, changes = FAMILIES[family]
    tiny_model(directory, name, **changes)
    file = next(directory.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][BROKEN] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def answers(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias={BROKEN: -100.0})
    return engine.generate(prompts, params)


def assert_same(ours: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.token_ids == other.token_ids
        for score, known in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert math.isfinite(known.chosen)
            assert abs(score.chosen - known.chosen) < 1e-4


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_request_spoils_no_other(family: str, value: float, path: str, tmp_path: Path) -> None:
    source = broken_model(tmp_path, family, value)
    bad = [BROKEN] + [3] * 40
    with force(path):
        alone = [answers(Engine.load(source, max_tokens_in_cache=1024), [prompt])[0] for prompt in GOOD]
        assert_same(answers(Engine.load(source, max_tokens_in_cache=1024), [bad, *GOOD])[1:], alone)
        engine = Engine.load(source, max_tokens_in_cache=1024)
        answers(engine, [bad])
        assert_same(answers(engine, GOOD), alone)


def test_values_beyond_float16_are_the_largest_in_its_cache(tmp_path: Path) -> None:
    """An infinity would make every later answer with the same prefix a NaN."""
    tiny_model(tmp_path, "llama", head_dim=16)
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("v_proj.weight"):
            tensors[name] *= 1e6
        if name.endswith("o_proj.weight"):
            tensors[name] *= 1e-6
    save_file(tensors, file, metadata={"format": "pt"})
    for path in ("auto", "reference"):
        with force(path):
            for completion in answers(Engine.load(tmp_path, kv_dtype="float16"), GOOD):
                assert all(math.isfinite(score.chosen) for score in completion.logprobs or [])
