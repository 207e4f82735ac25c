"""Language models for tests of the evaluation: a Hugging Face model behind the interface that evaluation needs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class HuggingFaceModel:
    """hidden_states [S] -> [S, hidden] after the final norm; logits [.., hidden] -> float32 [.., vocab]."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.largest_rows = 0  # the most rows of logits asked for at once

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.model(ids[None]).last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.largest_rows = max(self.largest_rows, hidden.shape[0])
        return self.model.lm_head(hidden).float()


class FixedModel:
    """Hidden states are the position; the logits of each position are given: [S, V]."""

    def __init__(self, logits_SV: torch.Tensor) -> None:
        self.logits_SV = logits_SV

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(ids))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_SV[hidden]


def load(directory: Path) -> HuggingFaceModel:
    return HuggingFaceModel(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())


def perturbed(model: HuggingFaceModel, noise: float, seed: int = 0) -> HuggingFaceModel:
    """A copy whose linears carry relative Gaussian noise."""
    other = copy.deepcopy(model.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if name.endswith("proj.weight"):
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
    return HuggingFaceModel(other)
