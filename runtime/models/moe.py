"""A mixture of experts in place of the MLP: a router gives each token to a few (arXiv 2401.04088, section 2.1).

The tokens of an expert are computed together, and an expert that no token goes to is not computed at all. A token's
experts are summed in ascending order, so that its result does not depend on its company.

Shapes: T tokens, C hidden, E experts, M experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.arch import FUSED_DOWN, FUSED_GATE_UP, ModelSpec, block_prefix
from compress.kernels.linear import Linear
from compress.kernels.operations import Operations
from compress.runtime.models.mlp import GatedMLP
from compress.runtime.models.weights import Weights


def route(logits_TE: torch.Tensor, per_token: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights, both [T, M]: the top of a float32 softmax over all experts."""
    weight_TM, expert_TM = logits_TE.float().softmax(dim=-1).topk(per_token, dim=-1)
    if normalized:
        weight_TM = weight_TM / weight_TM.sum(dim=-1, keepdim=True)
    return expert_TM, weight_TM


@dataclass(frozen=True)
class Mixture:
    router: Linear
    experts: tuple[GatedMLP, ...]
    per_token: int
    normalized: bool
    replayable = False  # which experts run is read from the router's numbers

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        expert_TM, weight_TM = route(self.router(x_TC), self.per_token, self.normalized)
        order = expert_TM.flatten().argsort(stable=True)
        tokens, weights = order // self.per_token, weight_TM.flatten()[order]
        counts = expert_TM.flatten().bincount(minlength=len(self.experts)).tolist()
        out_TC, start = torch.zeros_like(x_TC), 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                y = expert(x_TC[rows]) * weights[start : start + count, None]
                out_TC.index_add_(0, rows, y.to(out_TC.dtype))
                start += count
        return out_TC


def load_mixture(weights: Weights, spec: ModelSpec, layer: int, operations: Operations) -> Mixture:
    experts = spec.experts
    assert experts is not None
    prefix = block_prefix(layer)
    fused = prefix + FUSED_GATE_UP in weights.checkpoint

    def mlp(gate_up: Linear, down: Linear) -> GatedMLP:
        return GatedMLP(gate_up, down, spec.gate, operations)

    if fused:
        gate_up, down = (weights.checkpoint.map(prefix + name) for name in (FUSED_GATE_UP, FUSED_DOWN))
        parts = [mlp(weights.dense(gate_up[e]), weights.dense(down[e])) for e in range(experts.count)]
    else:
        gate, up, down = experts.names
        parts = []
        for expert in range(experts.count):
            module = f"{prefix}{experts.module}.experts.{expert}."
            parts.append(mlp(weights.linear(module + gate, module + up), weights.linear(module + down)))
    return Mixture(
        router=weights.linear(prefix + experts.router(fused)),
        experts=tuple(parts),
        per_token=experts.per_token,
        normalized=experts.normalized,
    )
