"""Which file loads which family: one literal table."""

from __future__ import annotations

import torch

from compress.arch import ModelSpec
from compress.checkpoint import Checkpoint
from compress.runtime.models.llama import load_llama
from compress.runtime.models.model import Model

LOADERS = {
    "llama": load_llama,
    "mistral": load_llama,
    "qwen2": load_llama,
    "qwen3": load_llama,
}


def load_model(
    checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype, exact: bool = False
) -> Model:
    """Map a checkpoint and prepare its weights; on a CPU the linears and the embedding are read where they lie.

    `exact` keeps activations in `dtype` where the fast arithmetic would quantize them.
    """
    return LOADERS[spec.family](checkpoint, spec, device, dtype, exact)
