"""Which implementation runs where: the one place that knows devices and their capabilities.

linear           CPU: compiled kernels read quantized and floating-point rows in place; what they cannot read is
                 dequantized once, and multiplied by torch
                 GPU: Triton for quantized weights, one GEMM of the vendor's library for dense ones
everything else  CPU: compiled kernels, or torch where they could not be built; GPU: Triton

`COMPRESS_KERNELS`, or `force` in a program, picks one path for everything instead:
reference        torch alone
compiled         the compiled kernels; compiled:portable, compiled:avx2, ... for one instruction set
triton           the Triton kernels: on a CPU they need TRITON_INTERPRET=1, which is refused otherwise
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby

import torch

from compress.kernels import activation, attention, kv, logprob, mla, norm, rotary, sampling
from compress.kernels.cpu import linear as compiled
from compress.kernels.cpu.attention import CompiledAttention
from compress.kernels.cpu.isa import ISAS, Isa, supported
from compress.kernels.cpu.latent import CompiledLatentAttention
from compress.kernels.cpu.pointwise import CompiledRows
from compress.kernels.cpu.sampling import CompiledSampling
from compress.kernels.cpu.store import store
from compress.kernels.launch import interpreting
from compress.kernels.linear import DenseLinear, DenseLinearCPU, Linear, SideBySide
from compress.kernels.matmul import QuantizedWeight, dequantized
from compress.kernels.operations import Operations
from compress.kernels.weights import PackedWeight

log = logging.getLogger(__name__)
Weight = torch.Tensor | QuantizedWeight
VARIABLE = "COMPRESS_KERNELS"
PATHS = ("auto", "reference", "compiled", *(f"compiled:{isa}" for isa in ISAS), "triton")

_forced: ContextVar[str | None] = ContextVar("forced kernel path", default=None)


@contextmanager
def force(path: str) -> Iterator[None]:
    """Use one path for what is prepared inside the block. Raises ValueError for an unknown one."""
    token = _forced.set(_checked(path, "force"))
    try:
        yield
    finally:
        _forced.reset(token)


def forced_path() -> str:
    """What `force` or the environment asks for. Raises ValueError for an unknown name."""
    return _forced.get() or _checked(os.environ.get(VARIABLE) or "auto", VARIABLE)


def _checked(path: str, where: str) -> str:
    if path in PATHS:
        return path
    near = difflib.get_close_matches(path, PATHS, 1)
    raise ValueError(f"{where}: unknown path {path!r}; known: {', '.join(PATHS)}" + (f" ({near[0]}?)" if near else ""))


@dataclass(frozen=True)
class Path:
    """How work on one device is done."""

    kind: str  # "reference", "compiled" or "triton"
    isa: Isa | None = None
    strict: bool = False  # asked for by name: what it cannot do is an error, not a fallback


def path_of(device: torch.device) -> Path:
    """The path for a device. Raises ValueError for one that this machine cannot run: forced, or Triton's without it."""
    wanted = forced_path()
    kind, _, isa = wanted.partition(":")
    if kind == "auto":
        if device.type != "cpu":
            return _triton_path(wanted, device, strict=False)
        isas = supported()
        return Path("compiled", isas[-1]) if isas else Path("reference")
    if kind == "triton":
        return _triton_path(wanted, device, strict=True)
    if kind == "reference":
        return Path(kind, strict=True)
    isas = supported()
    if not isas or (isa and isa not in isas):
        raise ValueError(f"{wanted}: this machine runs {', '.join(isas) or 'no compiled kernels'}")
    named: list[Isa] = [known for known in isas if known == isa]
    return Path("compiled", (named or isas)[-1], strict=True)


def _triton_path(wanted: str, device: torch.device, strict: bool) -> Path:
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"{wanted}: {device.type} needs triton, which is not installed: pip install 'triton>=3.6'")
    if device.type == "cpu" and not interpreting():
        raise ValueError(f"{wanted}: on a CPU, Triton's kernels run in its interpreter alone: set TRITON_INTERPRET=1")
    return Path("triton", strict=strict)


def prepare_linear(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
    exact: bool = False,
) -> Linear:
    """One linear for weights [O, I] that share their input: their outputs side by side, in order.

    Activations are `dtype`. On a CPU, integer weights meet activations quantized to 8 bits for each token and block of
    columns (W4A8, W8A8), unless `exact`. Raises ValueError where a forced path cannot take a weight.
    """
    path = path_of(device)
    pairs = list(zip(weights, biases, strict=True))
    if path.kind == "triton":
        linears = [_triton(*_columns(run), path, device, dtype) for run in _runs(pairs, _form)]
    elif path.kind == "compiled" and path.isa is not None:
        linears = [_compiled(*_columns(run), path, path.isa, dtype, exact) for run in _runs(pairs, _rows)]
    else:
        linears = [_dense(weights, biases, device, dtype)]
    return linears[0] if len(linears) == 1 else SideBySide(tuple(linears))


def prepare_operations(device: torch.device) -> Operations:
    """Everything but the linears, for one device. Raises ValueError for a forced path that cannot run here."""
    path = path_of(device)
    if path.kind == "triton":
        return _triton_operations(device)
    reference = Operations(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        rotate=rotary.rotate,
        gated=activation.gated,
        store=kv.store,
        copy_pages=kv.copy_pages,
        attention=attention.PagedAttention,
        latent_attention=mla.PagedLatentAttention,
        token_logprobs=logprob.token_logprobs,
        sample_tokens=sampling.sample_tokens,
        token_distributions=sampling.token_distributions,
        pick_tokens=sampling.pick_tokens,
        verify_drafts=sampling.verify_drafts,
        top_logprobs=sampling.top_logprobs,
    )
    if path.isa is None:
        return reference
    rows, chosen = CompiledRows(path.isa), CompiledSampling(path.isa)
    return replace(
        reference,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        rotate=rows.rotate,
        gated=rows.gated,
        store=partial(store, isa=path.isa),
        attention=partial(CompiledAttention, isa=path.isa),
        latent_attention=partial(CompiledLatentAttention, isa=path.isa),
        sample_tokens=chosen.sample_tokens,
        token_distributions=chosen.token_distributions,
        pick_tokens=chosen.pick_tokens,
        verify_drafts=chosen.verify_drafts,
        top_logprobs=chosen.top_logprobs,
    )


def _triton_operations(device: torch.device) -> Operations:
    # imported here: an installation for a CPU has no triton
    from compress.kernels import (
        activation_triton,
        attention_triton,
        kv_triton,
        logprob_triton,
        mla_triton,
        norm_triton,
        rotary_triton,
    )

    return Operations(
        rms_norm=norm_triton.rms_norm,
        add_rms_norm=norm_triton.add_rms_norm,
        rotate=rotary_triton.rotate,
        gated=activation_triton.gated,
        store=kv_triton.store,
        copy_pages=kv_triton.copy_pages,
        attention=partial(attention_triton.PagedAttentionTriton, device=device),
        latent_attention=partial(mla_triton.PagedLatentAttentionTriton, device=device),
        token_logprobs=logprob_triton.token_logprobs,
        # torch's: a few passes over the logits, on the device
        sample_tokens=sampling.sample_tokens,
        token_distributions=sampling.token_distributions,
        pick_tokens=sampling.pick_tokens,
        verify_drafts=sampling.verify_drafts,
        top_logprobs=sampling.top_logprobs,
    )


def dense(weight: Weight, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A weight as one dense tensor [O, I], of its own memory or the given one: float32 arithmetic, one rounding."""
    if isinstance(weight, torch.Tensor):
        return weight.to(device=device, dtype=dtype)
    return dequantized(weight, torch.float32).to(device=device, dtype=dtype)


def _dense(
    weights: Sequence[Weight], biases: Sequence[torch.Tensor | None], device: torch.device, dtype: torch.dtype
) -> Linear:
    parts = [dense(weight, device, dtype) for weight in weights]
    bias_O = None
    if any(bias is not None for bias in biases):
        bias_O = torch.cat(
            [
                bias.to(device=device, dtype=dtype) if bias is not None else part.new_zeros(part.shape[0])
                for bias, part in zip(biases, parts, strict=True)
            ]
        )
    weight_OI = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (DenseLinearCPU if device.type == "cpu" else DenseLinear)(weight_OI, bias_O)


def _compiled(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    path: Path,
    isa: Isa,
    dtype: torch.dtype,
    exact: bool,
) -> Linear:
    readable = [weight for weight in weights if isinstance(weight, torch.Tensor | PackedWeight)]
    reason = compiled.refusal(readable[0]) if len(readable) == len(weights) else "floating-point codes"
    if reason is None:
        return compiled.prepare_compiled(readable, biases, isa, exact)
    _fall_back(f"the compiled CPU kernels do not read {reason}", path)
    return _dense(weights, biases, torch.device("cpu"), dtype)


def _triton(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> Linear:
    codes = [weight for weight in weights if not isinstance(weight, torch.Tensor)]
    if not codes:
        return _dense(weights, biases, device, dtype)
    # imported here: an installation for a CPU has no triton
    from compress.kernels.matmul_triton import prepare_matmul

    try:
        return prepare_matmul(codes, biases, device, dtype)
    except ValueError as error:
        _fall_back(str(error), path)
        return _dense(weights, biases, device, dtype)


def _runs(pairs: list, key: Callable[[Weight], object]) -> list[list]:
    return [list(run) for _, run in groupby(pairs, key=lambda pair: key(pair[0]))]


def _columns(run: list) -> tuple[list[Weight], list[torch.Tensor | None]]:
    return [weight for weight, _ in run], [bias for _, bias in run]


def _rows(weight: Weight) -> object:
    """Weights of one kind of rows are one call of the compiled kernels."""
    if isinstance(weight, torch.Tensor | PackedWeight):
        reason = compiled.refusal(weight)
        return compiled.kind_of(weight) if reason is None else reason
    return "floating-point codes"


def _form(weight: Weight) -> object:
    """Weights of one form are one launch of the Triton kernels."""
    if isinstance(weight, torch.Tensor):
        return "dense"
    from compress.kernels.matmul_triton import form_of

    try:
        return form_of(weight)
    except ValueError as error:
        return str(error)


def _fall_back(reason: str, path: Path) -> None:
    if path.strict:
        raise ValueError(reason)
    _say(reason)


@cache
def _say(reason: str) -> None:
    """Once for each reason, not for each layer."""
    log.warning("%s: such weights are dequantized, which takes more memory and time", reason)
