"""The whole story: recipe → model → calibration → stages → checkpoint → evaluation → report.

Work in progress lives in DIR.work and disappears on success; DIR appears whole or not at all. A rerun keeps what is
finished if the model, the recipe and the data are the same, and refuses if they are not.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.arch import ModelSpec, read_spec
from compress.blockwise import write_durably
from compress.calibration import Calibration, calibrate_texts
from compress.checkpoint import Checkpoint, check_tensors, publish
from compress.errors import UserError
from compress.evaluate.paired import check_ids, evaluate_pair, read_evaluation_text
from compress.evaluate.report import build_report, write_report
from compress.forecast import Forecast, forecast
from compress.formats import require_dense
from compress.heldout import EvaluationText
from compress.progress import Reporter
from compress.recipe import Recipe, Stage
from compress.sources import Source, resolve, resolve_config
from compress.stages import StageRun, run_stage
from compress.verify import verify

VERIFY_TOKENS = 64


@dataclass(frozen=True)
class Outcome:
    directory: Path
    report: dict[str, Any]
    fresh: bool  # False where DIR was finished before and nothing was done


def plan(recipe: Recipe) -> Forecast:
    """What a run would do and need, from the model's config alone: no weights, no data."""
    return forecast(read_spec(resolve_config(recipe.model), recipe.model), recipe)


def run(recipe: Recipe, reporter: Reporter, device: str = "cpu", fresh: bool = False, command: str = "") -> Outcome:
    """Carry out a recipe. Raises UserError before any work, RunError when the work fails."""
    output = Path(recipe.output)
    plan(recipe)
    source = resolve(recipe.model, progress=reporter.say)
    checkpoint = Checkpoint.open(source.path)
    require_dense(checkpoint)
    spec = read_spec(checkpoint.config, str(source.path / "config.json"))
    check_tensors(checkpoint, spec)
    calibration = _calibrate(recipe, source, spec, reporter)
    text = _evaluation_text(recipe, source, spec)
    fingerprint = {
        "model": checkpoint.fingerprint(),
        "recipe": recipe.weights_sha256(),
        "data": calibration.facts.sha256 if calibration else None,
    }
    if not fresh and (done := _finished(output, recipe, fingerprint)) is not None:
        return Outcome(output, done, fresh=False)
    with _workplace(output, fingerprint, fresh) as work:
        directory, records = source.path, list[dict[str, Any]]()
        for index, stage in enumerate(recipe.stages):
            directory, record = _stage(index, stage, directory, work, calibration, reporter, device)
            records.append(record)
        reporter.say("verify: reading the checkpoint back")
        verified = verify(directory, _source_of_last(source, work, len(records)), records[-1]["layers"], _probe(spec))
        evaluation = evaluate_pair(source.path, directory, recipe.evaluate, text, calibration, reporter, device)
        report = build_report(
            recipe=recipe,
            source=source,
            spec=spec,
            fingerprint=fingerprint,
            stages=records,
            calibration=calibration.facts if calibration else None,
            evaluation=evaluation,
            verified=verified.section(),
            baseline=source.path,
            compressed=directory,
            command=command,
        )
        return Outcome(output, _deliver(directory, output, recipe, report, fresh), fresh=True)


def _calibrate(recipe: Recipe, source: Source, spec: ModelSpec, reporter: Reporter) -> Calibration | None:
    settings = recipe.calibration
    if settings is None:
        return None
    if settings.sequence_length > spec.max_positions:
        raise UserError(
            f"calibration.sequence_length: {settings.sequence_length} is beyond the model's "
            f"max_position_embeddings {spec.max_positions}"
        )
    reporter.say(f"calibration: reading {', '.join(settings.sources)}")
    calibration = calibrate_texts(
        settings.sources,
        settings.samples,
        settings.sequence_length,
        settings.seed,
        settings.pack,
        source.path,
        field=settings.field,
        evaluation=recipe.evaluate.text if recipe.evaluate else None,
    )
    check_ids(calibration.ids_T, spec, "calibration")
    facts = calibration.facts
    reporter.say(f"calibration: {facts.samples} samples, {facts.tokens} tokens, sha256 {facts.sha256[:12]}")
    for warning in facts.warnings:
        reporter.say(f"warning: {warning}")
    return calibration


def _evaluation_text(recipe: Recipe, source: Source, spec: ModelSpec) -> EvaluationText | None:
    settings = recipe.evaluate
    if settings is None:
        return None
    if settings.window > spec.max_positions:
        raise UserError(
            f"evaluate.window: {settings.window} is beyond the model's max_position_embeddings {spec.max_positions}"
        )
    data = recipe.calibration.sources if recipe.calibration else []
    text = read_evaluation_text(settings.text, settings.field, settings.window, settings.tokens, source.path, data)
    check_ids(text.ids, spec, "evaluate")
    return text


def _stage(
    index: int,
    stage: Stage,
    source: Path,
    work: Path,
    calibration: Calibration | None,
    reporter: Reporter,
    device: str,
) -> tuple[Path, dict[str, Any]]:
    """Run a stage, or take what an earlier run finished; its record is written last."""
    place = work / f"{index:02d}-{stage.name}"
    record, output = place.with_suffix(".json"), place / "checkpoint"
    if record.exists():
        reporter.say(f"{stage.name}: finished before")
        return output, json.loads(record.read_text())
    shutil.rmtree(output, ignore_errors=True)
    run = StageRun(source, output, place / "walk", calibration, reporter, device)
    told = run_stage(stage.name, run, stage.settings)
    write_durably(record, json.dumps(told))
    shutil.rmtree(place / "walk")
    return output, told


def _source_of_last(source: Source, work: Path, stages: int) -> Path:
    previous = sorted(path for path in work.iterdir() if path.is_dir() and path.name[:2].isdigit())[: stages - 1]
    return previous[-1] / "checkpoint" if previous else source.path


def _probe(spec: ModelSpec) -> torch.Tensor:
    """Token ids to compare logits on: spread over the vocabulary, the same for everybody."""
    length = min(VERIFY_TOKENS, spec.max_positions)
    return (torch.arange(length) * 7919 + 17) % spec.vocab


def _finished(output: Path, recipe: Recipe, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a finished DIR that this recipe would only make again."""
    if not output.exists():
        return None
    report = output / "report.json"
    if not report.is_file():
        raise UserError(f"{output}: exists and was not written by compress; choose another --out")
    told = json.loads(report.read_text())
    provenance = told.get("provenance", {})
    if provenance.get("fingerprint") != fingerprint:
        changed = _changed(provenance.get("fingerprint") or {}, fingerprint)
        raise UserError(f"{output}: holds the result of another {changed}; --fresh replaces it, --out DIR keeps it")
    if provenance.get("recipe_sha256") != recipe.sha256():
        raise UserError(f"{output}: was evaluated by other settings; --fresh does all again, --out DIR keeps it")
    return told


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    return " and ".join(key for key in now if before.get(key) != now[key])


@contextmanager
def _workplace(output: Path, fingerprint: dict[str, Any], fresh: bool) -> Iterator[Path]:
    """DIR.work, locked, and begun with this fingerprint."""
    work = output.with_name(output.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{work}: another run is at work there; wait for it, or choose another --out") from None
        begun = work / "fingerprint.json"
        if fresh:
            for item in work.iterdir():
                if item.name != "lock":
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
        elif begun.exists() and (before := json.loads(begun.read_text())) != fingerprint:
            changed = _changed(before, fingerprint)
            raise UserError(f"{work}: was begun with another {changed}; --fresh starts over, --out DIR leaves it alone")
        write_durably(begun, json.dumps(fingerprint))
        yield work


def _deliver(directory: Path, output: Path, recipe: Recipe, report: Any, fresh: bool) -> dict[str, Any]:
    """Put the documents beside the checkpoint and give both their name."""
    (directory / "recipe.yaml").write_text(recipe.yaml())
    told = write_report(directory, report)
    work = output.with_name(output.name + ".work")
    if output.exists():
        if not fresh:
            raise UserError(f"{output}: appeared while this run was at work; it was left alone")
        output.rename(work / "replaced")
    publish(directory, output)
    shutil.rmtree(work)
    return told
