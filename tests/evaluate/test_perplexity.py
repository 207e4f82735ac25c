"""Perplexity of one checkpoint, and the refusal to compare what was measured differently."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from compress.errors import UserError
from compress.evaluate.divergence import LanguageModel, compare_models
from compress.evaluate.perplexity import MUST_AGREE, compare_records, evaluate_checkpoint, evaluation_settings
from tests.evaluate.models import FixedModel, HuggingFaceModel, load, perturbed
from tests.tiny import tiny_model


@dataclass
class Text:
    ids: torch.Tensor
    sha256: str = "ab" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceModel:
    return load(tiny_model(Path(tmp_path_factory.mktemp("tiny"))))


def record(model: LanguageModel, window: int = 64) -> dict:
    ids = torch.randint(256, (512 // window, window), generator=torch.Generator().manual_seed(0))
    settings = evaluation_settings(Text(ids), dtype="float32", device="cpu", versions={}, stride=None, bos=None)
    return json.loads(json.dumps({"settings": settings, **evaluate_checkpoint(model, ids)}))


def test_uniform_model_has_the_vocabulary_as_its_perplexity():
    result = evaluate_checkpoint(FixedModel(torch.zeros(10, 32)), torch.randint(32, (3, 10)))
    assert result["perplexity"] == pytest.approx(32.0, rel=1e-6)
    assert result["ci95"] == pytest.approx((32.0, 32.0), rel=1e-5)


def test_non_finite_positions_are_counted():
    logits = torch.zeros(10, 32)
    logits[4] = torch.inf
    result = evaluate_checkpoint(FixedModel(logits), torch.randint(32, (3, 10)))
    assert result["non_finite"] == 3
    assert result["perplexity"] == pytest.approx(32.0, rel=1e-6)


def test_records_of_two_runs_give_the_paired_ratio(model: HuggingFaceModel):
    other = perturbed(model, 0.05)
    result = compare_records(record(model), record(other))
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    together = compare_models(model, other, ids).perplexity
    assert result["ratio"] == pytest.approx(together.ratio, rel=1e-5)
    assert result["ci95"] == pytest.approx(together.ci95, rel=1e-4)
    assert result["baseline"] == pytest.approx(together.baseline, rel=1e-5)


def test_a_record_against_itself_detects_no_difference(model: HuggingFaceModel):
    """Row 34."""
    mine = record(model)
    assert compare_records(mine, mine)["ratio"] == 1.0
    assert math.isclose(compare_records(mine, mine)["ci95"][0], 1.0)


def test_records_of_different_windows_are_refused(model: HuggingFaceModel):
    """Row 33: window 64 against 128 names the field."""
    with pytest.raises(UserError, match="differ in window: 64 and 128"):
        compare_records(record(model, 64), record(model, 128))


@pytest.mark.parametrize("field", MUST_AGREE)
def test_every_setting_that_changes_the_figure_is_compared(field: str):
    """Row 33."""
    uniform = FixedModel(torch.zeros(64, 256))
    mine, theirs = record(uniform), record(uniform)
    theirs["settings"][field] = "other"
    with pytest.raises(UserError, match=f"differ in {field}: .*'other'"):
        compare_records(mine, theirs)


def test_settings_name_the_first_ids(model: HuggingFaceModel):
    """Row 31: the first ids of the first window are in the record, so a missing or doubled BOS shows."""
    ids = torch.arange(40).reshape(2, 20)
    settings = evaluation_settings(Text(ids), dtype="float32", device="cpu", versions={"torch": "2"}, stride=10, bos=0)
    assert settings["first_ids"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (settings["stride"], settings["window"], settings["tokens"], settings["bos"]) == (10, 20, 38, 0)
