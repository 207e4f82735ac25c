"""The tensors of a checkpoint in the form in which they are computed with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.checkpoint import Checkpoint
from compress.formats import map_linear
from compress.kernels.dispatch import prepare_linear
from compress.kernels.linear import Linear


@dataclass(frozen=True)
class Weights:
    """Reads for one device and dtype; on a CPU linears are read where they lie.

    `exact` keeps activations in `dtype` where the fast arithmetic would quantize them.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    exact: bool

    def linear(self, *modules: str) -> Linear:
        """One linear for modules (full names) that share their input: their outputs side by side."""
        stored = self.checkpoint
        return prepare_linear(
            [map_linear(stored, module) for module in modules],
            [stored.read(f"{module}.bias") if f"{module}.bias" in stored else None for module in modules],
            self.device,
            self.dtype,
            self.exact,
        )

    def dense(self, weight_OI: torch.Tensor) -> Linear:
        """A linear of a weight that is not a module of its own."""
        return prepare_linear([weight_OI], [None], self.device, self.dtype, self.exact)

    def norm(self, module: str) -> torch.Tensor:
        return self.checkpoint.read(f"{module}.weight").to(device=self.device, dtype=self.dtype)
