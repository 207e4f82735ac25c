"""Formats of the cache: what they cost in accuracy, the checkpoint's scales, and that company still does not matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UserError
from compress.kernels.kv import is_static
from compress.runtime.cache import cache_bytes_per_token, cache_formats
from compress.runtime.engine import Engine, SamplingParams
from compress.runtime.models.model import CacheLayout
from tests.tiny import tiny_model

SCORING = SamplingParams(max_tokens=12, prompt_logprobs=0, logprobs=0, ignore_eos=True)
PROMPTS = [[2 + i * j % 250 for i in range(1, 60)] for j in (3, 7, 11, 19)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


def prompt_logprobs(engine: Engine) -> torch.Tensor:
    """Of all prompts, fed in chunks of a few tokens, so that what is read was stored before."""
    found = [one.prompt_logprobs for one in engine.generate(PROMPTS, SCORING)]
    return torch.tensor([one.chosen for each in found if each for one in each[1:] if one])


@pytest.mark.parametrize(
    ("kv_dtype", "bound"),
    [("bfloat16", 0.05), ("float16", 0.01), ("int8", 0.1), ("fp8", 0.5), ("bfloat16:fp8", 0.5), ("fp8:int8", 0.5)],
)
def test_narrow_caches_stay_near_the_wide_one(directory: Path, kv_dtype: str, bound: float) -> None:
    """Mean error of log-probabilities whose own spread is about 5; not zero, or nothing was narrowed."""
    wide = prompt_logprobs(Engine.load(directory, max_batched_tokens=16))
    engine = Engine.load(directory, max_batched_tokens=16, kv_dtype=kv_dtype)
    error = (prompt_logprobs(engine) - wide).abs().mean()
    assert 0 < error < bound
    names = (kv_dtype.split(":")[0], kv_dtype.split(":")[-1])
    cache = engine.executor.cache.layers
    assert (cache.keys[0].dtype, cache.values[0].dtype) == cache_formats(kv_dtype, {}, torch.float32)
    assert [scales is not None for scales in (cache.key_scales, cache.value_scales)] == [
        name in ("int8", "fp8") for name in names
    ]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8", "float16:int8"])
def test_company_does_not_matter_in_narrow_caches(directory: Path, kv_dtype: str) -> None:
    """To the bit: prefix sharing, copies of quantized pages and their scales, preemption."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, logprobs=1, ignore_eos=True)
    alone = Engine.load(directory, kv_dtype=kv_dtype, prefix_caching=False)
    small = Engine.load(directory, kv_dtype=kv_dtype, max_tokens_in_cache=160, max_batched_tokens=37)
    forks = small.fork(PROMPTS[0][:21], params, 3)
    others = [small.add(PROMPTS[0][:40], params), small.add(PROMPTS[1], params)]
    while small.scheduler.busy:
        small.step()
        small.scheduler.check()
    assert small.stats.preemptions > 0
    for request, sample in zip([*forks, *others], [0, 1, 2, 0, 0], strict=True):
        expected = alone.add(request.token_ids[: request.prompt_length], params, sample)
        while alone.scheduler.busy:
            alone.step()
        assert (request.generated, request.logprobs) == (expected.generated, expected.logprobs)


def with_scales(source: Path, target: Path, key: float, value: float) -> Path:
    """The checkpoint with a scale of keys and of values in each layer."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([key])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([value, value * 1.5])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_the_scales_of_a_checkpoint_are_used(directory: Path, tmp_path: Path) -> None:
    wide = prompt_logprobs(Engine.load(directory, max_batched_tokens=16))
    good = with_scales(directory, tmp_path / "good", 0.2, 0.2)
    engine = Engine.load(good, max_batched_tokens=16, kv_dtype="fp8")
    cache = engine.executor.cache.layers
    assert cache.key_scales is not None
    assert cache.value_scales is not None
    assert is_static(cache.key_scales[1])
    assert cache.value_scales[1][0, 0].tolist() == pytest.approx([0.2, 0.3])
    assert (prompt_logprobs(engine) - wide).abs().mean() < 0.5
    clipped = Engine.load(with_scales(directory, tmp_path / "bad", 1e-4, 0.2), max_batched_tokens=16, kv_dtype="fp8")
    assert (prompt_logprobs(clipped) - wide).abs().mean() > 0.5, "scales that are too small clip"


def test_a_checkpoint_that_states_its_cache_gets_it(directory: Path, tmp_path: Path) -> None:
    """As compressed-tensors states it; `kv_dtype` overrides."""
    scaled = with_scales(directory, tmp_path / "model", 0.2, 0.2)
    config = json.loads((scaled / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    group = {
        "targets": ["re:.*nothing"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "kv_cache_scheme": scheme,
        "config_groups": {"group_0": group},
    }
    (scaled / "config.json").write_text(json.dumps(config))
    engine = Engine.load(scaled)
    assert engine.executor.cache.layers.keys[0].dtype == torch.float8_e4m3fn
    assert Engine.load(scaled, kv_dtype="float32").executor.cache.layers.key_scales is None


def test_scales_of_a_wrong_size_are_refused(directory: Path, tmp_path: Path) -> None:
    broken = with_scales(directory, tmp_path / "model", 0.2, 0.2)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.ones(3)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.k_scale has 3 numbers; accepted: 1, or 2"):
        Engine.load(broken, kv_dtype="fp8")


def test_formats_by_name_by_checkpoint_and_by_default() -> None:
    config = json.loads('{"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}')
    fp8 = torch.float8_e4m3fn
    assert cache_formats(None, {}, torch.bfloat16) == (torch.bfloat16, torch.bfloat16)
    assert cache_formats(None, config, torch.bfloat16) == (fp8, fp8)
    config["quantization_config"]["kv_cache_scheme"] |= {"num_bits": 4}
    with pytest.raises(UserError, match=r"kv_cache_scheme .* is not supported; supported: 8 bits"):
        cache_formats(None, config, torch.bfloat16)
    assert cache_formats("float32", config, torch.bfloat16) == (torch.float32, torch.float32)
    assert cache_formats("bfloat16:fp8", {}, torch.float32) == (torch.bfloat16, fp8)
    for name in ("fp16", "fp8:fp8:fp8", "", "int8:"):
        with pytest.raises(
            UserError, match=r"kv_dtype: .* is not a format; accepted: float32, bfloat16, float16, int8"
        ):
            cache_formats(name, {}, torch.float32)


def test_bytes_count_scales() -> None:
    layout = [CacheLayout(kv_heads=2, key_dim=16, value_dim=16)] * 3
    assert cache_bytes_per_token(layout, (torch.float32, torch.bfloat16)) == 3 * 2 * (64 + 32)
    assert cache_bytes_per_token(layout, (torch.int8, torch.bfloat16)) == 3 * 2 * (16 + 4 + 32)
