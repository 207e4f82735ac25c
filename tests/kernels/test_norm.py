"""RMSNorm against Hugging Face's Llama and Gemma, bit for bit, and against float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from compress.kernels.norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 7], x[1], x[2] = 3e4, 0.0, -0.0
    x[3] = torch.finfo(dtype).smallest_normal / 4  # subnormal
    return x


def weight(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_is_hugging_faces(unit_offset: bool, dtype: torch.dtype) -> None:
    peer = (GemmaRMSNorm if unit_offset else LlamaRMSNorm)(200, eps=1e-6).to(dtype)
    with torch.no_grad():
        peer.weight.copy_(weight(200, dtype=dtype))
        expected = peer(rows(dtype))
    assert torch.equal(rms_norm(rows(dtype), peer.weight.detach(), 1e-6, unit_offset), expected)


def test_rms_norm_in_float64() -> None:
    """Float32 sums of 200 squares and a handful of products: 2e-6 of the value."""
    x, w = rows(torch.float32), weight(200, dtype=torch.float32)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    torch.testing.assert_close(rms_norm(x, w, 1e-6).double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_for_each_head(dtype: torch.dtype) -> None:
    x_THD = rows(dtype).reshape(6, 5, 40)
    w_HD = weight(5, 40, dtype=dtype)
    expected = torch.stack([rms_norm(x_THD[:, head], w_HD[head], 1e-6) for head in range(5)], dim=1)
    assert torch.equal(rms_norm(x_THD, w_HD, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_add_rms_norm(unit_offset: bool, dtype: torch.dtype) -> None:
    x, residual, w = rows(dtype), rows(dtype).flip(0), weight(200, dtype=dtype)
    normed, total = add_rms_norm(x, residual, w, 1e-6, unit_offset)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, w, 1e-6, unit_offset))


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
