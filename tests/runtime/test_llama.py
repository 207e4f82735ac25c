"""Logits, paged decoding and greedy tokens of every family against transformers' eager float32 forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.quant.scheme import Scheme
from compress.runtime.engine import Completion, Engine, SamplingParams
from tests.runtime.agreement import quantized_error
from tests.tiny import tiny_model

BOUND = 1e-4  # logits reach 12; the largest difference seen is 1.9e-5

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "qwen2-biases": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Any]:
    family, changes = CASES[request.param]
    directory = tiny_model(tmp_path_factory.mktemp(request.param), family, **changes)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return Engine.load(directory), reference


def prompts(count: int, length: int) -> torch.Tensor:
    return torch.randint(2, 256, (count, length), generator=torch.Generator().manual_seed(1))


def test_logits_equal_transformers(case: tuple[Engine, Any]) -> None:
    """Rows 9 (biases), 11 (head_dim), 13 (rope scaling past the original 32 positions)."""
    engine, reference = case
    ids_BS = prompts(2, 128)
    with torch.no_grad():
        expected = reference(ids_BS).logits
    assert (engine.logits(engine.hidden_states(ids_BS)) - expected).abs().max() < BOUND
    assert (engine.logits(engine.hidden_states(ids_BS[0])) - expected[0]).abs().max() < BOUND


def decode_error(engine: Engine, completion: Completion) -> float:
    """Largest difference between the log-probabilities of decoding and of one pass over the whole text."""
    assert completion.logprobs is not None
    text = torch.tensor(completion.prompt_ids + completion.token_ids)
    full_SV = torch.log_softmax(engine.logits(engine.hidden_states(text[:-1])), -1)
    rows_SV = full_SV[len(completion.prompt_ids) - 1 :]
    steps = zip(rows_SV, completion.token_ids, completion.logprobs, strict=True)
    return max(abs(float(row_V[token]) - step.chosen) for row_V, token, step in steps)


def test_decoding_equals_transformers_and_one_pass(case: tuple[Engine, Any]) -> None:
    """Greedy tokens equal generate()'s, and every step's log-probability equals the full pass's (row 22)."""
    engine, reference = case
    ids_BS = prompts(3, 70)
    batch = [ids_BS[0].tolist(), ids_BS[1, :33].tolist(), ids_BS[2, :5].tolist()]
    completions = engine.generate(batch, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0))
    for prompt, completion in zip(batch, completions, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert decode_error(engine, completion) < BOUND


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_checkpoints_are_widened(dtype: str, tmp_path: Path) -> None:
    """Row 21: stored in 16 bits, computed in float32 on a CPU."""
    directory = tiny_model(tmp_path, dtype=dtype)
    engine = Engine.load(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    ids_BS = prompts(1, 40)
    with torch.no_grad():
        expected = reference(ids_BS).logits
    assert (engine.logits(engine.hidden_states(ids_BS)) - expected).abs().max() < BOUND


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixed", [False, True])
def test_quantized_checkpoints_equal_their_dequantized_weights(
    mixed: bool, scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows 9 and 21: biases once, scales of any dtype, one scheme for all or several side by side in one product."""
    source = tiny_model(tmp_path / "source", "qwen2")
    schemes = [Scheme(4, 32, False), Scheme(8, 16, True), Scheme(4, 64, True)][: 3 if mixed else 1]
    assert quantized_error(source, tmp_path, schemes, scale_dtype) < BOUND


def test_weight_bytes_count_a_tied_head_once(tmp_path: Path) -> None:
    untied = Engine.load(tiny_model(tmp_path / "untied")).weight_bytes
    tied = Engine.load(tiny_model(tmp_path / "tied", tie_word_embeddings=True)).weight_bytes
    assert untied - tied == 256 * 64 * 4
    # 256 × 64 twice; two blocks of q, o 64², k, v 64 × 32, three of 64 × 192, two norms; one norm
    blocks = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64)
    assert untied == 4 * (2 * 256 * 64 + blocks + 64)


@pytest.mark.parametrize("head_dim", [16, 20])
def test_a_cache_of_16_bits_loses_little(head_dim: int, tmp_path: Path) -> None:
    """16 is for the compiled kernels, 20 for the reference."""
    directory = tiny_model(tmp_path, head_dim=head_dim)
    prompt = prompts(1, 40)[0].tolist()
    params = SamplingParams(max_tokens=1, logprobs=0)
    done = [Engine.load(directory, kv_dtype=form).generate([prompt], params)[0] for form in (None, "bfloat16")]
    wide, narrow = ((completion.logprobs or [])[0].chosen for completion in done)
    assert 0 < abs(wide - narrow) < 0.1
