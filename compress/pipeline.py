"""The whole story: recipe → model → calibration → stages → checkpoint → evaluation → report.

Work in progress lives in DIR.work and disappears on success; DIR appears whole or not at all. A rerun keeps what is
finished if the model, the recipe and the data are the same, and refuses if they are not.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress import __version__
from compress.arch import ModelSpec, read_spec, require_llama_blocks
from compress.blockwise import write_durably
from compress.calibration import Calibration, calibrate_texts
from compress.checkpoint import Checkpoint, check_tensors
from compress.errors import UserError
from compress.evaluate.paired import check_ids, evaluate_pair, read_evaluation_text
from compress.evaluate.report import build_report, write_report
from compress.evaluate.speed import Workload, check_fits
from compress.forecast import Forecast, forecast
from compress.formats import require_dense
from compress.heldout import EvaluationText
from compress.progress import Reporter
from compress.recipe import Recipe, Stage
from compress.sources import Source, resolve, resolve_config
from compress.stages import StageRun, run_stage
from compress.verify import verify
from compress.workplace import begun_replacing, changed, check_output, drop_leftovers, open_workplace

VERIFY_TOKENS = 64


@dataclass(frozen=True)
class Outcome:
    directory: Path
    report: dict[str, Any]
    fresh: bool  # False where DIR was finished before and nothing was done


def plan(recipe: Recipe) -> Forecast:
    """What a run would do and need, from the model's config alone: no weights, no data.

    Raises UserError for a model that cannot be served, or served but not compressed.
    """
    spec = read_spec(resolve_config(recipe.model), recipe.model)
    require_llama_blocks(spec, "compression", recipe.model)
    return forecast(spec, recipe)


def run(recipe: Recipe, reporter: Reporter, device: str = "cpu", fresh: bool = False, command: str = "") -> Outcome:
    """Carry out a recipe. Raises UserError before any work, RunError when the work fails."""
    output = Path(recipe.output).expanduser()
    standing = check_output(output)
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
        "tool": f"{__version__} on {device}",  # another one may round another way
    }
    if standing is not None and not fresh and not begun_replacing(output, fingerprint):
        _require_same(standing, output, recipe, fingerprint)
        drop_leftovers(output, fingerprint)
        return Outcome(output, standing, fresh=False)
    with open_workplace(output, fingerprint, fresh) as place:
        directory, records = source.path, list[dict[str, Any]]()
        for index, stage in enumerate(recipe.stages):
            directory, record = _stage(index, stage, directory, place.path, calibration, reporter, device)
            records.append(record)
        original = _source_of_last(source, place.path, len(records))
        with reporter.phase("verify", 1) as phase:
            verified = verify(directory, original, records[-1]["layers"], _probe(spec))
            phase.advance(note="files read back")
        if verified.engine_matches_reference is None:
            reporter.say("warning: the runtime was not checked: the model in float32 does not fit into memory")
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
        (directory / "recipe.yaml").write_text(recipe.yaml(), encoding="utf-8")
        told = write_report(directory, report)
        place.deliver(directory)
        return Outcome(output, told, fresh=True)


def _calibrate(recipe: Recipe, source: Source, spec: ModelSpec, reporter: Reporter) -> Calibration | None:
    settings = recipe.calibration
    if settings is None:
        return None
    _check_length("calibration.sequence_length", settings.sequence_length, spec)
    reporter.say(f"calibration: reading {', '.join(settings.sources)}")
    with reporter.phase("calibration", 1) as phase:
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
        phase.advance()
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
    _check_length("evaluate.window", settings.window, spec)
    if (speed := settings.speed) is not None:
        check_fits(Workload(max(speed.batch), speed.prompt, speed.output), spec.max_positions)
    data = recipe.calibration.sources if recipe.calibration else []
    text = read_evaluation_text(settings.text, settings.field, settings.window, settings.tokens, source.path, data)
    check_ids(text.ids, spec, "evaluate")
    return text


def _check_length(where: str, length: int, spec: ModelSpec) -> None:
    if length > spec.max_positions:
        raise UserError(f"{where}: {length} is beyond the model's max_position_embeddings {spec.max_positions}")


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
    if record.exists() and output.exists():
        reporter.say(f"{stage.name}: finished before")
        return output, json.loads(record.read_text())
    for left in place.glob("*") if place.exists() else ():
        if left.name != "walk":  # a checkpoint that was half written when an earlier run was killed
            shutil.rmtree(left)
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


def _require_same(told: dict[str, Any], output: Path, recipe: Recipe, fingerprint: dict[str, Any]) -> None:
    """Refuse to run where a finished result, of this report, is not what this recipe would only make again."""
    provenance = told["provenance"]
    if provenance["fingerprint"] != fingerprint:
        what = changed(provenance["fingerprint"], fingerprint)
        raise UserError(f"{output}: holds the result of another {what}; --fresh replaces it, --out DIR keeps it")
    if provenance.get("recipe_sha256") != recipe.sha256():
        raise UserError(f"{output}: was evaluated by other settings; --fresh does all again, --out DIR keeps it")
