"""Linears against float64 products of the weight that is stored."""

from __future__ import annotations

import pytest
import torch

from compress.kernels.dispatch import prepare_linear
from compress.kernels.linear import FEW_ROWS, DenseLinear, DenseLinearCPU, IntegerWeight, dequantize

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [DenseLinear, DenseLinearCPU])
@pytest.mark.parametrize("tokens", [1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_dense(kind: type[DenseLinear] | type[DenseLinearCPU], tokens: int, biased: bool) -> None:
    """To 3e-5 where outputs reach 30: 96 float32 terms in another order."""
    torch.manual_seed(0)
    x_TI, weight_OI, bias_O = torch.randn(tokens, 96), torch.randn(40, 96), torch.randn(40)
    ours = kind(weight_OI, bias_O if biased else None)(x_TI)
    expected = x_TI.double() @ weight_OI.double().t() + (bias_O.double() if biased else 0)
    assert ours.shape == (tokens, 40)
    assert ours.is_contiguous()
    assert (ours.double() - expected).abs().max() < 3e-5


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_integer_weights_by_hand(asymmetric: bool, scale_dtype: torch.dtype) -> None:
    """Row 21: any dtype of scales; (code − zero point) · scale, element by element."""
    codes_OI = torch.tensor([[-8, 7, 1, 2], [0, 3, -1, -2]], dtype=torch.int8)
    scale_OG = torch.tensor([[0.5, 2.0], [1.0, 0.25]], dtype=scale_dtype)
    zero_point_OG = torch.tensor([[7, -8], [1, 0]], dtype=torch.int8) if asymmetric else None
    weight = IntegerWeight(4, codes_OI, scale_OG, zero_point_OG)
    expected = [[-4, 3.5, 2, 4], [0, 3, -0.25, -0.5]]
    if asymmetric:
        expected = [[-7.5, 0, 18, 20], [-1, 2, -0.25, -0.5]]
    assert torch.equal(dequantize(weight, torch.float32), torch.tensor(expected))


def test_stacked_linears_put_their_outputs_side_by_side() -> None:
    """Row 9: a bias where one part has one, zeros where another has none."""
    torch.manual_seed(0)
    weights = [torch.randn(4, 8), torch.randn(2, 8)]
    integer = IntegerWeight(8, torch.randint(-8, 8, (3, 8), dtype=torch.int8), torch.rand(3, 2), None)
    bias = torch.randn(2)
    linear = prepare_linear([*weights, integer], [None, bias, None], CPU, torch.float32)
    x_TI = torch.randn(5, 8)
    parts = [x_TI @ weights[0].t(), x_TI @ weights[1].t() + bias, x_TI @ dequantize(integer, torch.float32).t()]
    torch.testing.assert_close(linear(x_TI), torch.cat(parts, dim=1))
    assert linear.nbytes == 4 * (9 * 8 + 9)


def test_one_dense_weight_is_held_not_copied() -> None:
    """A tied head shares the embedding's memory."""
    weight_OI = torch.randn(4, 8)
    linear = prepare_linear([weight_OI], [None], CPU, torch.float32)
    assert isinstance(linear, DenseLinearCPU)
    assert linear.weight_OI.data_ptr() == weight_OI.data_ptr()
