"""RMSNorm, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import norm_triton as norm_kernel
from compress.kernels.launch import run
from tests.kernels.interpreted.rounding import (
    BOTH,
    DTYPES,
    SM90,
    TINY,
    U32,
    U,
    assert_within,
    hard_rows,
    poisoned,
    randn,
)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    wide = x.double()
    gain = weight.double() + unit_offset
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def norm_bound(exact: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two roundings to dtype (Llama; Gemma has one) and about 16 in float32: the mean's tree, rsqrt, products."""
    return (2.1 * U[dtype] + 16 * U32) * exact.abs() + TINY[dtype] * (1 + weight.double().abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("columns", [1, 64, 576, 4099])
def test_rms_norm(columns: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = hard_rows(7, columns, dtype), randn(columns, dtype=dtype, seed=1)
    room = poisoned(7, columns + 5, dtype=dtype)
    run(norm_kernel.plan_rms_norm(x, weight, 1e-5, room[:, :columns], SM90, unit_offset=unit_offset))
    exact = exact_norm(x, weight, 1e-5, unit_offset)
    assert_within(room[:, :columns], exact, norm_bound(exact, weight, dtype))
    assert room[:, columns:].isnan().all()
    assert torch.equal(room[1:3, :columns].signbit(), (x[1:3].signbit() ^ (weight.double() + unit_offset).signbit()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_add_rms_norm(unit_offset: bool, dtype: torch.dtype) -> None:
    """The sum is torch's to the bit; it may replace the residual."""
    x, residual, weight = hard_rows(5, 200, dtype), randn(5, 200, dtype=dtype, seed=2), randn(200, dtype=dtype, seed=1)
    normed, total = norm_kernel.add_rms_norm(x, residual, weight, 1e-6, unit_offset)
    assert torch.equal(total, x + residual)
    exact = exact_norm(total, weight, 1e-6, unit_offset)
    assert_within(normed, exact, norm_bound(exact, weight, dtype))
    out = poisoned(5, 200, dtype=dtype)
    run(
        norm_kernel.plan_rms_norm(
            x, weight, 1e-6, out, SM90, unit_offset=unit_offset, residual=residual, total=residual
        )
    )
    assert torch.equal(out, normed)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("shared", [True, False])
def test_norm_of_heads_in_place(shared: bool, dtype: torch.dtype) -> None:
    """Queries and keys of a fused projection, where they lie; the values beside them stay."""
    qkv_THD = randn(3, 9, 48, dtype=dtype)
    weight = randn(48, dtype=dtype, seed=1) if shared else randn(7, 48, dtype=dtype, seed=1)
    before = qkv_THD.clone()
    run(norm_kernel.plan_rms_norm(qkv_THD[:, :7], weight, 1e-6, qkv_THD[:, :7], SM90))
    exact = exact_norm(before[:, :7], weight, 1e-6, False)
    assert_within(qkv_THD[:, :7], exact, norm_bound(exact, weight, dtype))
    assert torch.equal(qkv_THD[:, 7:], before[:, 7:])


def test_norm_refuses_rows_that_no_program_holds() -> None:
    x = torch.empty(1, 40000, device="meta")
    with pytest.raises(ValueError, match="40000 channels"):
        norm_kernel.plan_rms_norm(x, x[0], 1e-6, x, SM90)
