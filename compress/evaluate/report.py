"""report.json, report.html and the model card of one run, all from the same figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from compress import __version__
from compress.arch import EMBEDDING, HEAD, ModelSpec
from compress.checkpoint import Checkpoint
from compress.evaluate import contract
from compress.evaluate.card import render_card
from compress.evaluate.environment import commit, hardware, versions
from compress.evaluate.page import render_page
from compress.roofline import parameters

if TYPE_CHECKING:
    from compress.calibration import CalibrationFacts
    from compress.evaluate.paired import Evaluation
    from compress.recipe import Recipe
    from compress.sources import Source

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def build_report(
    *,
    recipe: Recipe,
    source: Source,
    spec: ModelSpec,
    fingerprint: Mapping[str, Any],
    stages: list[dict[str, Any]],
    calibration: CalibrationFacts | None,
    evaluation: Evaluation,
    verified: Mapping[str, Any],
    baseline: Path,
    compressed: Path,
    command: str,
) -> contract.Report:
    """Everything known about a run, as the contract's sections."""
    provenance = contract.Provenance(
        model=source.description,
        recipe_sha256=recipe.sha256(),
        data_sha256=calibration.sha256 if calibration else None,
        tool_version=__version__,
        commit=commit(),
        hardware=hardware(),
        versions=versions(),
        seed=recipe.calibration.seed if recipe.calibration else None,
        command=command or None,
        revision=source.revision_or_sha256,
        fingerprint=dict(fingerprint),
        license=stated_license(baseline),
        base_model=hub_id(recipe.model),
    )
    return contract.Report(
        provenance=provenance,
        stages=[contract.Stage.model_validate(stage) for stage in stages],
        calibration={k: v for k, v in asdict(calibration).items() if k != "warnings"} if calibration else {},
        size=measure_size(Checkpoint.open(baseline), Checkpoint.open(compressed), spec),
        accuracy=evaluation.accuracy,
        speed=list(evaluation.speed),
        verified=contract.Verified.model_validate(dict(verified)),
        warnings=[
            *source_notes(baseline / "source.json"),
            *(calibration.warnings if calibration else []),
            *evaluation.warnings,
        ],
        recipe=recipe.resolved(),
    )


def measure_size(baseline: Checkpoint, compressed: Checkpoint, spec: ModelSpec) -> contract.Size:
    """Bytes of all tensors stored, by what they are; bits per weight over every parameter of the model."""
    parts: dict[str, list[int]] = {name: [0, 0] for name in ("linears", "embedding", "head", "other")}
    for arm, checkpoint in enumerate((baseline, compressed)):
        for name in checkpoint.names:
            parts[_part(name, spec)][arm] += checkpoint.nbytes(name)
    return contract.Size(
        baseline_bytes=baseline.total_bytes,
        compressed_bytes=compressed.total_bytes,
        bits_per_weight=8 * compressed.total_bytes / parameters(spec),
        parts={name: contract.SizePart(baseline_bytes=b, compressed_bytes=c) for name, (b, c) in parts.items()},
    )


def _part(tensor: str, spec: ModelSpec) -> str:
    module = tensor.rpartition(".")[0]
    if module == EMBEDDING:
        return "embedding"
    if module == HEAD:
        return "head"
    return "linears" if module in spec.linears() else "other"


def stated_license(directory: Path) -> str | None:
    """The licence of the base model: of its own card's front matter, or of the GGUF file it came from; else None."""
    return _card_license(directory / "README.md") or _source_license(directory / "source.json")


def _source_license(file: Path) -> str | None:
    stated = _conversion(file).get("license")
    return stated if isinstance(stated, str) else None


def source_notes(file: Path) -> list[str]:
    """A source that is quantized itself: what it is compared with is not the file that was given."""
    stored = _conversion(file).get("stored") or {}
    narrow = [kind for kind in stored if kind not in ("F32", "F16", "BF16")]
    if not narrow:
        return []
    return [
        f"the source file holds its weights in {', '.join(narrow)}, {sum(stored.values()) / 1e6:.1f} MB in all; "
        "sizes, accuracy and speed are compared with the 16-bit weights that these decode to"
    ]


def _conversion(file: Path) -> dict[str, Any]:
    """What a conversion noted of its source (compress.sources)."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _card_license(card: Path) -> str | None:
    if not card.is_file():
        return None
    parts = re.split(r"^---\s*$", card.read_text(encoding="utf-8", errors="replace"), maxsplit=2, flags=re.MULTILINE)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        front = yaml.safe_load(parts[1])
    except yaml.YAMLError:  # somebody else's file: a card that cannot be read names nothing
        return None
    stated = front.get("license") if isinstance(front, dict) else None
    return stated if isinstance(stated, str) else None


def hub_id(model: str) -> str | None:
    """`model` where it has the form of a Hub id and is not a path here."""
    return model if _HUB_ID.fullmatch(model) and not Path(model).exists() else None


def plain(report: contract.Report) -> dict[str, Any]:
    """The report as JSON has it. A number that is not finite becomes null, and a warning names its place."""
    lost: list[str] = []
    told = _finite(report.model_dump(mode="python"), "", lost)
    told["warnings"] += [f"{place} was not a finite number" for place in lost]
    return told


def _finite(value: Any, place: str, lost: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{place}.{key}".lstrip("."), lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{place}[{i}]", lost) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(place)
        return None
    return value


def write_report(directory: Path, report: contract.Report) -> dict[str, Any]:
    """Write report.json, report.html and README.md to `directory`; returns what report.json holds."""
    told = plain(report)
    (directory / "report.json").write_text(
        json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    (directory / "report.html").write_text(render_page(report), encoding="utf-8")
    (directory / "README.md").write_text(render_card(report, directory.name), encoding="utf-8")
    return told
