"""Choosing tokens, compiled (sampling.c); what it does not take goes to the reference.

Float32 rows. Shapes: N rows or requests, V vocabulary, k likeliest tokens; K draft tokens of all requests, R rows under
verification.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from compress.kernels import sampling
from compress.kernels.cpu.build import library
from compress.kernels.cpu.isa import ISAS, Isa
from compress.kernels.sampling import Rules, TopLogprobs, inverse_temperatures


class _Rule(ctypes.Structure):
    """Rule of sampling_rows.h."""

    _fields_ = (
        ("top_p", ctypes.c_double),
        ("u", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("min_p", ctypes.c_float),
    )


class _Sampling(ctypes.Structure):
    """Sampling of sampling.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("isa", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("rules", ctypes.c_void_p),
        ("u", ctypes.c_void_p),
        ("token", ctypes.c_void_p),
        ("probs", ctypes.c_void_p),
        ("top", ctypes.c_int64),
        ("chosen", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("drafted", ctypes.c_void_p),
        ("chances", ctypes.c_void_p),
        ("accepted", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class CompiledSampling:
    """Tokens, distributions and log-probabilities for one instruction set: a row's bits depend on the row alone."""

    isa: Isa

    def sample_tokens(self, logits_NV: torch.Tensor, rules: Rules, uniforms: Sequence[float]) -> torch.Tensor:
        """As sampling.sample_tokens."""
        if not _takes(logits_NV):
            return sampling.sample_tokens(logits_NV, rules, uniforms)
        token_N = torch.empty(len(logits_NV), dtype=torch.int64)
        self._call("compress_sample", logits_NV, rules=_rules(rules, uniforms), token=token_N)
        return token_N

    def token_distributions(self, logits_NV: torch.Tensor, rules: Rules) -> torch.Tensor:
        """As sampling.token_distributions."""
        if not _takes(logits_NV):
            return sampling.token_distributions(logits_NV, rules)
        probs_NV = torch.empty(logits_NV.shape)
        self._call("compress_distributions", logits_NV, rules=_rules(rules, [0.0] * len(logits_NV)), probs=probs_NV)
        return probs_NV

    def pick_tokens(self, probs_NV: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
        """As sampling.pick_tokens."""
        if not _takes(probs_NV):
            return sampling.pick_tokens(probs_NV, uniforms)
        token_N = torch.empty(len(probs_NV), dtype=torch.int64)
        self._call("compress_pick", probs_NV, u=_doubles(uniforms), token=token_N)
        return token_N

    def verify_drafts(
        self,
        target_RV: torch.Tensor,
        drafts: Sequence[torch.Tensor],
        tokens_K: Sequence[int],
        chances_K: Sequence[float],
        uniforms_R: Sequence[float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As sampling.verify_drafts."""
        if not all(_takes(one) for one in (target_RV, *drafts)):
            return sampling.verify_drafts(target_RV, drafts, tokens_K, chances_K, uniforms_R)
        drafts, lengths = [draft_kV.contiguous() for draft_kV in drafts], [len(draft_kV) for draft_kV in drafts]
        accepted_N, token_N = (torch.empty(len(drafts), dtype=torch.int64) for _ in range(2))
        self._call(
            "compress_verify", target_RV, rows=len(drafts), first=_integers([0, *accumulate(lengths)]),
            length=_integers(lengths), q=_integers([draft_kV.data_ptr() for draft_kV in drafts]),
            drafted=_integers(tokens_K), chances=_doubles(chances_K), u=_doubles(uniforms_R), accepted=accepted_N,
            token=token_N,
        )  # fmt: skip
        return accepted_N, token_N

    def top_logprobs(self, logits_NV: torch.Tensor, tokens: Sequence[int], count: int) -> TopLogprobs:
        """As sampling.top_logprobs."""
        if not _takes(logits_NV):
            return sampling.top_logprobs(logits_NV, tokens, count)
        rows = len(logits_NV)
        found = TopLogprobs(torch.empty(rows), torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count))
        self._call(
            "compress_logprobs", logits_NV, token=_integers(tokens), top=count, chosen=found.chosen_N,
            ids=found.ids_Nk, values=found.values_Nk,
        )  # fmt: skip
        return found

    def _call(self, name: str, x_NV: torch.Tensor, rows: int | None = None, **fields: Any) -> None:
        """`fields` are numbers, tensors, or arrays of ctypes, which are held through the call."""
        kernels = library()
        assert kernels is not None, "prepared with the compiled kernels"
        rows, count = len(x_NV) if rows is None else rows, x_NV.shape[1]
        problem = _Sampling(
            x=x_NV.data_ptr(), x_stride=x_NV.stride(0), rows=rows, count=count, isa=ISAS.index(self.isa),
            threads=torch.get_num_threads(), **{key: _plain(value) for key, value in fields.items()},
        )  # fmt: skip
        if getattr(kernels, name)(ctypes.byref(problem)):
            raise MemoryError(f"no memory to choose among {count} tokens")


def _takes(x: torch.Tensor) -> bool:
    # columns are 32-bit integers there
    return x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1 and 0 < x.shape[1] < 2**31


def _plain(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value if isinstance(value, int) else ctypes.addressof(value)


def _rules(rules: Rules, uniforms: Sequence[float]) -> ctypes.Array[_Rule]:
    scales = [
        scale if temperature > 0 else 0.0
        for scale, temperature in zip(inverse_temperatures(rules), rules.temperature, strict=True)
    ]
    rows = zip(rules.top_p, uniforms, rules.top_k, scales, rules.min_p, strict=True)
    return (_Rule * len(scales))(*rows)


def _doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
