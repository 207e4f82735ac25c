"""`compress bench` from its options to its table, record and picture."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from typing import Any

from rich.console import Group

from compress.bench import options as read
from compress.bench.arms import engine_arms, engine_settings, server_arms, workload_of
from compress.bench.options import Options
from compress.bench.plot import save_plot
from compress.bench.record import record
from compress.bench.sweep import LevelResult, sweep
from compress.bench.table import render
from compress.bench.timing import Limits
from compress.bench.workload import Level, Workload
from compress.evaluate.speed import load_average
from compress.progress import Reporter


def bench(options: Options, reporter: Reporter) -> Group:
    """Measure, write what was asked for, and return what to print.

    Raises UserError for requests that do not fit a model, before one is loaded; RunError where an arm fails.
    """
    levels, limits = read.levels(options), read.limits(options.goodput)
    workload = workload_of(options)
    load_before = load_average()
    with ExitStack() as stack:
        arms = server_arms(options, workload, stack) if options.url else engine_arms(options, levels)
        names = {role: arm.name for role, arm in arms.items()}
        results = _sweep(options, arms, workload, levels, limits, reporter)
    if options.json is not None:
        receipt = {
            "command": command_line(sys.argv[1:], options.api_key),
            "load_before": load_before,
            "load_after": load_average(),
        }
        told = record(results, workload, limits, names, _settings(options), receipt)
        options.json.write_text(json.dumps(told, allow_nan=False) + "\n")
    if options.plot is not None:
        save_plot(results, workload, names, options.plot)
    return render(results)


def _sweep(
    options: Options,
    arms: dict[str, Any],
    workload: Workload,
    levels: list[Level],
    limits: Limits | None,
    reporter: Reporter,
) -> list[LevelResult]:
    rounds = read.rounds_of(options)
    runs = 2 * rounds if len(arms) == 2 else rounds
    each = [read.warmup_of(options, level) + runs * read.requests_of(options, level) for level in levels]
    with reporter.phase("bench", len(arms) * sum(each)) as phase:
        return sweep(
            arms,
            workload,
            levels,
            requests=lambda level: read.requests_of(options, level),
            warmup=lambda level: read.warmup_of(options, level),
            rounds=rounds,
            limits=limits,
            progress=lambda note: phase.advance(1, note),
        )


def _settings(options: Options) -> dict[str, Any]:
    """What decided the figures besides the workload."""
    engine = {name: str(value) if name == "draft" else value for name, value in engine_settings(options).items()}
    where = {"served": True} if options.url else {"served": False, "device": options.device}
    return where | {"rounds": read.rounds_of(options)} | engine


def command_line(arguments: list[str], secret: str | None) -> str:
    """What was typed, without the API key."""
    shown = [argument.replace(secret, "***") if secret else argument for argument in arguments]
    return shlex.join(["compress", *shown])
