"""Fresh random inputs of a check, and how far a kernel's output is from what is right."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class Check:
    name: str
    what: str
    error: float  # in units of rounding, or a count of differing elements where `exact`
    limit: float


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, or the largest integer: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def error_of(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Root mean square of the difference, relative, in units of dtype's rounding; infinite where a NaN was left."""
    difference = (got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    error = difference.item() / UNIT[dtype]
    return error if error == error else float("inf")


@dataclass(frozen=True)
class Inputs:
    """Where fresh random tensors come from."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(self.dtype)

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")
