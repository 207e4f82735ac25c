"""Rotary position embedding: what a config asks for, and the frequencies that follow.

Shapes: D head dim, F = D/2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compress.errors import UserError
from compress.fields import Config, count, positive


@dataclass(frozen=True)
class Rope:
    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: the context length before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None means 0.1·ln(factor) + 1
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    mscale: float = 0.0  # yarn of DeepSeek: with both of these the factor is the ratio of their magnitudes
    mscale_all_dim: float = 0.0
    interleaved: bool = False  # pairs are (x[2f], x[2f + 1]) instead of (x[f], x[f + F])


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angular frequencies per position, float32 [F].

    Llama-3 keeps short wavelengths, divides long ones by `factor` and blends between (arXiv 2407.21783, section 3.2);
    YaRN blends by the number of rotations within the original context (arXiv 2309.00071, eq. 17 to 22).
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse_F = 1.0 / (rope.theta**exponent_F)
    if rope.kind == "default":
        return inverse_F
    if rope.kind == "linear":
        return inverse_F / rope.factor
    if rope.kind == "llama3":
        wavelength_F = 2 * math.pi / inverse_F
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        turns_F = rope.original_max_position / wavelength_F
        blend_F = (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blended_F = (1 - blend_F) * inverse_F / rope.factor + blend_F * inverse_F
        scaled_F = torch.where(wavelength_F > low, inverse_F / rope.factor, inverse_F)
        return torch.where((wavelength_F <= low) & (wavelength_F >= high), blended_F, scaled_F)

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = max(last - first, 0.001)
    ramp_F = ((torch.arange(head_dim // 2).float() - first) / width).clamp(0, 1)
    return inverse_F / rope.factor * ramp_F + inverse_F * (1 - ramp_F)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """How much longer contexts sharpen the softmax: 0.1 · mscale · ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_scaling(rope: Rope) -> float:
    """The factor on cos and sin: 1, but for YaRN."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope.factor, rope.mscale) / yarn_magnitude(rope.factor, rope.mscale_all_dim)
    return yarn_magnitude(rope.factor)


def read_rope(config: Config, where: str, interleaved: bool = False) -> Rope:
    """What `rope_scaling` and `rope_parameters` of a config ask for; `rope_theta` stands in either or beside them.

    Raises UserError for a type that is not implemented, and for a value that is not what its key wants.
    """
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        stated = config.get(key) or {}
        if not isinstance(stated, dict):
            raise UserError(f"{where}: {key} must be an object, not {stated!r}")
        scaling |= stated
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    known = ("default", "linear", "llama3", "yarn")
    if kind not in known:
        raise UserError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(known)}")
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor is not supported; supported: 1.0")
    if kind != "default" and "factor" not in scaling:
        raise UserError(f"{where}: rope type {kind!r} needs 'factor'")
    longest = count(config, "max_position_embeddings", where, 2048)

    def number(key: str, default: float) -> float:
        return positive(scaling, key, f"{where}: rope", default)

    def number_or_zero(key: str) -> float:
        return number(key, 0.0) if scaling.get(key) else 0.0

    return Rope(
        theta=number("rope_theta", positive(config, "rope_theta", where, 10000.0)),
        kind=kind,
        factor=number("factor", 1.0),
        original_max_position=count(scaling, "original_max_position_embeddings", f"{where}: rope", longest),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=None if scaling.get("attention_factor") is None else number("attention_factor", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        mscale=number_or_zero("mscale"),
        mscale_all_dim=number_or_zero("mscale_all_dim"),
        interleaved=interleaved,
    )
