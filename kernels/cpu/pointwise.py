"""The operations between the linears, compiled (pointwise.c); what they do not take goes to the reference.

Float32 with rows of a multiple of 16. Shapes: T tokens, C channels, H heads, D head dim, F pairs, I gated channels.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from compress.kernels import activation, norm, rotary
from compress.kernels.activation import Gate
from compress.kernels.cpu.call import GATE, HEAD_NORM, NORM, ROTATE, Call, empty, head, pointer, run
from compress.kernels.cpu.isa import Isa

LANES = 16


def _fields(pointers: str, sizes: str, floats: str = "") -> tuple[tuple[str, type], ...]:
    types = ((pointers, ctypes.c_void_p), (sizes, ctypes.c_int64), (floats, ctypes.c_float))
    return tuple((name, kind) for names, kind in types for name in names.split())


class _NormCall(Call):
    _fields_ = _fields("x residual total weight out", "x_stride residual_stride rows count", "eps")


class _HeadNormCall(Call):
    _fields_ = _fields("x weight out", "token_stride head_stride tokens heads dim", "eps")


class _GateCall(Call):
    _fields_ = _fields("x out", "x_stride rows count")


class _RotateCall(Call):
    _fields_ = _fields("x cos sin out", "token_stride head_stride tokens heads dim pairs")


@dataclass(frozen=True)
class CompiledRows:
    """Norms, rotations and gates for one instruction set."""

    isa: Isa

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
        """As norm.rms_norm, for x [T, C], or x [T, H, D] with a weight [H, D]."""
        if not _takes(x, weight):
            return norm.rms_norm(x, weight, eps, unit_offset)
        out = empty(*x.shape)
        if x.dim() == 3:
            run(_HeadNormCall(
                *head(HEAD_NORM, self.isa, int(unit_offset)), x.data_ptr(), weight.data_ptr(), out.data_ptr(),
                *x.stride()[:2], *x.shape, eps,
            ))  # fmt: skip
        else:
            self._norm(x, None, None, weight, out, eps, unit_offset)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As norm.add_rms_norm, for x and residual [T, C]."""
        if not (_takes(x, weight) and _takes(residual, weight) and x.dim() == 2 and x.shape == residual.shape):
            return norm.add_rms_norm(x, residual, weight, eps, unit_offset)
        out, total = empty(*x.shape), empty(*x.shape)
        self._norm(x, residual, total, weight, out, eps, unit_offset)
        return out, total

    def _norm(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        total_TC: torch.Tensor | None,
        weight_C: torch.Tensor,
        out_TC: torch.Tensor,
        eps: float,
        unit_offset: bool,
    ) -> None:
        residual_stride = 0 if residual_TC is None else residual_TC.stride(0)
        run(_NormCall(
            *head(NORM, self.isa, int(unit_offset)), x_TC.data_ptr(), pointer(residual_TC), pointer(total_TC),
            weight_C.data_ptr(), out_TC.data_ptr(), x_TC.stride(0), residual_stride, *x_TC.shape, eps,
        ))  # fmt: skip

    def rotate(
        self, x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, interleaved: bool = False
    ) -> torch.Tensor:
        """As rotary.rotate."""
        plain = all(t.dtype == torch.float32 and t.stride(-1) == 1 for t in (x_THD, cos_TF, sin_TF))
        tokens, heads, dim = x_THD.shape
        whole = cos_TF.is_contiguous() and sin_TF.is_contiguous() and cos_TF.shape == sin_TF.shape
        if not (plain and whole and cos_TF.shape[0] == tokens and 2 * cos_TF.shape[1] <= dim):
            return rotary.rotate(x_THD, cos_TF, sin_TF, interleaved)
        out_THD = empty(*x_THD.shape)
        run(_RotateCall(
            *head(ROTATE, self.isa, int(interleaved)), x_THD.data_ptr(), cos_TF.data_ptr(), sin_TF.data_ptr(),
            out_THD.data_ptr(), *x_THD.stride()[:2], tokens, heads, dim, cos_TF.shape[1],
        ))  # fmt: skip
        return out_THD

    def gated(self, x_T2I: torch.Tensor, gate: Gate) -> torch.Tensor:
        """As activation.gated."""
        channels = x_T2I.shape[1] // 2
        plain = x_T2I.dtype == torch.float32 and x_T2I.stride(1) == 1 and channels % LANES == 0
        if gate == "gelu" or not plain:
            return activation.gated(x_T2I, gate)
        out_TI = empty(x_T2I.shape[0], channels)
        run(_GateCall(
            *head(GATE, self.isa, int(gate == "gelu_tanh")), x_T2I.data_ptr(), out_TI.data_ptr(), x_T2I.stride(0),
            x_T2I.shape[0], channels,
        ))  # fmt: skip
        return out_TI


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    plain = x.dtype == weight.dtype == torch.float32 and x.stride(-1) == 1 and weight.is_contiguous()
    return plain and x.shape[-1] % LANES == 0 and x.dim() in (2, 3) and x.shape[1:] == weight.shape
