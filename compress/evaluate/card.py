"""README.md of a shipped checkpoint: a model card that the Hugging Face hub accepts, with the measured tables."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from compress.evaluate import verdict
from compress.evaluate.contract import Report
from compress.evaluate.page import environment, error_summary, title


def render_card(report: Report, directory: str) -> str:
    """The card as Markdown with YAML front matter; `directory` names the checkpoint where no recipe does."""
    layers = [layer for stage in report.stages for layer in stage.layers]
    schemes = Counter(layer.scheme for layer in layers if layer.scheme)
    name = Path(str(report.recipe.get("output") or directory)).name
    front = yaml.safe_dump(front_matter(report, list(schemes)), sort_keys=False, allow_unicode=True)
    return (
        environment(autoescape=False)
        .get_template("card.md")
        .render(
            front=front.strip(),
            report=report,
            name=name,
            title=title(report),
            schemes=schemes,
            asymmetric=any("asym" in scheme for scheme in schemes),
            compressed_tensors=layout(report) == "compressed-tensors",
            accuracy=verdict.accuracy_verdict(report.accuracy) if report.accuracy else None,
            missing=verdict.not_measured(report),
            errors=error_summary(layers),
            error_of="weight" if layers and all(layer.error_of == "weights" for layer in layers) else "output",
        )
    )


def front_matter(report: Report, schemes: list[str]) -> dict[str, Any]:
    """The card's metadata. A base model that is not on the Hub is named in the text only: the Hub takes ids alone."""
    told: dict[str, Any] = {}
    if report.provenance.base_model:
        told |= {"base_model": report.provenance.base_model, "base_model_relation": "quantized"}
    told |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if report.provenance.license:
        told["license"] = report.provenance.license
    told["tags"] = tags(layout(report), schemes)
    return told


def tags(kind: str | None, schemes: list[str]) -> list[str]:
    """`compressed-tensors`, then for each width of weight `int4`, `4-bit`, `w4a16`."""
    found = [kind] if kind else []
    for bits in sorted({match[1] for scheme in schemes if (match := re.match(r"int(\d+)\b", scheme))}):
        found += [f"int{bits}", f"{bits}-bit", f"w{bits}a16"]
    return [*found, "compress-llm"]


def layout(report: Report) -> str | None:
    """The storage format that the recipe's quantize stage names."""
    for stage in report.recipe.get("stages", []):
        if "quantize" in stage:
            return stage["quantize"].get("format", "compressed-tensors")
    return None
