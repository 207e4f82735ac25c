"""Folding AWQ scales leaves the model's function as it was, for every tap and family (row 8)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch import TAPS, read_spec
from compress.block import BlockForward
from compress.blockwise import Block, Changes, HeadBlock, Walk
from compress.checkpoint import Checkpoint
from compress.flow import arrange
from compress.progress import Reporter
from compress.quant.scaling import fold, producer_scale, scale_tap
from compress.quant.scheme import Scheme
from tests.product import compressed, report_of
from tests.tiny import tiny_model

LENGTHS = [40, 40, 17]


def outputs(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    forward, weights = BlockForward(block.spec, block.index), block.weights
    x = forward.attention_input(hidden, weights)
    hidden = forward.after_attention(hidden, forward.attention_output(x, weights, LENGTHS), weights)
    gated = forward.mlp_output(forward.mlp_input(hidden, weights), weights)
    return forward.after_mlp(hidden, gated, weights)


def load_block(directory: Path) -> Block:
    checkpoint = Checkpoint.open(directory)
    spec = read_spec(checkpoint.config)
    names = spec.block_tensors()
    weights = {name: checkpoint.read(f"model.layers.0.{name}").float() for name in names}
    dtypes = {name: checkpoint.dtype(f"model.layers.0.{name}") for name in names}
    return Block(spec, 0, weights, dtypes, None)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped query": ("llama", {"attention_bias": True}),
    "multi head": ("llama", {"num_key_value_heads": 4}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "qwen2 biases": ("qwen2", {}),
    "qwen3 head_dim 32": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tap", TAPS, ids=lambda tap: tap.name)
def test_folding_changes_weights_but_not_outputs(tmp_path: Path, case: str, tap: Any) -> None:
    """Bound 1e-5 of the largest output; the scales reach from 1/4 to 4."""
    family, changes = CASES[case]
    block = load_block(tiny_model(tmp_path / "model", family, **changes))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), 64, generator=generator)
    before = outputs(block, hidden)
    width = block.weights[f"{tap.linears[0]}.weight"].shape[1]
    scale_I = 4 ** (2 * torch.rand(width, generator=generator) - 1)
    if tap.name == "attention_output":
        spec = block.spec
        tied = scale_I.view(spec.kv_heads, -1, spec.head_dim)[:, :1]
        scale_I = tied.expand(-1, spec.heads // spec.kv_heads, -1).reshape(-1)
    original = block.weights[f"{tap.linears[0]}.weight"]
    used = fold(block, tap, scale_I)
    assert not torch.allclose(block.weights[f"{tap.linears[0]}.weight"], original, rtol=0.1)
    assert torch.allclose(used, scale_I, rtol=1e-5)
    after = outputs(block, hidden)
    assert (after - before).abs().max() < 1e-5 * before.abs().max()


def test_a_norm_that_is_stored_rounded_takes_no_error_with_it(tmp_path: Path) -> None:
    """A bfloat16 norm divided by a scale rounds; the columns are multiplied by what the rounding made of the scale."""
    block = load_block(tiny_model(tmp_path / "model", dtype="bfloat16"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), 64, generator=generator)
    before = outputs(block, hidden)
    scale_I = 1 + torch.rand(64, generator=generator)
    used = fold(block, TAPS[0], scale_I)
    norm = block.weights["input_layernorm.weight"]
    assert torch.equal(norm, norm.to(torch.bfloat16).float())
    assert 0 < (used / scale_I - 1).abs().max() < 2**-7
    assert (outputs(block, hidden) - before).abs().max() < 1e-5 * before.abs().max()


def test_a_zero_norm_channel_keeps_its_columns(tmp_path: Path) -> None:
    block = load_block(tiny_model(tmp_path / "model"))
    block.weights["input_layernorm.weight"][3] = 0
    used = fold(block, TAPS[0], torch.full((64,), 2.0))
    assert used[3] == 1
    assert torch.isfinite(used).all()
    assert block.weights["input_layernorm.weight"][3] == 0


def test_the_producers_scale_has_its_channels(tmp_path: Path) -> None:
    spec = read_spec(Checkpoint.open(tiny_model(tmp_path / "model")).config)
    scale_I = torch.arange(2 * 16.0).view(2, 1, 16).expand(-1, 2, -1).reshape(-1)
    assert torch.equal(producer_scale(TAPS[1], scale_I, spec), torch.arange(32.0))


def test_scales_that_would_touch_an_ignored_linear_are_skipped_and_said(tmp_path: Path) -> None:
    directory = compressed(tmp_path, method="awq", ignore=["lm_head", "v_proj"])
    told = {entry["name"]: entry for entry in report_of(directory)["stages"][0]["transforms"]}
    assert len(told) == 2 * 4
    entry = told["model.layers.0.self_attn.v_proj -> self_attn.o_proj"]
    assert (entry["applied"], entry["reason"]) == (False, "self_attn.v_proj is not quantized and stays as it is")
    first = told["model.layers.0.input_layernorm -> self_attn.q_proj, self_attn.k_proj, self_attn.v_proj"]
    assert first["applied"] is False
    mlp = told["model.layers.0.post_attention_layernorm -> mlp.gate_proj, mlp.up_proj"]
    assert mlp["applied"] is False or mlp["error_after"] < mlp["error_before"]


def test_every_applied_scale_lowers_the_held_out_error(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_model(tmp_path / "model"))
    spec = read_spec(checkpoint.config)
    schemes = {name: Scheme(3, 32, True) for name in spec.linears()}
    records: list[dict[str, Any]] = []

    class Look:
        wants_head = False

        def head(self, head: HeadBlock) -> Changes:
            raise AssertionError

        def block(self, block: Block) -> Changes:
            seen = block.observe(hold_out=True, propagate=True)
            records.extend(scale_tap(block, seen[tap.name], schemes, torch.float16)[1] for tap in TAPS)
            return Changes()

    lengths = [40] * 16
    ids = torch.randint(0, 256, (640,), generator=torch.Generator().manual_seed(0))
    Walk(checkpoint, spec, arrange(ids, lengths, 256), tmp_path / "w", Reporter(io.StringIO())).run(Look(), "look")
    assert len(records) == 8
    assert any(record["applied"] for record in records)
    for record in records:
        assert record["applied"] == (record["error_after"] < record["error_before"])
