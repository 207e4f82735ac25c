"""A sweep as a table for a terminal, with what must be said beside it, and the comparison in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compress.bench.sweep import LevelResult, Ratio
from compress.bench.timing import Figures, Spread
from compress.bench.workload import Clients, Level
from compress.evaluate.compare import Interval

HEADLINES = {"output_tokens_per_s": "output", "tpot": "TPOT", "ttft": "TTFT"}
UNSHOWN = " ?"  # behind a ratio that may be noise
NOISY = 10  # times: an interval this wide, or a control that strays this far, says nothing
TOO_NOISY = "unknown: too noisy"
SEVERAL_TOKENS = 1.02  # tokens per piece above which ITL is not TPOT


def render(results: Sequence[LevelResult]) -> Group:
    """The table, the notes and, with a baseline, the summary line."""
    lines: list[RenderableType] = [_table(results)]
    lines += [_line(told, "dim") for told in notes(results)]
    lines += [_line(told, "bold") for told in summary(results)]
    return Group(*lines)


def _line(told: str, style: str) -> Text:
    """Folded by a terminal alone: in a pipe it stays one line, for grep."""
    return Text(told, style=style, no_wrap=True, overflow="ignore")


def _table(results: Sequence[LevelResult]) -> Table:
    compared = any(result.ratios for result in results)
    goodput = any(one.goodput is not None for result in results for one in result.figures.values())
    failed = any(one.failed for result in results for one in result.figures.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("load", *(["arm"] if compared else [])):
        table.add_column(title, no_wrap=True)
    titles = ["output\ntok/s", "total\ntok/s", "req/s"]
    titles += [*(["good\nreq/s"] if goodput else []), *(["failed"] if failed else [])]
    titles += ["TTFT ms\np50 / p99", "TPOT ms\np50 / p99", "ITL ms\np50 / p99"]
    titles += [f"{HEADLINES[headline(results)]}\n×"] if compared else []
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        for place, (role, one) in enumerate(result.figures.items()):
            ratio = result.ratios.get(headline(results)) if role == "compressed" else None
            cells = [_rate(one.output_tokens_per_s), _rate(one.total_tokens_per_s), _rate(one.requests_per_s)]
            cells += [_rate(one.goodput or 0.0)] if goodput else []
            cells += [f"{one.failed} of {one.requests}"] if failed else []
            cells += [_spread(one.ttft), _spread(one.tpot), _spread(one.itl)]
            cells += [_ratio(ratio) if ratio else ""] if compared else []
            last = place == len(result.figures) - 1
            head = ["" if place else str(result.level), *([role] if compared else [])]
            table.add_row(*head, *cells, end_section=compared and last)
    return table


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}" + ("" if ratio.resolved else UNSHOWN)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _spread(spread: Spread | None) -> str:
    return f"{_ms(spread.median)} / {_ms(spread.p99)}" if spread else "–"


def notes(results: Sequence[LevelResult]) -> Iterator[str]:
    """Warm-up, failures and their reasons, and whatever else makes a figure mean something else."""
    warmup = [result.warmup for result in results]
    if any(warmup):
        noun = "request" if warmup == [1] else "requests"
        each = " of each arm" if any(len(result.figures) > 1 for result in results) else ""
        yield f"warm-up     {', '.join(map(str, warmup))} {noun}{each}, not measured"
    else:
        yield "warm-up     none: the first requests are measured too"
    unshown = [str(r.level) for r in results if (ratio := r.ratios.get(headline(results))) and not ratio.resolved]
    if unshown:
        yield f"?           {', '.join(unshown)}: not told from noise; more rounds, more requests or a quieter machine"
    for result in results:
        if "baseline" not in result.figures and result.control is not None:
            yield f"A/A         {result.level}: output tok/s of one run over another {_interval(result.control)}"
        for role, one in result.figures.items():
            yield from _cautions(result.level, role, one)


def _cautions(level: Level, role: str, one: Figures) -> Iterator[str]:
    where = f"{level}, {role}"
    for error, times in one.errors.items():
        yield f"failed      {where}: {times} of {one.requests} requests, in no latency or rate: {error}"
    if one.short:
        answers = "answer has" if one.short == 1 else "answers have"
        yield f"short       {where}: {one.short} {answers} fewer tokens than asked; the server ends them itself"
    if one.tokens_per_piece is not None and one.tokens_per_piece > SEVERAL_TOKENS:
        told = f"{one.tokens_per_piece:.2f} tokens a piece (speculation, or text held back)"
        yield f"pieces      {where}: {told}: ITL is the gap between pieces, TPOT the time of a token"
    if one.preemptions:
        yield f"preempted   {where}: {one.preemptions} times; the cache is too small for this load"


def headline(results: Sequence[LevelResult]) -> str:
    """Which ratio tells most. An open loop has the rate of its arrivals, whatever serves it: there a latency does."""
    if isinstance(results[0].level, Clients):
        return "output_tokens_per_s"
    return "tpot" if any("tpot" in result.ratios for result in results) else "ttft"


def summary(results: Sequence[LevelResult]) -> list[str]:
    """One line on the level of the heaviest load; none without a baseline."""
    name = headline(results)
    compared = [result for result in results if name in result.ratios]
    if not compared:
        return []
    last = compared[-1]
    head, tpot = last.ratios[name], last.ratios.get("tpot")
    if name != "output_tokens_per_s":
        fast = f"{HEADLINES[name]} {head.value:.2f} times as fast as the baseline's"
        return [f"compressed  {fast} at {last.level} ({_certainty(head)})"]
    line = f"compressed  {head.value:.2f} times the baseline's output tok/s at {last.level} ({_certainty(head)})"
    return [line + (f"; TPOT {tpot.value:.2f} times as fast" if tpot else "")]


def _certainty(ratio: Ratio) -> str:
    """The interval, the smallest effect that shows on this machine, and whether the ratio is one."""
    if ratio.interval is None:
        return "one pair of runs: no interval"
    smallest = ratio.smallest_effect
    if smallest is None:
        effect = "unknown: one round"
    else:
        effect = TOO_NOISY if smallest > NOISY - 1 else f"{100 * smallest:.1f} %"
    verdict = "" if ratio.resolved else ", so no difference is shown"
    return f"95 % {_interval(ratio.interval)}; smallest effect seen here {effect}{verdict}"


def _interval(interval: Interval) -> str:
    low, high = interval
    if high > NOISY * low:
        return TOO_NOISY
    return f"{low:.3f}–{high:.3f}"
