"""report.json as typed models: the keys that other people's scripts rely on.

Every section accepts further keys and keeps them. A section that was not measured is None (or an empty list), never
filled with a placeholder. Intervals are [low, high] at 95 %, or null where the data cannot carry one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Interval = tuple[float, float]


class Section(BaseModel):
    model_config = ConfigDict(extra="allow")


class Provenance(Section):
    model: str  # as the recipe names it
    revision: str | None = None  # hub commit, sha256 of a file, or fingerprint of a directory
    base_model: str | None = None  # the Hub id, where the model is on the Hub
    license: str | None = None  # what the base model's card states
    fingerprint: dict[str, Any] = {}  # of model, recipe and data, as far as they decide the weights
    recipe_sha256: str | None = None
    data_sha256: str | None = None  # the calibration token ids
    tool_version: str | None = None
    commit: str | None = None
    hardware: dict[str, Any] = {}
    versions: dict[str, str] = {}
    seed: int | None = None
    command: str | None = None


class Layer(Section):
    """One linear after quantization. Errors are relative output errors tr(ΔHΔᵀ) / tr(WHWᵀ), H the inputs' Gram."""

    name: str
    scheme: str | None = None
    tokens: int | None = None  # calibration tokens that reached the linear
    error: float | None = None
    rtn_error: float | None = None  # round to nearest, same scheme, on the same inputs
    fallback: bool | str | None = None  # what was done instead of the requested method, and why
    dampening: float | None = None
    error_of: Literal["outputs", "weights"] = "outputs"  # weights, where there was no calibration data


class Transform(Section):
    """One rescaling that leaves the function unchanged (AWQ, SmoothQuant). Errors as in Layer."""

    name: str
    applied: bool
    reason: str | None = None
    ratio: float | None = None
    error_before: float | None = None
    error_after: float | None = None


class Stage(Section):
    name: str
    seconds: float | None = None
    peak_rss_bytes: int | None = None
    method: dict[str, Any] = {}  # transform, range and rounding that the preset stands for
    layers: list[Layer] = []
    transforms: list[Transform] = []


class SizePart(Section):
    baseline_bytes: int
    compressed_bytes: int


class Size(Section):
    baseline_bytes: int
    compressed_bytes: int
    bits_per_weight: float | None = None
    parts: dict[str, SizePart] = {}  # embedding, head, linears, other


class Perplexity(Section):
    baseline: float
    compressed: float
    ratio: float  # exp(mean(nll of compressed − nll of baseline)), over tokens
    ci95: Interval | None


class Divergence(Section):
    """KL(baseline ‖ compressed) in nats for each token."""

    mean: float
    ci95: Interval | None
    p99: float
    max: float
    median: float
    survival: list[tuple[float, float]] = []  # (nats, fraction of tokens with a larger KL)


class WindowResult(Section):
    """One window of text: mean nll in nats per token of both arms, mean KL in nats."""

    tokens: int
    baseline_nll: float
    compressed_nll: float
    kl: float


class Accuracy(Section):
    tokens: int
    window: int
    perplexity: Perplexity
    kl: Divergence
    top1_agreement: float
    top1_ci95: Interval | None = None
    non_finite: int = 0  # positions left out because one arm produced no finite number
    windows: list[WindowResult] = []
    text: dict[str, Any] = {}
    tasks: dict[str, dict[str, Any]] = {}


class Latency(Section):
    """TTFT: from request to first token. TPOT (as vLLM defines it): (end to end − TTFT) / (output tokens − 1)."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float  # batch / TPOT
    prompt_tokens_per_s: float  # batch · prompt / TTFT


class SpeedRow(Section):
    """One workload. Ratios are baseline time / compressed time: above 1 the compressed model is faster."""

    batch: int
    prompt: int
    output: int
    baseline: Latency
    compressed: Latency
    ratio: float  # of TPOT
    ci95: Interval | None
    predicted_ratio: float | None = None  # of the bytes read for one decoding step
    control_ci95: Interval | None = None  # TPOT of the baseline against itself, by the same harness
    resolved: bool | None = None  # ci95 excludes 1 and the ratio lies outside the control's interval
    prompt_ratio: float | None = None  # of TTFT
    prompt_ci95: Interval | None = None
    prompt_control_ci95: Interval | None = None
    prompt_resolved: bool | None = None
    rounds: int = 0
    seconds: float | None = None  # that the measurement took, warming up included
    load_before: float | None = None  # load average of the machine
    load_after: float | None = None


class Verified(Section):
    reload_bit_equal: bool | None = None
    engine_matches_reference: bool | None = None
    largest_difference: float | None = None  # of logits, relative to the largest logit
    unquantized: list[str] = []


class Report(Section):
    """Everything report.json holds; report.html and the model card are drawn from this and nothing else."""

    provenance: Provenance
    recipe: dict[str, Any] = {}  # with every default filled in
    stages: list[Stage] = []
    calibration: dict[str, Any] = {}
    size: Size | None = None
    accuracy: Accuracy | None = None
    speed: list[SpeedRow] = []
    verified: Verified | None = None
    warnings: list[str] = Field(default_factory=list)
