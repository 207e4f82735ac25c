"""Rotations, interpreted, against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import rotary_triton as rotary_kernel
from compress.kernels.launch import run
from tests.kernels.interpreted.rounding import DTYPES, SM90, TINY, U32, U, assert_within, randn


def exact_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair as a complex number, turned by multiplication."""
    pairs = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[:, None]
    wide, out = x.double(), x.double().clone()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = torch.complex(wide[..., first], wide[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rotation_bound(x: torch.Tensor, cos: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """One rounding to dtype; three in float32, of terms no larger than the largest |x| times the largest factor."""
    return U[x.dtype] * exact.abs() + 3 * U32 * x.double().abs().max() * 4 + TINY[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "pairs"), [(1, 64, 32), (5, 64, 12), (40, 128, 64), (3, 80, 40)])
def test_rotate(heads: int, head_dim: int, pairs: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = randn(4, heads, head_dim, dtype=dtype)
    x[1, 0] = -0.0
    angle = randn(4, pairs, dtype=torch.float32, seed=1) * 3
    cos, sin = angle.cos() * 1.25, angle.sin() * 1.25
    out = rotary_kernel.rotate(x, cos, sin, interleaved)
    exact = exact_rotation(x, cos, sin, interleaved)
    assert_within(out, exact, rotation_bound(x, cos, exact))
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [32, 10])
def test_rotate_in_place(pairs: int, interleaved: bool) -> None:
    qkv_THD = randn(3, 9, 64, dtype=torch.float16)
    before, angle = qkv_THD.clone(), randn(3, pairs, dtype=torch.float32, seed=1)
    qk_THD = qkv_THD[:, :7]
    run(rotary_kernel.plan_rotate(qk_THD, angle.cos(), angle.sin(), qk_THD, SM90, interleaved=interleaved))
    assert torch.equal(qk_THD, rotary_kernel.rotate(before[:, :7], angle.cos(), angle.sin(), interleaved))
    assert torch.equal(qkv_THD[:, 7:], before[:, 7:])
