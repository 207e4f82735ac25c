"""Dense DeepSeek: latent attention with the key's and value's weights absorbed, over a cache of latents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch import read_spec
from compress.errors import UserError
from compress.kernels.dispatch import prepare_linear
from compress.quant.scheme import Scheme
from compress.runtime.engine import Engine, SamplingParams
from compress.runtime.models.mla import HeadsOnCPU, HeadsOnGPU
from tests.runtime.agreement import BOUND, Pair, prompts, quantized_error, ragged
from tests.tiny import tiny_model

MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 2,
    "rms_norm_eps": 1e-2,  # not that of the latents' norms
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", MLA),
    "v2-no-query-rank": ("deepseek_v2", MLA | {"q_lora_rank": None}),
    "v2-biases": ("deepseek_v2", MLA | {"attention_bias": True, "mlp_bias": True}),
    "v2-yarn": ("deepseek_v2", MLA | {"rope_parameters": YARN}),
    "v3": ("deepseek_v3", MLA),
    "v3-yarn": ("deepseek_v3", MLA | {"rope_parameters": YARN}),
    "v3-halves": ("deepseek_v3", MLA | {"rope_interleave": False}),
    "v3-odd-rank": ("deepseek_v3", MLA | {"kv_lora_rank": 7, "q_lora_rank": 5}),  # not a compiled kernel's width
    "v3-wide-rank": ("deepseek_v3", MLA | {"kv_lora_rank": 256}),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, changes = CASES[request.param]
    return Pair.load(tiny_model(tmp_path_factory.mktemp(request.param), family, **changes))


def test_logits_equal_transformers(pair: Pair) -> None:
    assert pair.full_error(prompts(2, 128)) < BOUND


def test_decoding_from_the_cache_equals_transformers(pair: Pair) -> None:
    assert pair.cached_error(ragged(), tokens=20) < BOUND


def test_the_cache_holds_a_latent_and_a_rotated_key_for_each_token(tmp_path: Path) -> None:
    engine = Engine.load(tiny_model(tmp_path, "deepseek_v3", **MLA), max_tokens_in_cache=64)
    assert engine.executor.cache.layers.nbytes == 2 * 64 * (32 + 16) * 4
    assert engine.spec.cached_numbers == engine.executor.model.cache_layout[0].numbers == 48


@pytest.mark.parametrize("rank", [32, 7])
def test_a_cache_of_16_bits_loses_little(rank: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = MLA | {"kv_lora_rank": rank}
    directory = tiny_model(tmp_path, "deepseek_v3", **changes)
    prompt = prompts(1, 40)[0].tolist()
    params = SamplingParams(max_tokens=1, logprobs=0)
    done = [Engine.load(directory, kv_dtype=form).generate([prompt], params)[0] for form in (None, "bfloat16")]
    wide, narrow = ((completion.logprobs or [])[0].chosen for completion in done)
    assert 0 < abs(wide - narrow) < 0.1


def logprobs(engine: Engine, batch: list[list[int]]) -> list[list[float]]:
    done = engine.generate(batch, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0))
    return [[step.chosen for step in completion.logprobs or []] for completion in done]


def test_a_request_is_the_same_bits_alone_and_in_company(tmp_path: Path) -> None:
    """With a width that the compiled attention takes; chunks of 7 tokens too."""
    directory = tiny_model(tmp_path, "deepseek_v3", **MLA)
    batch = ragged()
    together = logprobs(Engine.load(directory), batch)
    engine = Engine.load(directory, max_batched_tokens=7, page_size=1)
    assert together == [logprobs(engine, [prompt])[0] for prompt in batch]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": 1}, "first_k_dense_replace 1 leaves layers with experts.*supported: 2 "),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not num_attention_heads 4"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 is odd"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, not 0"),
        ({"q_lora_rank": -1}, "q_lora_rank must be a positive integer, not -1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((tiny_model(tmp_path, "deepseek_v3", **MLA) / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        read_spec(config | change)


def test_heads_in_one_product_and_one_by_one() -> None:
    """What a GPU multiplies at once, a CPU multiplies head by head."""
    generator = torch.Generator().manual_seed(0)
    weight_HOI, x_THI = torch.randn(4, 20, 32, generator=generator), torch.randn(5, 4, 32, generator=generator)
    linears = tuple(prepare_linear([w_OI], [None], torch.device("cpu"), torch.float32) for w_OI in weight_HOI)
    one_by_one, together = HeadsOnCPU(linears), HeadsOnGPU(weight_HOI.mT.contiguous())
    assert one_by_one.nbytes == together.nbytes
    expected_THO = torch.einsum("thi,hoi->tho", x_THI.double(), weight_HOI.double())
    for heads in (one_by_one, together):
        assert (heads(x_THI) - expected_THO).abs().max() < 1e-5


def test_absorbed_weights_are_counted_once(tmp_path: Path) -> None:
    """All weights as stored: kv_b_proj is held as its two halves."""
    engine = Engine.load(tiny_model(tmp_path, "deepseek_v3", **MLA))
    stored = sum(4 * torch.Size(shape).numel() for shape in engine.spec.tensors().values())
    assert engine.weight_bytes == stored


def test_quantized_linears_equal_their_dequantized_weights(tmp_path: Path) -> None:
    changes: dict[str, Any] = MLA | {"q_lora_rank": 32}
    source = tiny_model(tmp_path / "source", "deepseek_v3", **changes)
    assert quantized_error(source, tmp_path, [Scheme(4, 16, False), Scheme(8, 16, True)], torch.float16) < BOUND
