"""The result in a few lines for the terminal, drawn from report.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary(report: Mapping[str, Any]) -> list[str]:
    """Size, accuracy, speed and warnings: what it cost, and what it saved."""
    lines = []
    size = report.get("size")
    if size:
        before, after = size["baseline_bytes"], size["compressed_bytes"]
        line = f"size        {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB  ({before / after:.2f}x smaller"
        lines.append(line + (f", {size['bits_per_weight']:.2f} bits per weight)" if size["bits_per_weight"] else ")"))
    if report.get("accuracy"):
        lines += accuracy_lines(report["accuracy"])
    lines += [speed_line(row) for row in report.get("speed") or []]
    lines += [f"warning     {warning}" for warning in report.get("warnings") or []]
    return lines


def accuracy_lines(accuracy: Mapping[str, Any]) -> list[str]:
    """Perplexity, KL divergence and top-1 agreement, with intervals clustered by window."""
    perplexity, kl = accuracy["perplexity"], accuracy["kl"]
    return [
        f"perplexity  {perplexity['baseline']:.3f} -> {perplexity['compressed']:.3f}  "
        f"(x{perplexity['ratio']:.4f}{_interval(perplexity['ci95'], 4)})",
        f"KL          {kl['mean']:.4f} nats a token{_interval(kl['ci95'], 4)}, p99 {kl['p99']:.3f}",
        f"top-1       {100 * accuracy['top1_agreement']:.2f} % agree, over {accuracy['tokens']} tokens",
    ]


def speed_line(row: Mapping[str, Any]) -> str:
    baseline, compressed = row["baseline"], row["compressed"]
    verdict = "" if row.get("resolved") else "; not resolved from this machine's noise"
    return (
        f"speed       batch {row['batch']}: decode {baseline['tokens_per_s']:.1f} -> {compressed['tokens_per_s']:.1f} "
        f"tokens/s (x{row['ratio']:.2f}{_interval(row['ci95'], 2)}{verdict}), prompt "
        f"{baseline['prompt_tokens_per_s']:.0f} -> {compressed['prompt_tokens_per_s']:.0f} tokens/s"
    )


def _interval(ci95: Any, digits: int) -> str:
    return f", 95 % CI {ci95[0]:.{digits}f} to {ci95[1]:.{digits}f}" if ci95 else ""
