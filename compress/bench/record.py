"""The record of a sweep: every figure with its receipt, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from compress import __version__
from compress.bench.sweep import LevelResult, Ratio
from compress.bench.timing import Limits, Run
from compress.bench.workload import Clients, Level, Workload
from compress.evaluate.environment import commit, hardware, versions


def record(
    results: Sequence[LevelResult],
    workload: Workload,
    limits: Limits | None,
    arms: dict[str, str],
    settings: dict[str, Any],
    receipt: dict[str, Any],
) -> dict[str, Any]:
    """Latencies in milliseconds, rates per second. `receipt` holds what only the caller knows."""
    return {
        "arms": arms,
        "workload": asdict(workload) | {"prompt": str(workload.prompt), "output": str(workload.output)},
        "limits_ms": asdict(limits) if limits else None,
        "settings": settings,
        "levels": [_level(result) for result in results],
        "receipt": _receipt() | receipt,
    }


def _level(result: LevelResult) -> dict[str, Any]:
    return {
        "load": name_of(result.level),
        "warmup_requests": result.warmup,
        "figures": {role: asdict(one) for role, one in result.figures.items()},
        "ratios": {name: _ratio(one) for name, one in result.ratios.items()},
        "control_ci95": result.control,
        "runs": {role: [_run(run) for run in runs] for role, runs in result.runs.items()},
    }


def name_of(level: Level) -> dict[str, float]:
    return {"clients": level.count} if isinstance(level, Clients) else {"requests_per_s": level.rate}


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {
        "value": ratio.value,
        "ci95": ratio.interval,
        "control_ci95": ratio.control,
        "smallest_effect": ratio.smallest_effect,
        "resolved": ratio.resolved,
    }


def _run(run: Run) -> dict[str, Any]:
    """Single requests too, so that other statistics can be taken later. Pieces are in ms after the start."""
    requests = [
        {
            "prompt_tokens": timing.prompt_tokens,
            "output_tokens": timing.output_tokens,
            "pieces_ms": [round(1000 * (piece - timing.start), 3) for piece in timing.pieces],
            "error": timing.error,
        }
        for timing in run.timings
    ]
    return {"seconds": run.seconds, "output_tokens_per_s": run.output_rate, "requests": requests}


def _receipt() -> dict[str, Any]:
    return {
        "tool_version": __version__,
        "commit": commit(),
        "hardware": hardware(),  # of the client, where the arms are servers
        "versions": versions(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
