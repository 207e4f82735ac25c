"""The figures of a report in words. A result that the data cannot tell from none says so."""

from __future__ import annotations

from typing import Literal, NamedTuple

from compress.evaluate.contract import Accuracy, Interval, Report, Size, SpeedRow

NEAR = 1.01  # a perplexity ratio below this is called small

FAR = 0.05  # a mean KL in nats above this is a loss whatever perplexity says: good 4-bit models stay below
SURPRISE = 1.05  # a speed-up beyond its prediction by this factor asks for an explanation

Level = Literal["good", "fair", "bad", "open"]


class Verdict(NamedTuple):
    level: Level
    label: str  # two or three words, so that colour never stands alone
    text: str


def percent(ratio: float, digits: int = 2) -> str:
    """A ratio as a signed change: 1.0123 → `+1.23 %`. Large changes lose their decimals."""
    change = 100 * (ratio - 1)
    return f"{change:+.{digits if abs(change) < 10 else 0}f} %"


def span(interval: Interval | None, form: str = "{:.3f}") -> str:
    """`0.998 to 1.004`, or a dash where there is no interval."""
    return "—" if interval is None else f"{form.format(interval[0])} to {form.format(interval[1])}"


def change_span(interval: Interval) -> str:
    return f"95 % interval {percent(interval[0])} to {percent(interval[1])}"


def accuracy_verdict(accuracy: Accuracy) -> Verdict:
    """What compression cost on the evaluation text, from the interval of the perplexity ratio."""
    ratio, interval = accuracy.perplexity.ratio, accuracy.perplexity.ci95
    if accuracy.non_finite:
        text = f"{accuracy.non_finite} positions gave no finite probability and are left out of every figure."
        return Verdict("bad", "numbers missing", text)
    if interval is None:
        return Verdict(
            "open", "no interval", f"Perplexity {percent(ratio)} on one window of text: too little for an interval."
        )
    told = f"{percent(ratio)} ({change_span(interval)})"
    if interval[0] <= 1 <= interval[1]:
        if accuracy.kl.ci95 is not None and accuracy.kl.ci95[0] > FAR:
            text = (
                f"Perplexity {told} shows no difference, but the predictions do: mean KL {accuracy.kl.mean:.3g} nats, "
            )
            text += f"{100 * accuracy.top1_agreement:.1f} % of tokens with the same first choice."
            return Verdict("fair", "predictions differ", text)
        exact = accuracy.kl.max == 0
        rest = "the predictions are identical." if exact else f"mean KL is {accuracy.kl.mean:.3g} nats all the same."
        return Verdict("good" if exact else "open", "no difference detected", f"Perplexity {told}; {rest}")
    if interval[1] < 1:
        return Verdict(
            "fair", "lower perplexity", f"Perplexity falls, {told}: the models differ, not for the worse on this text."
        )
    if interval[1] <= NEAR:
        return Verdict("good", "small loss", f"Perplexity rises by less than {percent(NEAR, 0)[1:]}: {told}.")
    return Verdict("fair" if interval[0] < NEAR else "bad", "measurable loss", f"Perplexity rises, {told}.")


def size_verdict(size: Size) -> Verdict:
    factor = size.baseline_bytes / size.compressed_bytes
    bits = "" if size.bits_per_weight is None else f", {size.bits_per_weight:.2f} bits per weight overall"
    label = "smaller" if factor > 1 else "not smaller"
    return Verdict("good" if factor > 1 else "bad", label, f"{factor:.2f} times smaller{bits}.")


def speed_verdict(row: SpeedRow) -> Verdict:
    """Decoding speed of one workload, or that the machine's own noise hides it."""
    told = f"{row.ratio:.2f} times the baseline's decoding speed (95 % interval {span(row.ci95, '{:.2f}')})"
    if not row.resolved:
        return Verdict("open", "not resolved", f"Batch {row.batch}: {told} cannot be told from this machine's noise.")
    level, label = ("good", "faster") if row.ratio > 1 else ("bad", "slower")
    if row.predicted_ratio is not None and row.ratio > SURPRISE * row.predicted_ratio:
        told += f", more than the bytes read explain ({row.predicted_ratio:.2f}): the arithmetic is faster too"
    return Verdict(level, label, f"Batch {row.batch}: {told}.")


def not_measured(report: Report) -> list[str]:
    """What a reader might take for granted and nobody measured."""
    missing = []
    if report.accuracy is None:
        missing.append("accuracy: the recipe names no evaluation text")
    elif not report.accuracy.tasks:
        missing.append("tasks (multiple choice, generation): perplexity and KL alone do not show every loss")
    if not report.speed:
        missing.append("speed: the recipe asks for no measurement")
    if report.verified is None:
        missing.append("verification of the files written")
    missing.append("loading in vLLM or other engines: only the bundled runtime was run")
    return missing
