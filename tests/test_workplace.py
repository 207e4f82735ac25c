"""Nothing of the user's is lost: neither what stands in the output directory nor a killed run's work (row 20)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress import pipeline
from compress.errors import RunError, UserError
from compress.progress import Reporter
from compress.recipe import load_recipe
from compress.workplace import check_output, open_workplace, workplace_of
from tests.product import report_of, run_cli, write_recipe
from tests.tiny import tiny_model


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, tiny_model(tmp_path / "model"), method="rtn")


def bits_of(directory: Path) -> str:
    return report_of(directory)["stages"][0]["layers"][0]["scheme"]


@pytest.mark.parametrize("what", ["directory", "file", "broken report", "somebody else's report"])
def test_even_a_fresh_run_replaces_nothing_but_a_result(tmp_path: Path, recipe: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_text("precious")
    else:
        out.mkdir()
        (out / "precious.txt").write_text("precious")
    if what.endswith("report"):
        (out / "report.json").write_text("{" if what.startswith("broken") else '{"provenance": []}')
    before = sorted(out.rglob("*"))
    for option in ((), ("--fresh",)):
        code, _, err = run_cli("run", recipe, *option)
        assert code == 2
        assert "out: exists and was not written by compress; choose another --out" in err
    assert sorted(out.rglob("*")) == before
    assert not workplace_of(out).exists()


@pytest.mark.parametrize("out", ["", ".", "/", "..", "a/..", "recipe.yaml/inside"])
def test_a_place_that_cannot_be_made_is_told_before_any_work(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run_cli("run", recipe, "--set", f"output={json.dumps(out)}")
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_home_is_understood_in_paths(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = ("model=~/model", "output=~/elsewhere/öut put", "calibration.data=~/texts.jsonl")
    code, _, err = run_cli("run", recipe, *(part for setting in settings for part in ("--set", setting)))
    assert code == 0, err
    assert (tmp_path / "elsewhere" / "öut put" / "report.json").is_file()


def test_the_old_result_outlives_a_fresh_run_that_fails_and_the_fresh_run_goes_on(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_cli("run", recipe)[0] == 0
    changed = ("--set", "stages.quantize.bits=3")
    out = tmp_path / "out"

    def fail(*_: object) -> None:
        raise RunError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "verify", fail)
        assert run_cli("run", recipe, *changed, "--fresh")[0] == 1
    assert "int4" in bits_of(out)
    code, _, err = run_cli("run", recipe, *changed)  # not from the start again
    assert code == 0, err
    assert "quantize: finished before" in err
    assert "int3" in bits_of(out)
    assert not workplace_of(out).exists()


@pytest.mark.parametrize("moment", ["before the new name", "after the new name"])
def test_a_run_killed_while_it_delivers(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The old result is put back, or the new one stands; either way a rerun ends well and leaves nothing behind."""
    assert run_cli("run", recipe)[0] == 0
    changed = ("--set", "stages.quantize.bits=3")
    out = tmp_path / "out"

    def die(*_: object) -> None:
        raise RunError("killed")

    with monkeypatch.context() as patch:
        if moment == "before the new name":
            patch.setattr("compress.workplace.publish", die)
        else:
            patch.setattr("compress.workplace.shutil", SimpleNamespace(rmtree=die))
        assert run_cli("run", recipe, *changed, "--fresh")[0] == 1
    if moment == "before the new name":
        assert (workplace_of(out) / "replaced").exists()
        with pytest.raises(UserError, match="was begun with another"):
            pipeline.run(load_recipe(recipe), Reporter())
        assert "int4" in bits_of(out)
    code, _, err = run_cli("run", recipe, *changed)
    assert code == 0, err
    assert "int3" in bits_of(out)
    assert not workplace_of(out).exists()


def test_a_result_taken_away_is_made_again(tmp_path: Path, recipe: Path) -> None:
    """A stage whose record is there and whose checkpoint is not has to run again."""
    assert run_cli("run", recipe)[0] == 0
    fingerprint = report_of(tmp_path / "out")["provenance"]["fingerprint"]
    (tmp_path / "out").rename(tmp_path / "moved")
    with open_workplace(tmp_path / "out", fingerprint, fresh=False) as place:
        (place.path / "00-quantize").mkdir()
        (place.path / "00-quantize.json").write_text("{}")
    code, _, err = run_cli("run", recipe)
    assert code == 0, err


def test_half_written_checkpoints_of_killed_runs_do_not_pile_up(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = workplace_of(tmp_path / "out") / "00-quantize" / ".checkpoint.1.tmp"
    left.mkdir(parents=True)

    def look(*_: object) -> None:
        assert not left.exists()
        raise RunError("seen")

    monkeypatch.setattr(pipeline, "verify", look)
    code, _, err = run_cli("run", recipe)
    assert code == 1
    assert "seen" in err


def test_a_full_disk_is_one_line(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "out.work/x")

    monkeypatch.setattr(pipeline, "verify", full)
    code, _, err = run_cli("run", recipe)
    assert code == 1
    assert err.splitlines()[-1] == "failed: out.work/x: No space left on device"


def test_speed_beyond_the_models_positions_is_told_before_any_work(tmp_path: Path, recipe: Path) -> None:
    prose = tmp_path / "texts.jsonl"
    settings = f"evaluate={{text: {prose}, window: 64, speed: {{prompt: 600, output: 4}}}}"
    code, _, err = run_cli("run", recipe, "--set", settings)
    assert code == 2
    assert "speed: prompt 600 + output 4 exceeds the model's 512 positions" in err
    assert not workplace_of(tmp_path / "out").exists()


def test_a_place_without_anything_is_free(tmp_path: Path) -> None:
    assert check_output(tmp_path / "not" / "there") is None
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="was not written by compress"):
        check_output(tmp_path / "link")
