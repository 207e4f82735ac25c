"""The operations between the linears, compiled (pointwise.c); what they do not take goes to the reference.

Float32 with rows of a multiple of 16. Shapes: T tokens, C channels, H heads, D head dim, F pairs, I gated channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.kernels import activation, kv, norm, rotary
from compress.kernels.activation import Gate
from compress.kernels.cpu.build import library
from compress.kernels.cpu.call import Float, Pointer, Size, pointer
from compress.kernels.cpu.isa import ISAS, Isa
from compress.kernels.kv import KVCache

LANES = 16


@dataclass(frozen=True)
class CompiledRows:
    """Norms, rotations, gates and stores for one instruction set."""

    isa: Isa

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
        """As norm.rms_norm, for x [T, C], or x [T, H, D] with a weight [H, D]."""
        if not _takes(x, weight):
            return norm.rms_norm(x, weight, eps, unit_offset)
        out = torch.empty(x.shape)
        if x.dim() == 3:
            _call(
                "compress_head_norm", self.isa, pointer(x), Size(x.stride(0)), Size(x.stride(1)), pointer(weight),
                pointer(out), Size(x.shape[0]), Size(x.shape[1]), Size(x.shape[2]), Float(eps), int(unit_offset),
            )  # fmt: skip
        else:
            self._norm(x, None, None, weight, out, eps, unit_offset)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As norm.add_rms_norm, for x and residual [T, C]."""
        if not (_takes(x, weight) and _takes(residual, weight) and x.dim() == 2 and x.shape == residual.shape):
            return norm.add_rms_norm(x, residual, weight, eps, unit_offset)
        out, total = torch.empty(x.shape), torch.empty(x.shape)
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
        rows, count = x_TC.shape
        residual_stride = 0 if residual_TC is None else residual_TC.stride(0)
        _call(
            "compress_norm", self.isa, pointer(x_TC), Size(x_TC.stride(0)), pointer(residual_TC), Size(residual_stride),
            pointer(total_TC), pointer(weight_C), pointer(out_TC), Size(rows), Size(count), Float(eps),
            int(unit_offset),
        )  # fmt: skip

    def rotate(
        self, x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, interleaved: bool = False
    ) -> torch.Tensor:
        """As rotary.rotate."""
        plain = all(t.dtype == torch.float32 and t.stride(-1) == 1 for t in (x_THD, cos_TF, sin_TF))
        tokens, heads, dim = x_THD.shape
        whole = cos_TF.is_contiguous() and sin_TF.is_contiguous() and cos_TF.shape == sin_TF.shape
        if not (plain and whole and cos_TF.shape[0] == tokens and 2 * cos_TF.shape[1] <= dim):
            return rotary.rotate(x_THD, cos_TF, sin_TF, interleaved)
        out_THD = torch.empty(x_THD.shape)
        _call(
            "compress_rotate", None, pointer(x_THD), Size(x_THD.stride(0)), Size(x_THD.stride(1)), pointer(cos_TF),
            pointer(sin_TF), pointer(out_THD), Size(tokens), Size(heads), Size(dim), Size(cos_TF.shape[1]),
            int(interleaved),
        )  # fmt: skip
        return out_THD

    def gated(self, x_T2I: torch.Tensor, gate: Gate) -> torch.Tensor:
        """As activation.gated."""
        channels = x_T2I.shape[1] // 2
        plain = x_T2I.dtype == torch.float32 and x_T2I.stride(1) == 1 and channels % LANES == 0
        if gate == "gelu" or not plain:
            return activation.gated(x_T2I, gate)
        out_TI = torch.empty(x_T2I.shape[0], channels)
        _call(
            "compress_gate", self.isa, pointer(x_T2I), Size(x_T2I.stride(0)), pointer(out_TI), Size(x_T2I.shape[0]),
            Size(channels), int(gate == "gelu_tanh"),
        )  # fmt: skip
        return out_TI

    def store(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: KVCache, layer: int, slots_T: torch.Tensor
    ) -> None:
        """As kv.store."""
        pages = cache.layer(layer)
        tensors = (k_TKD, v_TKD, pages.keys_PSKD, pages.values_PSKD)
        plain = all(tensor.dtype == torch.float32 and tensor.stride(-1) == 1 for tensor in tensors)
        fits = all(
            x.shape[0] == len(slots_T) and x.shape[1:] == pages_PSKD.shape[2:]
            for x, pages_PSKD in ((k_TKD, pages.keys_PSKD), (v_TKD, pages.values_PSKD))
        )
        if not (plain and fits and slots_T.dtype == torch.int64 and slots_T.is_contiguous()):
            kv.store(k_TKD, v_TKD, cache, layer, slots_T)
            return
        kernels = library()
        assert kernels is not None
        for x_TKD, pages_PSKD in ((k_TKD, pages.keys_PSKD), (v_TKD, pages.values_PSKD)):
            kernels.compress_store(
                pointer(x_TKD), *map(Size, x_TKD.stride()[:2]),
                pointer(pages_PSKD), *map(Size, pages_PSKD.stride()[:3]), Size(pages_PSKD.shape[1]),
                pointer(slots_T), *map(Size, x_TKD.shape),
            )  # fmt: skip


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    plain = x.dtype == weight.dtype == torch.float32 and x.stride(-1) == 1 and weight.is_contiguous()
    return plain and x.shape[-1] % LANES == 0 and x.dim() in (2, 3) and x.shape[1:] == weight.shape


def _call(name: str, isa: Isa | None, *arguments: Pointer | Size | Float | int) -> None:
    kernels = library()
    assert kernels is not None, "prepared with the compiled kernels"
    first = () if isa is None else (ISAS.index(isa),)
    getattr(kernels, name)(*first, torch.get_num_threads(), *arguments)
