"""Rows of logits of many kinds, and rules of all kinds to choose among them."""

from __future__ import annotations

import math
from typing import Any

import torch

from compress.kernels import sampling
from compress.kernels.cpu.isa import ISAS as NAMES
from compress.kernels.cpu.isa import supported
from compress.kernels.cpu.sampling import CompiledSampling
from compress.kernels.sampling import Rules

ISAS = supported()
PATHS = ["reference", *ISAS]


def operations(path: str) -> Any:
    """A module, or an object, with the functions of sampling.py."""
    return sampling if path == "reference" else CompiledSampling(NAMES[NAMES.index(path)])


def rules_of(*rows: tuple[float, int, float, float]) -> Rules:
    return Rules(*(list(column) for column in zip(*rows, strict=True)))


def rows_of_logits(vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=generator) * 3
    peaked = normal.clone()
    peaked[vocab // 2] = 40.0
    return {
        "normal": normal,
        "flat": torch.randn(vocab, generator=generator) * 0.01,
        "equal": torch.zeros(vocab),
        "peaked": peaked,
        "coarse": (normal * 2).round() / 2,  # many ties
        "impossible": torch.where(torch.rand(vocab, generator=generator) < 0.9, -math.inf, normal).index_fill(
            0, torch.tensor([vocab - 1]), 1.0
        ),
    }


FILTERS = [
    (1.0, 10**6, 1.0, 0.0),
    (0.7, 10**6, 0.9, 0.0),
    (1.0, 10**6, 0.999, 0.0),
    (1.0, 10**6, 1e-6, 0.0),
    (1.5, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 700, 1.0, 0.0),  # more than there are blocks of 64
    (1.0, 40, 0.8, 0.0),
    (1.0, 10**6, 1.0, 0.3),
    (2.0, 50, 0.95, 0.2),
]


def mixed(vocab: int) -> tuple[torch.Tensor, Rules, list[float]]:
    """All rows of logits under all rules, greedy rows among them."""
    rows = list(rows_of_logits(vocab).values())
    kinds = [*FILTERS, (0.0, 10**6, 1.0, 0.0)]
    logits_NV = torch.stack([rows[i % len(rows)] for i in range(len(kinds) * len(rows))])
    chosen = [kinds[i // len(rows)] for i in range(len(logits_NV))]
    return logits_NV, rules_of(*chosen), torch.rand(len(chosen), generator=torch.Generator().manual_seed(3)).tolist()
