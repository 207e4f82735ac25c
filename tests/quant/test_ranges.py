from __future__ import annotations

import pytest
import torch

from compress.quant.gptq import output_error
from compress.quant.ranges import RangeMethod, find_range, storable_scale
from compress.quant.rtn import round_to_nearest
from compress.quant.scheme import Scheme
from tests.quant.samples import SCHEMES, correlated_inputs, statistics_of, weights

SEARCHES: list[RangeMethod] = ["mse", "imatrix", "gram"]


def block_diagonal(gram: torch.Tensor, width: int) -> torch.Tensor:
    same_group = torch.arange(len(gram)) // width
    return gram * (same_group[:, None] == same_group[None, :])


def loss(
    weight: torch.Tensor, scheme: Scheme, method: RangeMethod, objective: torch.Tensor, gram: torch.Tensor
) -> float:
    scale, zero = find_range(weight, scheme, method, gram)
    return output_error(round_to_nearest(weight, scheme, scale, zero).dequantize() - weight, objective)


def test_minmax_is_the_usual_convention():
    weight = weights(5, 64)
    scale, zero = find_range(weight, Scheme(4, 32, True), scale_dtype=torch.float32)
    assert zero is None
    assert torch.allclose(scale, weight.unflatten(1, (2, 32)).abs().amax(-1) / 7.5)
    scale, zero = find_range(weight, Scheme(4, 32, False), scale_dtype=torch.float32)
    groups = weight.unflatten(1, (2, 32))
    assert zero is not None
    assert torch.allclose(scale, (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15)
    # Zero lies on the grid, and the lowest weight on the lowest code.
    assert torch.equal(zero.float(), (-8 - groups.amin(-1).clamp(max=0) / scale).round())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_search_beats_minmax_on_its_own_objective(scheme: Scheme):
    weight = weights(6, 64)
    gram = statistics_of(correlated_inputs(300, 64)).gram()
    width = scheme.group_size or 64
    objectives = {
        "mse": torch.eye(64),
        "imatrix": torch.diag(gram.diagonal()),
        "gram": block_diagonal(gram, width),
    }
    for method in SEARCHES:
        plain = loss(weight, scheme, "minmax", objectives[method], gram)
        found = loss(weight, scheme, method, objectives[method], gram)
        assert found <= plain * (1 + 1e-6), method
        if scheme.bits <= 4:
            assert found < 0.98 * plain, method


def test_a_search_comes_close_to_the_best_of_all_scales():
    weight, scheme = weights(16, 16), Scheme(3, 16, True)
    unit = weight.abs().amax(1, keepdim=True) / 3.5
    best = torch.full((16,), torch.inf)
    for factor in torch.linspace(-1.3, 1.3, 2001):
        if abs(float(factor)) < 0.3:
            continue
        rounded = round_to_nearest(weight, scheme, unit * factor, None).dequantize()
        best = torch.minimum(best, (rounded - weight).square().sum(1))
    scale, _ = find_range(weight, scheme, "mse", scale_dtype=torch.float32)
    found = (round_to_nearest(weight, scheme, scale, None).dequantize() - weight).square().sum(1)
    assert float(found.sum()) < 1.05 * float(best.sum())
    assert (found >= best * (1 - 1e-3)).all()


def test_the_larger_side_gets_the_code_without_a_partner():
    """A group that lies on −8 … 7 with its sign turned is only representable with a negative scale."""
    codes = torch.arange(-8, 8).float()
    weight = torch.stack([0.5 * codes, -0.5 * codes])
    scale, _ = find_range(weight, Scheme(4, 16, True), "mse", scale_dtype=torch.float32)
    assert scale[0] > 0 > scale[1]


@pytest.mark.parametrize("method", ["minmax", *SEARCHES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_stored_scale_is_zero_or_infinite(method: RangeMethod, dtype: torch.dtype, symmetric: bool):
    """Row 2: an all-zero group, a row at 1e-9 whose fp16 scale underflows, a row that overflows it."""
    weight = weights(4, 32)
    weight[0, :16] = 0
    weight[1] = 1e-9
    weight[2] *= 1e9
    gram = statistics_of(correlated_inputs(100, 32)).gram()
    gram[:, 3] = gram[3] = 0
    scheme = Scheme(4, 16, symmetric)
    scale, zero = find_range(weight, scheme, method, gram, dtype)
    assert scale.dtype == dtype
    assert torch.isfinite(scale).all()
    assert (scale != 0).all()
    dense = round_to_nearest(weight, scheme, scale, zero).dequantize()
    assert torch.isfinite(dense).all()
    assert not dense[0, :16].any()


def test_storable_scale_keeps_the_sign():
    stored = storable_scale(torch.tensor([1e-12, -1e-12, 1e9, -1e9, 0.5]), torch.float16)
    assert stored.tolist() == [2**-24, -(2**-24), 65504.0, -65504.0, 0.5]


def test_rows_are_searched_alike_in_any_chunk(monkeypatch: pytest.MonkeyPatch):
    weight, scheme = weights(10, 32), Scheme(4, 16, False)
    whole = find_range(weight, scheme, "mse")
    monkeypatch.setattr("compress.quant.ranges._CHUNK", 96)
    parts = find_range(weight, scheme, "mse")
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True) if a is not None and b is not None)
