"""Rows of x, W and y that lie more than 2^31 elements apart, in memory that is reserved but hardly touched."""

from __future__ import annotations

import dataclasses
import mmap

import pytest
import torch

from compress.kernels.launch import Target, run
from compress.kernels.matmul_triton import plan_matmul, prepare_matmul
from tests.kernels.interpreted.quantized_weights import weight_of

STRIDE = 3 * 2**29 + 8  # fits 32 bits; twice it, where the third row is, does not
NORESERVE = 0x4000  # Linux: no promise of memory for pages that are never written


def far_rows(rows_XY: torch.Tensor) -> torch.Tensor:
    """The same numbers, rows STRIDE elements apart."""
    rows, columns = rows_XY.shape
    size = ((rows - 1) * STRIDE + columns) * rows_XY.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    far = torch.frombuffer(memory, dtype=rows_XY.dtype).as_strided((rows, columns), (STRIDE, 1))
    return far.copy_(rows_XY)


@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_far_rows(tokens: int):
    """Bit for bit as with rows side by side."""
    weight = weight_of("int4 g64 zero", 3, 192)
    linear = prepare_matmul(weight, torch.ones(3), torch.device("cpu"), torch.float16)
    x_TI = torch.randn(tokens, 192, generator=torch.Generator().manual_seed(0)).half()
    near_TO = linear(x_TI)
    linear = dataclasses.replace(linear, words_OW=far_rows(linear.words_OW))
    x_TI = far_rows(x_TI) if tokens == 3 else x_TI
    y_TO = torch.full((tokens, 3), torch.nan, dtype=torch.float16)
    y_TO = far_rows(y_TO) if tokens == 3 else y_TO
    run(plan_matmul(x_TI, linear, y_TO, None, Target("cuda", 90)))
    assert torch.equal(y_TO, near_TO)
