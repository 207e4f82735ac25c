"""Perplexity of one checkpoint, and records that later runs can be compared with.

A record states everything that a perplexity depends on. Two records are compared only if they agree on all of it:
the same model measures 5.1 or 5.5 by the window alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from compress.errors import RunError, UserError
from compress.evaluate.compare import clustered_mean
from compress.evaluate.divergence import ROWS, LanguageModel, Progress

MUST_AGREE = ("window", "text_sha256", "stride", "tokens", "bos", "first_ids")


class Windows(Protocol):
    """Token ids [N, S] cut from a text, with the hash of that text (compress.calibration.EvaluationText)."""

    @property
    def ids(self) -> torch.Tensor: ...

    @property
    def sha256(self) -> str: ...


@torch.inference_mode()
def window_nll(model: LanguageModel, ids_S: torch.Tensor) -> tuple[float, int]:
    """Sum of nll in nats over positions 1 … S−1, and how many of them are finite (only those are summed)."""
    hidden = model.hidden_states(ids_S)
    total, count = 0.0, 0
    for start in range(0, len(ids_S) - 1, ROWS):
        end = min(start + ROWS, len(ids_S) - 1)
        logits = model.logits(hidden[start:end]).float()
        target = ids_S[start + 1 : end + 1].to(logits.device)
        nll = torch.nn.functional.cross_entropy(logits, target, reduction="none").double()
        finite = nll.isfinite()
        total, count = total + float(nll[finite].sum()), count + int(finite.sum())
    return total, count


def evaluate_checkpoint(model: LanguageModel, ids_NS: torch.Tensor, progress: Progress | None = None) -> dict[str, Any]:
    """Perplexity with an interval clustered by window: {perplexity, ci95, non_finite, windows[{nll_sum, tokens}]}."""
    windows = []
    for i, ids_S in enumerate(ids_NS):
        total, count = window_nll(model, ids_S)
        windows.append({"nll_sum": total, "tokens": count})
        if progress is not None:
            progress(i + 1, len(ids_NS))
    counts = [entry["tokens"] for entry in windows]
    if not sum(counts):
        raise RunError("evaluation: the model's probabilities are finite at no position of the text")
    estimate = clustered_mean([entry["nll_sum"] for entry in windows], counts).exponentiated()
    return {
        "perplexity": estimate.value,
        "ci95": estimate.interval,
        "non_finite": ids_NS.shape[0] * (ids_NS.shape[1] - 1) - sum(counts),
        "windows": windows,
    }


def evaluation_settings(
    text: Windows, *, dtype: str, device: str, versions: Mapping[str, str], stride: int | None, bos: int | None
) -> dict[str, Any]:
    """What a perplexity depends on. `stride` None means windows that do not overlap; `bos` is the id that opens each
    window, or None. `tokens` counts scored positions."""
    window = int(text.ids.shape[1])
    return {
        "text_sha256": text.sha256,
        "window": window,
        "stride": stride or window,
        "tokens": int(text.ids.shape[0]) * (window - 1),
        "bos": bos,
        "first_ids": text.ids[0, :8].tolist(),
        "dtype": dtype,
        "device": device,
        "versions": dict(versions),
    }


def check_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raises UserError naming the first field of MUST_AGREE in which two records' settings differ."""
    for field in MUST_AGREE:
        if first.get(field) != second.get(field):
            raise UserError(
                f"compare: the records differ in {field}: {first.get(field)!r} and {second.get(field)!r}; "
                "only measurements of the same windows of the same text can be compared"
            )


def compare_records(baseline: Mapping[str, Any], compressed: Mapping[str, Any]) -> dict[str, Any]:
    """The perplexity ratio of two records {settings, windows} written by separate runs, paired by window.

    Raises UserError naming the field where they were measured on different text, windows or ids (MUST_AGREE).
    """
    check_settings(baseline["settings"], compressed["settings"])
    pairs = list(zip(baseline["windows"], compressed["windows"], strict=True))
    if any(b["tokens"] != c["tokens"] for b, c in pairs):
        raise UserError("compare: the records differ in finite positions; evaluate both arms together instead")
    counts = np.array([b["tokens"] for b, _ in pairs])
    sums_b = np.array([b["nll_sum"] for b, _ in pairs])
    sums_c = np.array([c["nll_sum"] for _, c in pairs])
    ratio = clustered_mean(sums_c - sums_b, counts).exponentiated()
    return {
        "baseline": math.exp(sums_b.sum() / counts.sum()),
        "compressed": math.exp(sums_c.sum() / counts.sum()),
        "ratio": ratio.value,
        "ci95": ratio.interval,
    }
