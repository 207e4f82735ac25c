"""What compression did to the predictions: both models on the same windows of text, token by token.

Shapes: N windows, S tokens in a window, T = S − 1 scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from compress.errors import RunError, UserError
from compress.evaluate import contract
from compress.evaluate.compare import clustered_mean

ROWS = 256  # positions whose logits are in memory at once
Progress = Callable[[int, int], None]


class LanguageModel(Protocol):
    """What an evaluation needs of a model: final-normed hidden states [S, hidden], then logits of chosen rows."""

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class TokenScores:
    """Each [T]: nll of both arms and KL(baseline ‖ compressed), in nats; whether the most likely tokens agree."""

    baseline_nll_T: np.ndarray
    compressed_nll_T: np.ndarray
    kl_T: np.ndarray
    agree_T: np.ndarray

    @property
    def finite_T(self) -> np.ndarray:
        return np.isfinite(self.baseline_nll_T) & np.isfinite(self.compressed_nll_T) & np.isfinite(self.kl_T)


def score_rows(
    baseline_TV: torch.Tensor, compressed_TV: torch.Tensor, target_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """nll of both arms, KL = Σ_v p(v) (ln p(v) − ln q(v)) and top-1 agreement, each [T], from float32 logits.

    A token with p(v) = 0 adds nothing. The sum over the vocabulary is in float64; a KL that rounds below zero is 0.
    """
    log_p = torch.log_softmax(baseline_TV.float(), dim=-1)
    log_q = torch.log_softmax(compressed_TV.float(), dim=-1)
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    kl_T = terms.sum(dim=-1, dtype=torch.float64).clamp(min=0)
    column = target_T[:, None]
    agree_T = log_p.argmax(dim=-1) == log_q.argmax(dim=-1)
    return -log_p.gather(1, column)[:, 0].double(), -log_q.gather(1, column)[:, 0].double(), kl_T, agree_T


@torch.inference_mode()
def score_window(baseline: LanguageModel, compressed: LanguageModel, ids_S: torch.Tensor) -> TokenScores:
    """Score positions 1 … S−1 of one window. Logits exist for ROWS positions of both arms at a time.

    Vocabularies padded to different sizes are cut to the smaller one. Raises UserError where a token of the text lies
    outside it.
    """
    hidden_p, hidden_q = baseline.hidden_states(ids_S), compressed.hidden_states(ids_S)
    parts: list[list[np.ndarray]] = []
    for start in range(0, len(ids_S) - 1, ROWS):
        end = min(start + ROWS, len(ids_S) - 1)
        logits_p = baseline.logits(hidden_p[start:end])
        logits_q = compressed.logits(hidden_q[start:end]).to(logits_p.device)
        vocab = min(logits_p.shape[-1], logits_q.shape[-1])
        target_T = ids_S[start + 1 : end + 1].to(logits_p.device)
        _check_targets(target_T, vocab)
        scores = score_rows(logits_p[:, :vocab], logits_q[:, :vocab], target_T)
        parts.append([score.cpu().numpy() for score in scores])
    return TokenScores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _check_targets(target_T: torch.Tensor, vocab: int) -> None:
    largest = int(target_T.max())
    if largest >= vocab:
        raise UserError(f"evaluation text: token id {largest} lies outside the models' common vocabulary of {vocab}")


def compare_models(
    baseline: LanguageModel, compressed: LanguageModel, ids_NS: torch.Tensor, progress: Progress | None = None
) -> contract.Accuracy:
    """Run both arms over every window; means over tokens, intervals clustered by window.

    Positions where either arm is not finite are left out of both and counted in `non_finite`. Raises RunError where
    no position is finite, UserError for windows too short to score.
    """
    if ids_NS.ndim != 2 or ids_NS.shape[0] < 1 or ids_NS.shape[1] < 2:
        raise UserError(f"evaluation text: needs windows of at least 2 tokens, not the shape {tuple(ids_NS.shape)}")
    windows = []
    for i, ids_S in enumerate(ids_NS):
        windows.append(score_window(baseline, compressed, ids_S))
        if progress is not None:
            progress(i + 1, len(ids_NS))
    return summarize(windows, window=ids_NS.shape[1])


def summarize(windows: list[TokenScores], window: int) -> contract.Accuracy:
    """The accuracy section of the report from the scores of all windows of `window` tokens."""
    finite = [scores.finite_T for scores in windows]
    counts = np.array([mask.sum() for mask in finite])
    positions = sum(len(mask) for mask in finite)
    if counts.sum() == 0:
        raise RunError("evaluation: neither model's probabilities are finite at any position of the text")

    def sums(name: str) -> np.ndarray:
        columns = zip(windows, finite, strict=True)
        return np.array([getattr(scores, name)[mask].sum(dtype=np.float64) for scores, mask in columns])

    baseline, compressed, kl, agree = (sums(n) for n in ("baseline_nll_T", "compressed_nll_T", "kl_T", "agree_T"))
    tokens = int(counts.sum())
    ratio = clustered_mean(compressed - baseline, counts).exponentiated()
    agreement = clustered_mean(agree, counts)
    return contract.Accuracy(
        tokens=tokens,
        window=window,
        perplexity=contract.Perplexity(
            baseline=float(np.exp(baseline.sum() / tokens)),
            compressed=float(np.exp(compressed.sum() / tokens)),
            ratio=ratio.value,
            ci95=ratio.interval,
        ),
        kl=_summarize_kl(np.concatenate([s.kl_T[mask] for s, mask in zip(windows, finite, strict=True)]), kl, counts),
        top1_agreement=agreement.value,
        top1_ci95=agreement.interval and (max(agreement.interval[0], 0.0), min(agreement.interval[1], 1.0)),
        non_finite=positions - tokens,
        windows=[
            contract.WindowResult(tokens=int(n), baseline_nll=b / n, compressed_nll=c / n, kl=k / n)
            for n, b, c, k in zip(counts, baseline, compressed, kl, strict=True)
            if n
        ],
    )


def _summarize_kl(kl_T: np.ndarray, kl_N: np.ndarray, counts_N: np.ndarray) -> contract.Divergence:
    mean = clustered_mean(kl_N, counts_N)
    p99, median = np.quantile(kl_T, [0.99, 0.5])
    return contract.Divergence(
        mean=mean.value,
        ci95=mean.interval and (max(mean.interval[0], 0.0), mean.interval[1]),  # a KL is never negative
        p99=float(p99),
        max=float(kl_T.max()),
        median=float(median),
        survival=survival_curve(kl_T),
    )


def survival_curve(values_T: np.ndarray, points: int = 60) -> list[tuple[float, float]]:
    """(x, share of values above x) at logarithmically spaced x up to the largest value.

    It starts where 99.5 % lie above, or at 1e-6, below which float32 logits say nothing. Empty where all values are
    that small or alike.
    """
    first, largest = max(1e-6, float(np.quantile(values_T, 0.005))), float(values_T.max())
    if largest <= first:
        return []
    grid = np.geomspace(first, largest, points)
    above = 1 - np.searchsorted(np.sort(values_T), grid, side="right") / len(values_T)
    return [(float(x), float(share)) for x, share in zip(grid, above, strict=True)]
