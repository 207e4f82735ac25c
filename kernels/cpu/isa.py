"""Instruction sets of the compiled kernels, fastest last; the numbers are those of linear.c."""

from __future__ import annotations

from typing import Literal, get_args

from compress.kernels.cpu.build import library

Isa = Literal["portable", "avx2", "avxvnni", "avx512"]
ISAS: tuple[Isa, ...] = get_args(Isa)


def supported() -> list[Isa]:
    """Those that this processor runs; none where the kernels could not be built."""
    kernels = library()
    return [isa for number, isa in enumerate(ISAS) if kernels is not None and kernels.compress_supports(number)]
