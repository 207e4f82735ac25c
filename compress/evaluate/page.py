"""report.html: one self-contained page, drawn from the report and nothing else. No script, no network."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compress.evaluate import plots, verdict
from compress.evaluate.contract import Layer, Report, Stage, Transform

WORST = 10
TEMPLATES = Path(__file__).parent


def environment(autoescape: bool) -> Environment:
    """The templates beside this file, with the filters that both documents use."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "size": size_text,
        "number": number,
        "change": verdict.percent,
        "span": verdict.span,
        "duration": duration,
        "yaml": lambda value: yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=90).strip(),
        "plain": plain_text,
        "heading": lambda key: str(key).replace("_", " "),
        "flattened": flattened,
        "merged": lambda first, second: {**first, **second},
    }
    return made


def render_page(report: Report) -> str:
    """The page as text."""
    layers = [layer for stage in report.stages for layer in stage.layers]
    transforms = [transform for stage in report.stages for transform in stage.transforms]
    return (
        environment(autoescape=True)
        .get_template("report.html")
        .render(
            report=report,
            title=title(report),
            verdicts=_verdicts(report),
            missing=verdict.not_measured(report),
            figures=_figures(report, layers),
            layers=layers,
            schemes=Counter(layer.scheme for layer in layers if layer.scheme),
            worst=worst_layers(layers),
            errors=error_summary(layers),
            error_of="weight" if layers and all(layer.error_of == "weights" for layer in layers) else "output",
            fallbacks=grouped((layer.name, str(layer.fallback)) for layer in layers if layer.fallback),
            skipped=grouped((t.name, t.reason or "no reason recorded") for t in transforms if not t.applied),
            applied=[transform for transform in transforms if transform.applied],
            improvement=_improvement(transforms),
            stage_facts=_stage_facts,
        )
    )


def title(report: Report) -> str:
    """What was compressed: the last part of the model's name."""
    return re.split(r"[/\\]", report.provenance.model.rstrip("/\\"))[-1] or report.provenance.model


def _verdicts(report: Report) -> dict[str, Any]:
    return {
        "size": verdict.size_verdict(report.size) if report.size else None,
        "accuracy": verdict.accuracy_verdict(report.accuracy) if report.accuracy else None,
        "speed": [verdict.speed_verdict(row) for row in report.speed],
    }


def _figures(report: Report, layers: list[Layer]) -> dict[str, Markup]:
    """The figures for which there is something to draw. Their text is this program's own, so it is not escaped."""
    made: dict[str, str] = {}
    if report.size:
        made["size"] = plots.size_bars(report.size)
    if report.accuracy and report.accuracy.kl.survival:
        made["kl"] = plots.kl_survival(report.accuracy.kl)
    if report.accuracy and len(report.accuracy.windows) > 1:
        made["windows"] = plots.window_pairs(report.accuracy.windows)
    if plots.by_kind(measured(layers)):
        made["layers"] = plots.layer_errors(measured(layers))
    return {name: Markup(svg) for name, svg in made.items()}


def measured(layers: Iterable[Layer]) -> list[Layer]:
    """Layers with a finite error."""
    return [layer for layer in layers if layer.error is not None and math.isfinite(layer.error)]


def worst_layers(layers: Iterable[Layer]) -> list[Layer]:
    return sorted(measured(layers), key=lambda layer: layer.error or 0.0, reverse=True)[:WORST]


def error_summary(layers: Iterable[Layer]) -> dict[str, float] | None:
    """Medians of the method's errors and of round-to-nearest's, and how many layers came out worse than the latter."""
    pairs = [
        (layer.error, layer.rtn_error)
        for layer in measured(layers)
        if layer.error is not None and layer.rtn_error is not None and math.isfinite(layer.rtn_error)
    ]
    if not pairs:
        return None
    return {
        "count": len(pairs),
        "error": statistics.median(error for error, _ in pairs),
        "rtn": statistics.median(rtn for _, rtn in pairs),
        "worse": sum(error > rtn for error, rtn in pairs),
    }


def grouped(items: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(name, reason) pairs as (reason, names); reasons that differ only by the block's number are one."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, reason in items:
        groups[re.sub(r"\.\d+\.", ".*.", reason)].append(name)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _improvement(transforms: Iterable[Transform]) -> float | None:
    """Median of error after / error before, over the transforms that were applied."""
    ratios = [t.error_after / t.error_before for t in transforms if t.applied and t.error_before and t.error_after]
    return statistics.median(ratios) if ratios else None


def _stage_facts(stage: Stage) -> dict[str, Any]:
    """What a stage recorded beside the contract's keys, as far as it is short."""
    facts = {**stage.method, **(stage.model_extra or {})}
    return flattened({key: value for key, value in facts.items() if len(json.dumps(value, default=str)) < 300})


def size_text(count: float) -> str:
    """Bytes in decimal units: 1 MB is 10⁶ bytes."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit:
            return f"{count / limit:,.2f} {unit}"
    return f"{count:.0f} B"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits; a dash for what was not measured."""
    if value is None:
        return "—"
    if not math.isfinite(value):
        return "not finite"
    if value and (abs(value) < 1e-4 or abs(value) >= 1e6):
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10**digits:
        return f"{float(f'{value:.{digits}g}'):,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def flattened(facts: dict[str, Any]) -> dict[str, Any]:
    """Mappings inside a mapping spelled out as `outer inner`, a list of mappings as `outer 1 inner`."""
    told: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            told |= {f"{key} {inner}": item for inner, item in flattened(value).items()}
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for place, item in enumerate(value, start=1):
                told |= flattened({f"{key} {place}" if len(value) > 1 else key: item})
        elif key.endswith("_bytes") and isinstance(value, int):
            told[key.removesuffix("_bytes")] = size_text(value)
        else:
            told[key] = value
    return told


def plain_text(value: Any) -> str:
    """A fact of any shape in one line: numbers grouped by thousands, lists and mappings spelled out."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')}: {plain_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, int) for item in value):
            return "[" + " ".join(map(str, value)) + "]"
        return "; ".join(plain_text(item) for item in value) or "none"
    return str(value)
