"""The paths that a CPU has, for tests that hold on each."""

from __future__ import annotations

import torch

from compress.kernels.cpu.isa import supported
from compress.kernels.dispatch import force, prepare_operations
from compress.kernels.operations import Operations

CPU_PATHS = ["reference", *(["compiled"] if supported() else [])]


def operations_of(path: str) -> Operations:
    with force(path):
        return prepare_operations(torch.device("cpu"))
