"""The report's figures: SVG text to put inline into HTML, its colours CSS variables so that they follow light and dark.

Text stays text. Colours are Okabe and Ito's, told apart by colour-blind readers too; the arms also differ in shape.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from compress.evaluate.contract import Divergence, Layer, Size, WindowResult

INK, MUTED, GRID = "#1b1f24", "#6a737d", "#d8dde3"
BASELINE, COMPRESSED = "#0072b2", "#d55e00"
PARTS = {"linears": "#0073b3", "embedding": "#56b4e9", "head": "#009e73", "other": "#999999"}
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    BASELINE: "var(--baseline)",
    COMPRESSED: "var(--compressed)",
    "#0073b3": "var(--part-linears)",
    "#56b4e9": "var(--part-embedding)",
    "#009e73": "var(--part-head)",
    "#999999": "var(--part-other)",
}
DECADE = 10  # values that span more are drawn on a logarithmic axis
FEW = 0.02  # of the points: these may lie below the axis, or a few tiny errors press all others together
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(name: str, label: str, width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """One figure of width × height inches as inline SVG; `label` is what a screen reader says."""
    with mpl.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(width, height))
        figure.patch.set_alpha(0)
        paint(figure)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return inline(buffer.getvalue(), name, label)


def inline(svg: str, name: str, label: str) -> str:
    """Strip what only a file needs, keep identifiers apart from other figures', and turn colours into variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width="[^"]*" )?height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def size_bars(size: Size) -> str:
    """Bytes of both checkpoints by what they hold; where no parts are known, as one bar each."""
    names = [name for name in PARTS if (part := size.parts.get(name)) and part.baseline_bytes + part.compressed_bytes]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for row, arm in enumerate(("baseline_bytes", "compressed_bytes")):
            left = 0.0
            for name in names or ["linears"]:
                value = getattr(size.parts[name] if names else size, arm) / 1e6
                first = row == 0 and bool(names)
                axes.barh(row, value, left=left, color=PARTS[name], height=0.6, label=name if first else None)
                left += value
            axes.annotate(f"{left:,.1f} MB", (left, row), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks([0, 1], ["baseline", "compressed"])
        axes.invert_yaxis()
        axes.set_xlabel("MB (10⁶ bytes) of tensors stored")
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.16 * max(size.baseline_bytes, size.compressed_bytes) / 1e6)
        if names:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))

    return draw("size", "Size of both checkpoints by part", 9.6, 2.1, paint)


def kl_survival(kl: Divergence) -> str:
    """The share of tokens whose KL exceeds x, both axes logarithmic."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        points = [(x, share) for x, share in kl.survival if share > 0]
        axes.loglog(*zip(*points, strict=True), color=COMPRESSED, linewidth=2)
        for value, name, side in ((kl.median, "median", -1), (kl.mean, "mean", 1), (kl.p99, "99 %", -1)):
            share = float(np.interp(np.log(max(value, 1e-9)), np.log([p[0] for p in points]), [p[1] for p in points]))
            axes.plot([value], [share], "o", color=INK, markersize=4)
            axes.annotate(
                f"{name} {value:.3g}",
                (value, share),
                (6 * side, 4 * side),
                textcoords="offset points",
                ha="right" if side < 0 else "left",
                va="top" if side < 0 else "bottom",
            )
        axes.set_xlabel("KL(baseline ‖ compressed), nats")
        axes.set_ylabel("share of tokens above")

    return draw("kl", "Share of tokens above each KL divergence", 4.9, 3.4, paint)


def window_pairs(windows: list[WindowResult]) -> str:
    """Each window's change of nll against its nll under the baseline, with the mean of all tokens."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        baseline = np.array([w.baseline_nll for w in windows])
        change = np.array([w.compressed_nll - w.baseline_nll for w in windows])
        mean = float(np.average(change, weights=[w.tokens for w in windows]))
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.axhline(mean, color=COMPRESSED, linewidth=1.2, linestyle="--")
        axes.plot(baseline, change, "o", color=COMPRESSED, markersize=4.5, alpha=0.75)
        axes.set_title(f"dashed: mean of all tokens, {mean:+.3g}", loc="right")
        axes.set_xlabel("baseline nll of the window, nats per token")
        axes.set_ylabel("change of nll")

    return draw("windows", "Change of nll of each window of text", 4.9, 3.4, paint)


def layer_errors(layers: Iterable[Layer]) -> str:
    """Relative error by block, one panel for each kind of linear: the method's and round-to-nearest's."""
    kinds = by_kind(layers)
    columns = min(4, len(kinds))
    rows = -(-len(kinds) // columns)
    values = [v for panel in kinds.values() for _, *pair in panel for v in pair if v is not None and v > 0]
    wide = bool(values) and max(values) > DECADE * min(values)
    floor = float(np.quantile(values, FEW)) / 3 if wide else 0.0

    def paint(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, (kind, panel) in zip(grid.flat, kinds.items(), strict=False):
            _panel(axes, kind, panel, wide, floor)
        if wide:
            grid[0][0].set_ylim(bottom=floor)
        for place, axes in enumerate(grid.flat):
            if place >= len(kinds):
                axes.set_axis_off()
            elif place + columns >= len(kinds):
                axes.tick_params(labelbottom=True)
                axes.set_xlabel("block")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
        figure.supylabel("relative error", fontsize=10.5)

    return draw("layers", "Relative error of every linear, by block", 9.6, 0.7 + 1.9 * rows, paint)


def _panel(axes: Axes, kind: str, panel: list[tuple[int, float | None, float | None]], log: bool, floor: float) -> None:
    """One kind of linear; what lies below the `floor` of the axis is a triangle at its edge."""
    blocks = [block for block, _, _ in panel]
    missing = float("nan")
    plain = [missing if rtn is None or (log and rtn <= 0) else rtn for _, _, rtn in panel]
    error = [missing if own is None or (log and own <= 0) else own for _, own, _ in panel]
    axes.plot(
        blocks, plain, "s-", color=BASELINE, markersize=3, linewidth=1, markerfacecolor="none", label="round to nearest"
    )
    axes.plot(blocks, error, "o-", color=COMPRESSED, markersize=3, linewidth=1.4, label="this checkpoint")
    for values, color in ((plain, BASELINE), (error, COMPRESSED)):
        below = [block for block, value in zip(blocks, values, strict=True) if value < floor]
        for mark in axes.plot(below, [floor] * len(below), "v", color=color, markersize=6, clip_on=False):
            mark.set_in_layout(False)
    axes.set_title(kind, loc="left")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def by_kind(layers: Iterable[Layer]) -> dict[str, list[tuple[int, float | None, float | None]]]:
    """{"q_proj": [(block, error, rtn_error), …], …}; a linear outside the blocks is left to the table."""
    kinds: dict[str, list[tuple[int, float | None, float | None]]] = {}
    for layer in layers:
        found = re.search(r"\.(\d+)\.(?:.*\.)?([^.]+)$", layer.name)
        if found:
            kinds.setdefault(found[2], []).append((int(found[1]), layer.error, layer.rtn_error))
    return {kind: sorted(panel, key=lambda point: point[0]) for kind, panel in kinds.items()}
