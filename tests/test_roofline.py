"""Rooflines against published parameter counts and numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from compress.arch import HEAD, ModelSpec, read_spec
from compress.errors import UserError
from compress.quant.scheme import Scheme
from compress.roofline import (
    HARDWARE,
    Hardware,
    attention_flops,
    find_hardware,
    kv_bytes_per_token,
    measure_cpu,
    parameters,
    predict,
    prefill_flops,
    stored_weight_bytes,
    uniform,
    weight_bytes_per_step,
)
from tests.published import LLAMA_2_13B, LLAMA_31_8B, MIXTRAL_8X7B, QWEN_25_7B, SMOLLM2_135M

W4 = Scheme(4, 128, True)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_31_8B, 8_030_261_248),
        (LLAMA_2_13B, 13_015_864_320),
        (QWEN_25_7B, 7_615_616_512),
        (SMOLLM2_135M, 134_515_008),
    ],
)
def test_parameters_equal_the_published_counts(config: dict[str, Any], published: int) -> None:
    """The totals that the hub shows for these checkpoints, to the last parameter."""
    assert parameters(read_spec(config)) == published


@pytest.mark.parametrize(("config", "kib"), [(LLAMA_31_8B, 128), (LLAMA_2_13B, 800), (QWEN_25_7B, 56)])
def test_kv_cache_per_token(config: dict[str, Any], kib: int) -> None:
    assert kv_bytes_per_token(read_spec(config)) == kib * 1024


@pytest.mark.parametrize(
    ("scheme", "batch", "gigabytes"), [(None, 1, 15.28), (W4, 1, 4.92), (None, 32, 23.60), (W4, 32, 13.24)]
)
def test_bytes_of_a_decode_step(scheme: Scheme | None, batch: int, gigabytes: float) -> None:
    """Llama-3.1-8B at 2048 tokens of context, head in 16 bits: weights 13.96 or 3.60, head 1.05, KV 0.27 a sequence."""
    spec = read_spec(LLAMA_31_8B)
    step = predict(spec, uniform(spec, scheme), HARDWARE["h100"], batch, 2048)
    assert step.bytes_per_step == pytest.approx(gigabytes * 1e9, abs=0.006e9)


def test_four_bits_are_not_four_times_faster() -> None:
    spec = read_spec(LLAMA_31_8B)
    dense = predict(spec, {}, HARDWARE["h100"], 1, 2048)
    four = predict(spec, uniform(spec, W4), HARDWARE["h100"], 1, 2048)
    assert dense.tpot_ms / four.tpot_ms == pytest.approx(3.1, abs=0.05)
    assert dense.tpot_ms == pytest.approx(15.28 / 3.35, abs=0.01)


def test_tied_head_is_read_but_stored_once() -> None:
    spec = read_spec(SMOLLM2_135M)
    norms = (2 * spec.layers + 1) * spec.hidden
    assert stored_weight_bytes(spec, {}) == weight_bytes_per_step(spec, {}) == 2 * parameters(spec)
    untied = read_spec(SMOLLM2_135M | {"tie_word_embeddings": False})
    assert stored_weight_bytes(untied, {}) - weight_bytes_per_step(untied, {}) == 2 * spec.vocab * spec.hidden
    eight = weight_bytes_per_step(spec, dict.fromkeys(spec.linears(), Scheme(8, None, True)))
    one_scale_a_row = sum(2 * rows for rows, _ in spec.linears().values())
    assert eight == pytest.approx((parameters(spec) - norms) + one_scale_a_row + 2 * norms)


def toy(bandwidth: float, flops: float) -> Hardware:
    return Hardware("toy", bandwidth, flops, 1e9, "made up")


def test_bound_changes_from_memory_to_compute_with_the_batch() -> None:
    """Each weight is read once and multiplied once a sequence: the bounds meet where batch · 2 FLOPs / 2 bytes do."""
    spec = read_spec(SMOLLM2_135M)
    hardware = toy(bandwidth=1e9, flops=16e9)
    bounds = {batch: predict(spec, {}, hardware, batch, 1).bound for batch in (1, 8, 32, 128)}
    assert bounds == {1: "memory", 8: "memory", 32: "compute", 128: "compute"}
    assert not predict(spec, {}, hardware, 4096, 2048).fits


def test_a_step_reads_the_experts_that_its_tokens_go_to() -> None:
    """Mixtral 8x7B: 46.7 · 10⁹ parameters, of which a token meets 12.9 (arXiv 2401.04088)."""
    spec = read_spec(MIXTRAL_8X7B)
    assert spec.experts is not None
    assert [spec.experts.touched(tokens) for tokens in (1, 2)] == [0.25, 1 - 0.75**2]
    assert parameters(spec) == pytest.approx(46.7e9, rel=1e-3)
    embedding = spec.vocab * spec.hidden
    assert weight_bytes_per_step(spec, {}, tokens=1) / 2 + embedding == pytest.approx(12.9e9, rel=2e-3)
    assert weight_bytes_per_step(spec, {}) == 2 * (parameters(spec) - embedding)
    assert stored_weight_bytes(spec, {}) == 2 * parameters(spec)
    one, many = (predict(spec, {}, HARDWARE["h100"], batch, 128) for batch in (1, 64))
    assert one.bytes_per_step < 26e9 < 93e9 < many.bytes_per_step
    # two FLOPs for each parameter that a token meets
    assert prefill_flops(spec, 100) / 200 == pytest.approx(12.9e9 - 2 * embedding, rel=0.01)


def test_windows_cap_the_cache() -> None:
    spec = read_spec({**LLAMA_31_8B, "model_type": "mistral", "sliding_window": 512})
    short, long = (predict(spec, {}, HARDWARE["h100"], 1, context).bytes_per_step for context in (512, 4096))
    assert short == long
    seen = sum(min(position, 512) for position in range(1, 4097))
    assert attention_flops(spec, 4096) == 4 * spec.heads * spec.head_dim * spec.layers * seen


def test_prefill_counts_the_head_once() -> None:
    spec: ModelSpec = read_spec(LLAMA_31_8B)
    head = spec.vocab * spec.hidden
    linears = sum(rows * columns for name, (rows, columns) in spec.linears().items() if name != HEAD)
    flops = 2 * linears * 1024 + 2 * head + attention_flops(spec, 1024)
    hardware = toy(bandwidth=1e15, flops=1e12)
    assert predict(spec, {}, hardware, 1, 1024).prefill_ms == pytest.approx(1e3 * flops / 1e12)


def test_unknown_hardware_names_the_known() -> None:
    with pytest.raises(UserError, match=r"'h10O' is not known; known: a100, .*cpu; did you mean 'h100'\?"):
        find_hardware("h10O")


def test_this_cpu_is_measured_within_reason() -> None:
    """Between a slow single core and the fastest servers: catches a wrong unit."""
    cpu = measure_cpu()
    assert 1e9 < cpu.bandwidth < 2e12
    assert 1e9 < cpu.flops < 2e13
    assert 1e9 < cpu.memory < 1e14
