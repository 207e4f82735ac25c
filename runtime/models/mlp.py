"""The gated MLP (arXiv 2002.05202).

Shapes: T tokens, C hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.arch import ModelSpec, block_prefix
from compress.kernels.activation import Gate
from compress.kernels.linear import Linear
from compress.kernels.operations import Operations
from compress.runtime.models.weights import Weights


@dataclass(frozen=True)
class GatedMLP:
    gate_up: Linear
    down: Linear
    gate: Gate
    operations: Operations
    replayable = True
    expert_bytes = 0

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.down(self.operations.gated(self.gate_up(x_TC), self.gate))


def load_mlp(weights: Weights, spec: ModelSpec, layer: int, operations: Operations) -> GatedMLP:
    prefix = block_prefix(layer) + "mlp."
    return GatedMLP(
        gate_up=weights.linear(f"{prefix}gate_proj", f"{prefix}up_proj"),
        down=weights.linear(f"{prefix}down_proj"),
        gate=spec.gate,
        operations=operations,
    )
