"""The forecast against published file sizes, hand-made sums, and mistakes that it must find before any work."""

from __future__ import annotations

import io
from typing import Any

import pytest

from compress.arch import BLOCK_LINEARS, read_spec
from compress.errors import UserError
from compress.forecast import Forecast, forecast, packed_bytes
from compress.forecast_table import duration, fold, print_forecast, size
from compress.quant.scheme import Scheme
from compress.recipe import Recipe, parse_recipe
from compress.selection import check_groups, fitting_group_sizes, select_linears
from tests.published import LLAMA_2_13B, LLAMA_31_8B, QWEN_25_7B, SMOLLM2_135M


def recipe(samples: int = 128, length: int = 512, **quantize: Any) -> Recipe:
    content = {
        "model": "some/model",
        "output": "out",
        "calibration": {"data": "a.txt", "samples": samples, "sequence_length": length},
        "stages": [{"quantize": {"method": "awq", **quantize}}],
    }
    return parse_recipe(content, "recipe.yaml")


def plan(config: dict[str, Any], **settings: Any) -> Forecast:
    return forecast(read_spec(config), recipe(**settings), gflops=100.0)


@pytest.mark.parametrize(("config", "published_gb"), [(LLAMA_2_13B, 7.25), (LLAMA_31_8B, 5.73), (QWEN_25_7B, 5.57)])
def test_sizes_are_those_of_published_4_bit_files(config: dict[str, Any], published_gb: float) -> None:
    """AWQ files on the hub: int4, group 128, with zero points, embedding and head in 16 bits; headers add < 0.5 %."""
    told = plan(config, bits=4, group_size=128, symmetric=False)
    assert told.compressed_bytes == pytest.approx(published_gb * 1e9, rel=0.005)
    assert told.baseline_bytes == 2 * told.parameters


def test_size_of_a_packed_linear() -> None:
    """int4 g64 of [10, 128]: 16 words a row, 2 scales a row, zero points of 10 rows in 2 words a group, the shape."""
    assert packed_bytes((10, 128), Scheme(4, 64, True), 2) == 10 * 64 + 10 * 2 * 2 + 16
    assert packed_bytes((10, 128), Scheme(4, 64, False), 2) == 10 * 64 + 10 * 2 * 2 + 2 * 2 * 4 + 16
    # 128 codes of 3 bits fill 12 words.
    assert packed_bytes((10, 128), Scheme(3, None, True), 4) == 10 * 12 * 4 + 10 * 4 + 16


def test_tied_head_costs_nothing_unless_quantized() -> None:
    kept = plan(SMOLLM2_135M, group_size=64)
    own_head = plan(SMOLLM2_135M, group_size=64, ignore=[])
    head = next(layer for layer in own_head.layers if layer.name == "lm_head")
    assert own_head.compressed_bytes - kept.compressed_bytes == head.stored_bytes
    assert kept.compressed_bytes == pytest.approx(113.1e6, rel=0.001)


def test_memory_does_not_depend_on_the_number_of_samples() -> None:
    """Row 5: only scratch files and time grow (searches over the weights cost the same for any data)."""
    few, many = plan(LLAMA_31_8B, samples=64).cost, plan(LLAMA_31_8B, samples=1024).cost
    assert few.memory_bytes == many.memory_bytes < 0.75 * plan(LLAMA_31_8B).baseline_bytes
    assert many.disk["hidden states"] == 16 * few.disk["hidden states"] == 2 * 1024 * 512 * 4096 * 4
    assert many.flops > 4 * few.flops


def test_needs_follow_the_method() -> None:
    rtn = forecast(
        read_spec(LLAMA_31_8B),
        parse_recipe({"model": "m", "output": "o", "stages": [{"quantize": {"method": "rtn"}}]}, "r"),
        gflops=100.0,
    ).cost
    awq, gptq = plan(LLAMA_31_8B).cost, plan(LLAMA_31_8B, method="gptq").cost
    assert rtn.tokens == 0
    assert rtn.memory_bytes < awq.memory_bytes
    assert rtn.flops < 0.01 * awq.flops
    assert set(gptq.disk) - set(awq.disk) == {"inputs of o_proj and the MLP"}


def test_time_follows_the_rate() -> None:
    spec = read_spec(SMOLLM2_135M)
    slow, fast = (forecast(spec, recipe(group_size=64), gflops=rate) for rate in (50.0, 200.0))
    assert slow.seconds == pytest.approx(4 * fast.seconds)
    assert forecast(spec, recipe(group_size=64)).flops_per_second > 1e8  # probed on this machine


ODD = SMOLLM2_135M | {"intermediate_size": 176, "hidden_size": 1152}


def test_group_that_does_not_divide_names_layer_columns_and_sizes() -> None:
    """Row 7: intermediate 176 under group 128."""
    with pytest.raises(UserError) as refused:
        plan(ODD, group_size=128)
    assert str(refused.value) == (
        "stages[0].quantize.group_size: 128 does not divide mlp.down_proj (176 columns: 16, 8 fit); "
        "set group_size: 16, or add to ignore: down_proj"
    )
    assert plan(ODD, group_size=16).compressed_bytes > 0
    assert plan(ODD, group_size=128, ignore=["lm_head", "down_proj"]).compressed_bytes > 0
    assert plan(ODD, group_size=-1).layers[0].scheme == Scheme(4, None, True)


def test_hidden_size_of_smollm2_is_explained() -> None:
    with pytest.raises(UserError, match=r"576 columns: 64, 32, 16, 8 fit\); set group_size: 64, or add to ignore: "):
        plan(SMOLLM2_135M, group_size=128)


def test_width_that_nothing_divides() -> None:
    with pytest.raises(UserError, match=r"mlp.down_proj \(177 columns: only -1 fits\); set group_size: -1, or add"):
        plan(SMOLLM2_135M | {"intermediate_size": 177}, group_size=64)
    assert fitting_group_sizes(177) == []


@pytest.mark.parametrize(("bits", "group_size"), [(1, 64), (9, 64), (4, 0), (4, -2)])
def test_widths_out_of_range(bits: int, group_size: int) -> None:
    spec = read_spec(SMOLLM2_135M)
    with pytest.raises(UserError, match="accepted: "):
        check_groups(spec, select_linears(spec, ["lm_head"]), bits, group_size)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("lm_haed", "did you mean 'lm_head'?"),
        ("mlp.donw_proj", "did you mean 'mlp.down_proj'?"),
        ("q_prj", "did you mean 'q_proj'?"),
        ("re:.*foo", "linears here: self_attn.q_proj, "),
        ("model.layers.30.mlp.up_proj", "did you mean 'model.layers."),
        ("re:(", "not a regular expression"),
    ],
)
def test_pattern_that_matches_nothing_is_refused(pattern: str, hint: str) -> None:
    """Row 40."""
    with pytest.raises(UserError) as refused:
        plan(SMOLLM2_135M, group_size=64, ignore=["lm_head", pattern])
    assert str(refused.value).startswith("stages[0].quantize.ignore: ")
    assert hint in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.3.mlp.down_proj", 1),
        ("down_proj", 30),
        ("mlp.down_proj", 30),
        ("lm_head", 1),
        (r"re:model\.layers\.[01]\.", 14),
        ("re:.*self_attn", 120),
    ],
)
def test_pattern_keeps_what_it_names(pattern: str, count: int) -> None:
    selected = select_linears(read_spec(SMOLLM2_135M), [pattern])
    assert len(selected) == 30 * len(BLOCK_LINEARS) + 1
    assert list(selected.values()).count(False) == count


def test_nothing_left_to_quantize_is_refused() -> None:
    with pytest.raises(UserError, match="nothing is left to quantize"):
        plan(SMOLLM2_135M, group_size=64, ignore=["re:.*"])


def test_identical_blocks_share_a_row() -> None:
    told = plan(LLAMA_2_13B)
    rows = fold(told.layers)
    assert [(name, count) for name, _, count in rows][-2:] == [("model.layers.0–39.mlp.down_proj", 40), ("lm_head", 1)]
    assert sum(count * layer.stored_bytes for _, layer, count in rows) == sum(row.stored_bytes for row in told.layers)
    mixed = fold(plan(LLAMA_2_13B, ignore=[r"re:model\.layers\.(0|1|39)\.mlp", "lm_head"]).layers)
    names = [name for name, _, _ in mixed]
    assert "model.layers.0–1,39.mlp.down_proj" in names
    assert "model.layers.2–38.mlp.down_proj" in names


@pytest.mark.parametrize("config", [LLAMA_2_13B, SMOLLM2_135M])
def test_piped_table_is_plain_and_fits_100_columns(config: dict[str, Any]) -> None:
    out = io.StringIO()
    print_forecast(plan(config, group_size=64), out)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in out.getvalue()
    down = next(line for line in lines if "mlp.down_proj" in line)
    assert "int4 sym g64" in down
    assert down.rstrip().endswith("B")
    assert any("kept (tied)" in line or "kept (ignored)" in line for line in lines)


def test_units() -> None:
    assert [size(amount) for amount in (512, 1.5e6, 7.25e9)] == ["0.5 kB", "1.5 MB", "7.25 GB"]
    assert [duration(seconds) for seconds in (12, 600, 7200, 5e5)] == ["12 s", "10 min", "2.0 h", "6 days"]
