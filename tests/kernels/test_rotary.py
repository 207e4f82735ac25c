"""Rotary embedding against Hugging Face's Llama, and against multiplication of complex numbers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from compress.kernels.rotary import Rotation, rotary_tables, rotate


def rows(head_dim: int) -> torch.Tensor:
    x_THD = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    x_THD[0, 0, 0], x_THD[1, 0] = 300.0, -0.0
    return x_THD


def tables(pairs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.tensor([0, 1, 7, 1000, 100_000])
    return rotary_tables(10000.0 ** -(torch.arange(pairs) / pairs), positions, 1.25, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotate_is_hugging_faces(dtype: torch.dtype) -> None:
    """Its second half adds the same two products in the other order: equal, for sums commute."""
    x_THD = rows(16).to(dtype)
    cos_TF, sin_TF = tables(8, dtype)
    cos, sin = torch.cat((cos_TF, cos_TF), -1)[None], torch.cat((sin_TF, sin_TF), -1)[None]
    expected, _ = apply_rotary_pos_emb(x_THD.transpose(0, 1)[None], x_THD.transpose(0, 1)[None], cos, sin)
    assert torch.equal(rotate(x_THD, cos_TF, sin_TF), expected[0].transpose(0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [8, 5, 1])
def test_pairs_are_complex_numbers(pairs: int, interleaved: bool) -> None:
    """Three roundings of float32, of terms of at most 300 · 1.25: 1e-4."""
    x_THD = rows(16)
    cos_TF, sin_TF = tables(pairs)
    out = rotate(x_THD, cos_TF, sin_TF, interleaved)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    wide = x_THD.double()
    turned = torch.complex(wide[..., first], wide[..., second])
    turned = turned * torch.complex(cos_TF.double(), sin_TF.double())[:, None]
    torch.testing.assert_close(out[..., first].double(), turned.real, rtol=0, atol=1e-4)
    torch.testing.assert_close(out[..., second].double(), turned.imag, rtol=0, atol=1e-4)
    assert torch.equal(out[..., 2 * pairs :], x_THD[..., 2 * pairs :])


def test_position_zero_scales_alone() -> None:
    cos_TF, sin_TF = tables(8)
    assert torch.equal(rotate(rows(16), cos_TF, sin_TF)[0], rows(16)[0] * 1.25)


def test_no_rows() -> None:
    empty = torch.empty(0, 4)
    assert rotate(torch.empty(0, 3, 8), empty, empty, interleaved=True).shape == (0, 3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_that_grows_gives_the_same_angles(dtype: torch.dtype) -> None:
    inverse_F = 10000.0 ** -(torch.arange(8) / 8)
    rotation = Rotation(inverse_F, 1.25, dtype)
    for positions in ([0], [1023, 5], [1024], [3, 3], [70_000, 1], []):
        positions_T = torch.tensor(positions, dtype=torch.int64)
        for ours, expected in zip(
            rotation.tables(positions_T), rotary_tables(inverse_F, positions_T, 1.25, dtype), strict=True
        ):
            assert torch.equal(ours, expected)
            assert ours.is_contiguous()
