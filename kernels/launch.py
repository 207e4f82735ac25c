"""One launch of a Triton kernel as a value: run it, or compile it ahead of time exactly as it would run.

Every launcher is a function from tensors and a target to launches. It reads no tensor's contents, so it plans on meta
tensors as well as on real ones: the gate compiles what the launcher would launch, not a copy of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for: ("cuda", 90) or ("hip", "gfx942")."""

    backend: Literal["cuda", "hip"]
    arch: int | str

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def native_e4m3(self) -> bool:
        """Whether the compiler knows float8_e4m3fn here; elsewhere its bytes are decoded by bit operations."""
        if isinstance(self.arch, int):
            return self.arch >= 89
        return self.arch == "gfx950"  # gfx942's own 8-bit float is e4m3fnuz


TARGETS = (
    Target("cuda", 80),
    Target("cuda", 89),
    Target("cuda", 90),
    Target("cuda", 100),
    Target("cuda", 120),
    Target("hip", "gfx942"),
    Target("hip", "gfx950"),
)
SHARED_MEMORY = {  # bytes that one block may use
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, and every argument by the name of its parameter (tensors, numbers, constants)."""

    kernel: Any  # triton.JITFunction, or the interpreter's stand-in
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def device(self) -> torch.device:
        """That of its tensors."""
        return next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))

    def run(self) -> None:
        if 0 in self.grid:
            return  # nothing to do: a GPU refuses an empty grid
        # Fusion is pinned: Triton's default differs between versions.
        self.kernel[self.grid](
            **self.arguments, num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=True
        )


def run(launches: Sequence[Launch]) -> None:
    """Launch in order, each on the current stream of its tensors' device: Triton takes the current device otherwise."""
    for launch in launches:
        device = launch.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                launch.run()
        else:
            launch.run()


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where neighbours of a row are not neighbours in memory, as the kernels take them to be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int]:
    """The arguments NAME_AXIS of a launch; zeros for a tensor that there is not."""
    return {f"{name}_{axis}": 0 if tensor is None else tensor.stride(i) for i, axis in enumerate(axes)}


def interpreting() -> bool:
    """Whether the environment asks Triton to interpret kernels, in Triton's words."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def target_of(device: torch.device) -> Target:
    """The target of a GPU that torch sees; a CPU tensor is interpreted as if it were on sm_90."""
    if device.type != "cuda":
        return Target("cuda", 90)
    if torch.version.hip:
        return Target("hip", torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", 10 * major + minor)
