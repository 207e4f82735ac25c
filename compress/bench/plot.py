"""The sweep as a picture: what each stream gets against what the machine gives in all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import StrMethodFormatter

from compress.bench.sweep import LevelResult, tpot_speed
from compress.bench.timing import Run
from compress.bench.workload import Clients, Workload
from compress.evaluate.plots import BASELINE, COMPRESSED, MUTED, STYLE

ARMS = {"baseline": (BASELINE, "s", "--"), "compressed": (COMPRESSED, "o", "-")}


def save_plot(results: Sequence[LevelResult], workload: Workload, names: dict[str, str], path: Path) -> None:
    """Output tokens per second against median TPOT, one point for each level; `names` go by role."""
    with mpl.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(7.2, 4.6))
        axes = figure.subplots()
        for role in results[0].figures:
            _arm(axes, results, role, f"{role}: {tail(names[role])}" if len(names) > 1 else tail(names[role]))
        axes.set_xlim(0, 1.08 * axes.dataLim.x1)  # room for the numbers at the last points
        axes.set_ylim(0, 1.10 * axes.dataLim.y1)
        axes.set_xlabel("TPOT, median, ms per token   (left is better for each stream)")
        axes.set_ylabel("output tokens/s, all streams   (up is better)")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        load = "clients" if isinstance(results[0].level, Clients) else "requests/s"
        several = any(len(runs) > 1 for runs in results[0].runs.values())
        told = f"prompt {workload.prompt}, output {workload.output} tokens; numbers: {load}"
        axes.set_title(
            told + ("; small dots: single runs" if several else ""), loc="left", fontsize=9, color=MUTED, pad=10
        )
        figure.legend(loc="outside upper left", handlelength=3)  # outside: curves may go anywhere
        figure.savefig(path, dpi=150)


def _arm(axes: Axes, results: Sequence[LevelResult], role: str, label: str) -> None:
    color, marker, line = ARMS[role]
    shown = [result for result in results if result.figures[role].tpot is not None]
    x = [tpot.median for result in shown if (tpot := result.figures[role].tpot) is not None]
    y = [result.figures[role].output_tokens_per_s for result in shown]
    for runs in (result.runs[role] for result in shown if len(result.runs[role]) > 1):
        axes.plot(*_points(runs), ".", color=color, alpha=0.35, markersize=5)
    axes.plot(x, y, line, marker=marker, color=color, linewidth=1.8, markersize=7, label=label)
    above = role == "compressed"
    for result, at in zip(shown, zip(x, y, strict=True), strict=True):
        number = f"{result.level.count}" if isinstance(result.level, Clients) else f"{result.level.rate:g}"
        axes.annotate(
            number,
            at,
            (-7, 7) if above else (7, -7),
            textcoords="offset points",
            ha="right" if above else "left",
            va="bottom" if above else "top",
            color=color,
            fontweight="bold",
            path_effects=[withStroke(linewidth=3, foreground="white")],  # readable where a line passes under it
        )


def _points(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """(TPOT in ms, output tokens/s) of each run, where it has both."""
    points = [(1000 / speed, run.output_rate) for run in runs if (speed := tpot_speed(run)) > 0]
    return [x for x, _ in points], [y for _, y in points]


def tail(name: str, most: int = 44) -> str:
    """A name as long as a legend bears; paths differ at their ends."""
    return name if len(name) <= most else "…" + name[1 - most :]
