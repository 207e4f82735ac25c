"""Baseline and compressed checkpoint side by side: the same text, the same prompts, in the bundled runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.arch import ModelSpec, read_spec
from compress.calibration import Calibration
from compress.checkpoint import Checkpoint, check_tensors
from compress.encoding import bos_of, load_tokenizer
from compress.errors import UserError
from compress.evaluate import contract
from compress.evaluate.divergence import compare_models
from compress.evaluate.environment import versions
from compress.evaluate.perplexity import check_settings, compare_records, evaluate_checkpoint, evaluation_settings
from compress.evaluate.speed import EngineArm, Workload, measure
from compress.heldout import EvaluationText, evaluation_source, evaluation_windows, overlap
from compress.memory import available_bytes
from compress.progress import Phase, Reporter
from compress.recipe import EvaluateSettings
from compress.runtime.draft_model import check_tokenizers
from compress.runtime.engine import Engine
from compress.runtime.tokenizer import has_tokenizer
from compress.shards import read_config


@dataclass(frozen=True)
class Evaluation:
    """What was measured; None or empty where it was not, with the reason among the warnings."""

    accuracy: contract.Accuracy | None = None
    speed: list[contract.SpeedRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_evaluation_text(
    text: str, field: str | None, window: int, tokens: int, tokenizer_dir: Path, calibration_data: list[str]
) -> EvaluationText:
    """The windows to score, held apart from `calibration_data`. Raises UserError where there is less than one."""
    return evaluation_windows(evaluation_source(text, calibration_data, field), tokenizer_dir, window, tokens)


def check_ids(ids: torch.Tensor, spec: ModelSpec, where: str) -> None:
    """Refuse ids that the model has no embedding for. Raises UserError naming the first."""
    largest = int(ids.max())
    if largest >= spec.vocab:
        raise UserError(
            f"{where}: the tokenizer gives id {largest}, and the model has only {spec.vocab} tokens; "
            "the tokenizer files beside it belong to another model"
        )


def check_same_tokens(checkpoint: Path, baseline: Path) -> None:
    """Refuse a baseline to which an id is another token. Raises UserError; one without a tokenizer is not asked."""
    if has_tokenizer(baseline):
        check_tokenizers(load_tokenizer(checkpoint), load_tokenizer(baseline), f"--baseline {baseline}")


def check_baseline_ids(ids: torch.Tensor, spec: ModelSpec) -> None:
    """Refuse ids that the baseline has no embedding for. Raises UserError naming the largest."""
    largest = int(ids.max())
    if largest >= spec.vocab:
        raise UserError(
            f"--baseline: it has only {spec.vocab} tokens, and CHECKPOINT's tokenizer gives id {largest} in --text; "
            "give a baseline of the same vocabulary"
        )


def evaluate_pair(
    baseline: Path,
    compressed: Path,
    settings: EvaluateSettings | None,
    text: EvaluationText | None,
    calibration: Calibration | None,
    reporter: Reporter,
    device: str = "cpu",
) -> Evaluation:
    """Accuracy and speed of both checkpoints as the recipe asks; what does not fit in memory is not loaded."""
    if settings is None or text is None:
        return Evaluation(warnings=["not evaluated: the recipe has no `evaluate:` section"])
    if (reason := _too_large(baseline, compressed, device)) is not None:
        reporter.say(f"warning: {reason}")
        return Evaluation(warnings=[reason])
    arms = load_arm(baseline, device), load_arm(compressed, device)
    with reporter.phase("evaluate", len(text.ids)) as phase:
        accuracy = compare_models(*arms, text.ids.to(device), _steps(phase))
    accuracy.text = text.facts.as_dict() | {"first_ids": text.ids[0, :8].tolist()}
    if calibration is not None:
        accuracy.text["overlap_with_calibration"] = overlap(calibration, text)
    return Evaluation(accuracy, _speed((baseline, compressed), device, settings, reporter))


def load_arm(path: Path, device: str, exact: bool = True) -> Engine:
    """An engine that computes in float32 on a CPU (16-bit products are slower there) and as stored on a GPU.

    Accuracy is that of the checkpoint, so activations stay exact; speed is that of the arithmetic that serves it.
    """
    dtype = torch.float32
    if device != "cpu":
        dtype = getattr(torch, read_spec(Checkpoint.open(path).config).dtype)
    return Engine.load(path, device=device, dtype=dtype, exact=exact)


def evaluate_command(
    checkpoint: Path,
    baseline: Path | None,
    text: str,
    window: int | None,
    tokens: int,
    json_file: Path | None,
    device: str,
    reporter: Reporter,
) -> list[str]:
    """`compress eval`: the lines to print; also writes the record to `json_file`."""
    earlier = _read_record(baseline) if baseline is not None and baseline.suffix == ".json" else None
    for path in (checkpoint, *([baseline] if baseline is not None and earlier is None else [])):
        read_config(path, None if path is checkpoint else "--baseline")
        check_tensors(opened := Checkpoint.open(path), read_spec(opened.config, str(path / "config.json")))
    compared = baseline if earlier is None else None
    if compared is not None:
        check_same_tokens(checkpoint, compared)
    spec = read_spec(Checkpoint.open(checkpoint).config)
    if window is not None and window > spec.max_positions:
        raise UserError(f"--window {window}: the model has {spec.max_positions} positions")
    if json_file is not None and not json_file.parent.is_dir():
        raise UserError(f"--json {json_file}: no such directory {json_file.parent}")
    size = window or min(2048, spec.max_positions)
    windows = read_evaluation_text(text, None, size, tokens, checkpoint, [])
    check_ids(windows.ids, spec, "--text")
    if compared is not None:
        check_baseline_ids(windows.ids, read_spec(Checkpoint.open(compared).config))
    bos = bos_of(load_tokenizer(checkpoint))
    record: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "settings": evaluation_settings(
            windows, dtype="float32", device=device, versions=versions(), stride=windows.facts.stride, bos=bos
        ),
        "text": windows.facts.as_dict(),
    }
    if compared is None:
        lines = _alone(checkpoint, windows, device, reporter, record, earlier)
    else:
        lines = _against(checkpoint, compared, windows, device, reporter, record)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    facts = windows.facts
    head = f"text        {text}: {facts.windows} windows of {facts.window}, {facts.predicted} tokens scored"
    return [head, f"            sha256 {facts.sha256[:16]}, stride {facts.stride}, BOS {facts.bos}", *lines]


def _alone(
    path: Path,
    windows: EvaluationText,
    device: str,
    reporter: Reporter,
    record: dict[str, Any],
    earlier: dict[str, Any] | None,
) -> list[str]:
    """Perplexity of one checkpoint, and its ratio to an earlier record of the same windows."""
    if earlier is not None:  # before the work, so that a mismatch costs nothing
        check_settings(earlier["settings"], record["settings"])
    with reporter.phase("evaluate", len(windows.ids)) as phase:
        found = evaluate_checkpoint(load_arm(path, device), windows.ids.to(device), _steps(phase))
    record |= found
    interval = f"  [{found['ci95'][0]:.3f}, {found['ci95'][1]:.3f}]" if found["ci95"] else ""
    lines = [f"perplexity  {found['perplexity']:.3f}{interval}"]
    if earlier is not None:
        compared = compare_records(earlier, record)
        record["compared"] = compared
        low, high = compared["ci95"] or (float("nan"), float("nan"))
        change = f"{compared['baseline']:.3f} -> {compared['compressed']:.3f}"
        lines.append(f"ratio       {change}  (x{compared['ratio']:.4f}, 95 % CI {low:.4f} to {high:.4f})")
    return lines


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--baseline {path}: cannot be read: {error}") from None
    if not isinstance(record, dict) or not {"settings", "windows"} <= record.keys():
        raise UserError(
            f"--baseline {path}: not a record of `compress eval --json`; give one, or a checkpoint directory"
        )
    return record


def _against(
    path: Path, baseline: Path, windows: EvaluationText, device: str, reporter: Reporter, record: dict[str, Any]
) -> list[str]:
    from compress.evaluate.summary import accuracy_lines

    with reporter.phase("evaluate", len(windows.ids)) as phase:
        found = compare_models(
            load_arm(baseline, device), load_arm(path, device), windows.ids.to(device), _steps(phase)
        )
    record |= {"baseline": str(baseline), "accuracy": found.model_dump()}
    record["windows"] = [{"nll_sum": one.compressed_nll * one.tokens, "tokens": one.tokens} for one in found.windows]
    return accuracy_lines(found.model_dump())


def _speed(
    paths: tuple[Path, Path], device: str, settings: EvaluateSettings, reporter: Reporter
) -> list[contract.SpeedRow]:
    speed = settings.speed
    if speed is None:
        return []
    arms = [load_arm(path, device, exact=False) for path in paths]
    rows = []
    for batch in speed.batch:
        with reporter.phase(f"speed, batch {batch}", speed.rounds) as phase:
            work = Workload(batch, speed.prompt, speed.output)
            baseline, compressed = (EngineArm(engine, engine.dtype) for engine in arms)
            budget = speed.seconds / len(speed.batch)
            rows.append(measure(baseline, compressed, work, speed.rounds, budget, progress=_steps(phase)))
    return rows


def _steps(phase: Phase) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        phase.advance(done - phase.done)

    return progress


def _too_large(baseline: Path, compressed: Path, device: str) -> str | None:
    """Why the pair is not evaluated here, if it cannot be: both are resident at once, in float32 on a CPU."""
    if device != "cpu":
        return None
    need = 0
    for path in (baseline, compressed):
        spec = read_spec(Checkpoint.open(path).config)
        need += 4 * sum(torch.Size(shape).numel() for shape in spec.tensors().values())
    free = available_bytes()
    if need < free:
        return None
    return (
        f"not evaluated: both models in float32 need {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free; "
        "run `compress eval` on a larger machine"
    )
