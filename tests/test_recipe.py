"""Recipes: every mistake is one line that says where, what is accepted, and the nearest right name (row 40)."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.errors import UserError
from compress.recipe import STAGE_SETTINGS, load_recipe, needs_data, resolve_method
from compress.stages import STAGES

GOOD = """
model: some/model
output: out/x
calibration: {data: texts.jsonl, samples: 16, sequence_length: 64}
stages:
  - quantize: {method: gptq, bits: 4, group_size: 32}
evaluate: {text: prose.txt, window: 128}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_defaults_are_filled_in_and_written_back(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD))
    again = load_recipe(write(tmp_path, recipe.yaml()))
    assert again == recipe
    assert recipe.stages[0].settings.ignore == ["lm_head"]
    assert recipe.sha256() == again.sha256()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("group_size", "grup_size"),
            "stages[0].quantize: unknown key 'grup_size'; known: .*; did you mean 'group_size'",
        ),
        (("bits: 4", "bits: 9"), r"stages\[0\].quantize.bits: Input should be less than or equal to 8, not 9"),
        (("group_size: 32", "group_size: 0"), r"stages\[0\].quantize.group_size: must be -1 .*, not 0"),
        (("method: gptq", "method: gptqq"), r"stages\[0\].quantize.method: .*'gptq'.*, not 'gptqq'"),
        (
            ("quantize:", "quantise:"),
            r"stages\[0\]: unknown stage 'quantise'; known: quantize; did you mean 'quantize'",
        ),
        (("samples: 16", "sampels: 16"), "calibration: unknown key 'sampels'; .*did you mean 'samples'"),
        (("window: 128", "window: many"), "evaluate.window: .* not 'many'"),
        (("model: some/model\n", ""), "model: required, and missing"),
        (("calibration:", "calibratoin:"), "recipe: unknown key 'calibratoin'; .*did you mean 'calibration'"),
        (("stages:\n", "stages: {\n"), "not valid YAML"),
        (("model: some/model\n", "model: a\nmodel: b\n"), "the key 'model' twice"),
        (("bits: 4", "bits: 4, bits: 3"), "the key 'bits' twice"),
        (("samples: 16", "samples: true"), "calibration.samples: must be a number, not True"),
        (("samples: 16", f"seed: {10**80}"), "calibration.seed: Input should be less than"),
        (("data: texts.jsonl", "data: []"), "calibration.data: must name at least one source"),
        (("data: texts.jsonl", "data: ['']"), "calibration.data: must name at least one source"),
        (("model: some/model", "model: ''"), "model: String should have at least 1 character"),
        (("{data: texts.jsonl, samples: 16, sequence_length: 64}", "7"), "calibration: must be a section .* data, .*7"),
        (("prose.txt, window: 128", "a, speed: 8"), "evaluate.speed: must be a section with the keys batch, .*, not 8"),
        (("{method: gptq, bits: 4, group_size: 32}", "gptq"), r"stages\[0\].quantize: must be a section .* method"),
        (
            ("evaluate:", "  - quantize: {method: rtn}\nevaluate:"),
            r"stages\[1\].quantize: the model is quantized already by stages\[0\]",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_name(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    import re

    assert change[0] in GOOD
    message = message if "\\" in message or ".*" in message else re.escape(message)
    message = message.replace("stages[0].quantize: unk", r"stages\[0\].quantize: unk")
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(write(tmp_path, GOOD.replace(*change)))
    assert "\n" not in str(caught.value)
    assert "recipe.yaml" in str(caught.value)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"no such recipe; did you mean 'recipe.yaml'"):
        load_recipe(tmp_path / "recpie.yaml")


def test_overrides_reach_any_key(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    overrides = ("calibration.samples=8", "stages.0.quantize.bits=3", "stages.quantize.symmetric=false")
    recipe = load_recipe(path, overrides, out="elsewhere")
    settings = recipe.stages[0].settings
    assert (recipe.calibration.samples, settings.bits, settings.symmetric) == (8, 3, False)  # type: ignore[union-attr]
    assert recipe.output == "elsewhere"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("calibration.samples", "the form is path.to.key=value"),
        ("stages.prune.heads=1", "no single item 'prune'; items: quantize"),
        ("model.name=x", "'model' is a value, not a section"),
        ("calibration.sample=8", "unknown key 'sample'; .*did you mean 'samples'"),
        ("stages.3.quantize.bits=3", "no single item '3'"),
        ("stages.quantize.ignore.0.x=1", "ignore: Input should be a valid list"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(write(tmp_path, GOOD), (override,))


def test_overrides_of_sections_that_are_empty_or_no_sections(tmp_path: Path) -> None:
    empty = GOOD.replace("{method: gptq, bits: 4, group_size: 32}", "")
    assert load_recipe(write(tmp_path, empty), ("stages.quantize.method=gptq",)).stages[0].settings.method == "gptq"
    for setting, part in (("stages.0.bits=3", "0"), ("stages.0.quantize.bits=3", "0")):
        with pytest.raises(UserError, match=f"'{part}' is a value, not a section"):
            load_recipe(write(tmp_path, GOOD.replace("- quantize: {", "- word #")), (setting,))


def test_yaml_merges_keep_their_meaning(tmp_path: Path) -> None:
    """A key beside `<<` overrides the merged one; that is no key given twice."""
    merged = GOOD.replace("{method: gptq, bits: 4,", "{<<: {method: rtn, bits: 3}, bits: 5,")
    settings = load_recipe(write(tmp_path, merged)).stages[0].settings
    assert (settings.method, settings.bits) == ("rtn", 5)


def test_methods_that_need_data_say_so_without_it(tmp_path: Path) -> None:
    bare = GOOD.replace("calibration: {data: texts.jsonl, samples: 16, sequence_length: 64}\n", "")
    with pytest.raises(UserError, match=r"gptq needs a `calibration:` section"):
        load_recipe(write(tmp_path, bare))
    recipe = load_recipe(write(tmp_path, bare.replace("gptq", "rtn")))
    assert not needs_data(recipe.stages[0].settings)


def test_presets_can_be_set_apart(tmp_path: Path) -> None:
    awq = load_recipe(write(tmp_path, GOOD.replace("method: gptq", "method: awq, rounding: gptq"))).stages[0].settings
    chosen = resolve_method(awq)
    assert (chosen.transform, chosen.rounding) == ("awq", "gptq")


def test_the_weights_hash_ignores_where_and_how_they_are_judged(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD))
    moved = load_recipe(write(tmp_path, GOOD), ("evaluate.window=64",), out="y")
    other = load_recipe(write(tmp_path, GOOD), ("calibration.seed=1",))
    assert recipe.weights_sha256() == moved.weights_sha256() != other.weights_sha256()
    assert recipe.sha256() != moved.sha256()


def test_every_stage_has_settings_and_an_implementation() -> None:
    assert set(STAGE_SETTINGS) == set(STAGES)
