"""The small kernels between the matmuls, at the shapes of Llama-3.1-8B and SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from compress.kernels.activation import Gate
from compress.kernels.activation_triton import plan_gated
from compress.kernels.gate_case import Case
from compress.kernels.launch import Launch, Target
from compress.kernels.logprob import TokenLogprobs
from compress.kernels.logprob_triton import plan_kl_divergence, plan_token_logprobs, tiles
from compress.kernels.norm_triton import plan_rms_norm
from compress.kernels.rotary_triton import plan_rotate
from compress.kernels.token_quant import CODE_DTYPE, Kind
from compress.kernels.token_quant_triton import new_scales, plan_quantize_tokens

TOKENS = 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _norm(channels: int, add: bool, unit_offset: bool, dtype: torch.dtype, target: Target) -> list[Launch]:
    x, weight = _empty(TOKENS, channels, dtype=dtype), _empty(channels, dtype=dtype)
    residual = x if add else None
    return plan_rms_norm(x, weight, 1e-5, x, target, unit_offset=unit_offset, residual=residual, total=residual)


def _head_norm(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, target: Target) -> list[Launch]:
    qk_THD = _empty(TOKENS, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, : heads + kv_heads]
    return plan_rms_norm(qk_THD, _empty(heads + kv_heads, head_dim, dtype=dtype), 1e-6, qk_THD, target)


def _rotate(
    heads: int, kv_heads: int, head_dim: int, pairs: int, interleaved: bool, dtype: torch.dtype, target: Target
) -> list[Launch]:
    qk_THD = _empty(TOKENS, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, : heads + kv_heads]
    table_TF = _empty(TOKENS, pairs, dtype=torch.float32)
    return plan_rotate(qk_THD, table_TF, table_TF, qk_THD, target, interleaved=interleaved)


def _gated(channels: int, gate: Gate, dtype: torch.dtype, target: Target) -> list[Launch]:
    return plan_gated(_empty(TOKENS, 2 * channels, dtype=dtype), gate, _empty(TOKENS, channels, dtype=dtype), target)


def _logprobs(vocabulary: int, dtype: torch.dtype, target: Target) -> list[Launch]:
    count = tiles(vocabulary)
    single, ids = _empty(TOKENS, dtype=torch.float32), _empty(TOKENS, dtype=torch.int64)
    return plan_token_logprobs(
        _empty(TOKENS, vocabulary, dtype=dtype),
        ids,
        _empty(2, TOKENS, count, dtype=torch.float32),
        _empty(TOKENS, count, dtype=torch.int32),
        TokenLogprobs(single, single, ids),
        target,
    )


def _divergence(vocabulary: int, dtype: torch.dtype, target: Target) -> list[Launch]:
    logits_TV = _empty(TOKENS, vocabulary, dtype=dtype)
    parts_5TN = _empty(5, TOKENS, tiles(vocabulary), dtype=torch.float32)
    return plan_kl_divergence(logits_TV, logits_TV, parts_5TN, _empty(TOKENS, dtype=torch.float32), target)


def _quantize(columns: int, kind: Kind, group: int | None, dtype: torch.dtype, target: Target) -> list[Launch]:
    x_TI = _empty(TOKENS, columns, dtype=dtype)
    half = kind == "e4m3" and not target.native_e4m3  # as W8A8 has it there
    codes_TI = _empty(TOKENS, columns, dtype=torch.float16 if half else CODE_DTYPE[kind])
    return plan_quantize_tokens(x_TI, codes_TI, new_scales(x_TI, group), target, group=group)


def _cases(name: str, dtype: torch.dtype) -> list[Case]:
    plans: dict[str, Callable[[Target], list[Launch]]] = {
        "norm 4096": partial(_norm, 4096, False, False, dtype),
        "norm 576": partial(_norm, 576, False, False, dtype),
        "add and norm 4096": partial(_norm, 4096, True, False, dtype),
        "add and norm 576": partial(_norm, 576, True, False, dtype),
        "add and norm 4096, unit offset": partial(_norm, 4096, True, True, dtype),
        "norm of heads 40x128": partial(_head_norm, 32, 8, 128, dtype),
        "rotary 40x128": partial(_rotate, 32, 8, 128, 64, False, dtype),
        "rotary 12x64": partial(_rotate, 9, 3, 64, 32, False, dtype),
        "rotary 12x64, 16 pairs": partial(_rotate, 9, 3, 64, 16, False, dtype),
        "rotary 40x128, interleaved": partial(_rotate, 32, 8, 128, 64, True, dtype),
        "log-probabilities 128256": partial(_logprobs, 128256, dtype),
        "log-probabilities 49152": partial(_logprobs, 49152, dtype),
        "divergence 128256": partial(_divergence, 128256, dtype),
    }
    for gate in ("silu", "gelu", "gelu_tanh"):
        plans[f"{gate} 14336"] = partial(_gated, 14336, gate, dtype)
    plans["silu 1536"] = partial(_gated, 1536, "silu", dtype)
    for kind in ("int8", "e4m3"):
        plans[f"tokens to {kind} 4096"] = partial(_quantize, 4096, kind, None, dtype)
        plans[f"tokens to {kind} 14336"] = partial(_quantize, 14336, kind, None, dtype)
        plans[f"tokens to {kind} 53248"] = partial(_quantize, 53248, kind, None, dtype)
        plans[f"tokens to {kind} 576"] = partial(_quantize, 576, kind, None, dtype)
        plans[f"tokens to {kind} 4096 by 128"] = partial(_quantize, 4096, kind, 128, dtype)
    return [Case(f"{case} {name}", plan) for case, plan in plans.items()]


CASES: tuple[Case, ...] = tuple(case for name, dtype in DTYPES.items() for case in _cases(name, dtype))
