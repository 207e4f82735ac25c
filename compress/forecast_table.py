"""A forecast as a table for a terminal, or as plain text for a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from compress.forecast import SPEED_BATCHES, SPEED_CONTEXT, Forecast, LayerForecast, SpeedForecast
from compress.selection import local_name

PIPED_WIDTH = 100
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def print_forecast(forecast: Forecast, file: TextIO | None = None) -> None:
    """Print to `file` (standard output): at the terminal's width, or 100 columns without colours where it is none."""
    stream = file or sys.stdout
    Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False).print(render(forecast))


def render(forecast: Forecast) -> Group:
    """The layer table, then totals, needs and speed; identical linears of neighbouring blocks share a row."""
    return Group(_layers(forecast), _totals(forecast), _speed(forecast))


def fold(layers: Iterable[LayerForecast]) -> list[tuple[str, LayerForecast, int]]:
    """(name, one of them, how many) for linears that differ only in their layer number.

    `model.layers.0–39.mlp.down_proj`; a gap gives `model.layers.0–3,36–39.mlp.down_proj`.
    """
    alike: dict[tuple[object, ...], list[LayerForecast]] = {}
    for layer in layers:
        key = (local_name(layer.name), layer.shape, layer.scheme, layer.stored_bytes)
        alike.setdefault(key, []).append(layer)
    rows = []
    for members in alike.values():
        indices = [int(found[1]) for layer in members if (found := _LAYER.match(layer.name))]
        local = local_name(members[0].name)
        rows.append((f"model.layers.{_ranges(indices)}.{local}" if indices else local, members[0], len(members)))
    return rows


def _ranges(indices: list[int]) -> str:
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


def _layers(forecast: Forecast) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("linear", overflow="fold")
    for title in ("out × in", "scheme", "bits/weight", "size"):
        table.add_column(title, justify="left" if title == "scheme" else "right", no_wrap=True)
    for name, layer, count in fold(forecast.layers):
        table.add_row(
            f"{name} ×{count}" if count > 1 else name,
            f"{layer.shape[0]} × {layer.shape[1]}",
            str(layer.scheme) if layer.scheme else Text("kept (tied)" if layer.tied else "kept (ignored)", style="dim"),
            f"{layer.bits_per_weight:.2f}",
            size(count * layer.stored_bytes),
        )
    return table


def _totals(forecast: Forecast) -> RenderableType:
    cost = forecast.cost
    ratio = forecast.baseline_bytes / forecast.compressed_bytes
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    grid.add_row("model", f"{forecast.model}, {_count(forecast.parameters)} parameters")
    grid.add_row(
        "size",
        f"{size(forecast.baseline_bytes)} → {size(forecast.compressed_bytes)} ({ratio:.2f} times smaller, "
        f"{forecast.bits_per_weight:.2f} bits per weight over all); {size(forecast.dense_bytes)} of it stays dense: "
        "embedding, norms and kept linears",
    )
    grid.add_row("peak memory", f"{size(cost.memory_bytes)}: {_parts(cost.memory)}")
    grid.add_row("scratch disk", f"{size(cost.disk_bytes)}: {_parts(cost.disk)}")
    tokens = f"{cost.tokens:,} calibration tokens" if cost.tokens else "no calibration data"
    grid.add_row(
        "time",
        f"about {duration(forecast.seconds)} for quantize: {tokens}, {cost.flops:.2g} FLOPs at "
        f"{forecast.flops_per_second / 1e9:.0f} GFLOP/s; evaluation comes on top",
    )
    return grid


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{what} {size(amount)}" for what, amount in parts.items())


def _speed(forecast: Forecast) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("hardware")
    for batch in SPEED_BATCHES:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    for row in forecast.speed:
        table.add_row(row.title, *(_change(row, batch) for batch in SPEED_BATCHES))
    title = f"Least time per token at {SPEED_CONTEXT} tokens of context (roofline): 16 bits → this plan"
    return Group(Text(), Text(title, style="bold"), table)


def _change(row: SpeedForecast, batch: int) -> str:
    before, after = row.baseline[batch], row.compressed[batch]
    if not after.fits:
        return "does not fit"
    if not before.fits:
        return f"does not fit → {after.tpot_ms:.2f} ms"
    return f"{before.tpot_ms:.2f} → {after.tpot_ms:.2f} ms, ×{row.ratio(batch):.2f}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def size(amount: float) -> str:
    """1 GB is 10⁹ bytes: the unit of model hubs and disks."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if amount >= scale:
            return f"{amount / scale:.2f} {unit}" if unit == "GB" else f"{amount / scale:.1f} {unit}"
    return f"{amount / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
