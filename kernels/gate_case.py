"""What the gate is told of a kernel: how it is launched, and what its machine code must look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from compress.kernels.launch import Launch, Target


@dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    `plan` makes the launches on meta tensors; the gate compiles all of them, and looks at the first for what follows.
    `elements` is what one iteration of its innermost loop handles per program, for instructions per element: weights
    of a matmul, key and value elements of attention. `matrix` names, for each target that must use one, the mnemonic
    of the matrix instruction expected in the machine code ("HMMA", "HGMMA", "IMMA", "UTCHMMA", "v_mfma", ...), or
    several of which one will do, as "UTCIMMA|IMMA".
    `tiles_in_flight` is the least number of asynchronous loop tiles that shared memory must hold, in bytes of one tile.
    `most` is the greatest number of instructions per element that a target may need, whatever is recorded.
    `refused` says why a target cannot compile it; the gate fails if it then does, so that the reason stays true.
    """

    name: str
    plan: Callable[[Target], list[Launch]]
    elements: int | None = None
    matrix: Mapping[str, str] = field(default_factory=dict)
    tiles_in_flight: tuple[int, int] | None = None  # tiles, bytes of one; CUDA targets only
    most: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
