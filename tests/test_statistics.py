from __future__ import annotations

import pytest
import torch

from compress.errors import RunError
from compress.statistics import Statistics


def inputs(tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, features, generator=generator) * torch.linspace(0.1, 3, features)


def gathered(*chunks: torch.Tensor) -> Statistics:
    statistics = Statistics.empty(chunks[0].shape[-1], "here")
    for chunk in chunks:
        statistics.add(chunk)
    return statistics


@pytest.mark.parametrize("features", [5, 256, 300, 600])
def test_sums_over_chunks_are_the_moments_of_all_tokens(features: int):
    x = inputs(90, features)
    found = gathered(x[:40].view(2, 20, features), x[40:])
    assert found.tokens == 90
    assert torch.allclose(found.gram().double(), x.double().T @ x.double() / 90, atol=1e-5)
    assert torch.equal(found.gram(), found.gram().T)
    assert torch.allclose(found.mean_abs(), x.abs().mean(0), rtol=1e-5)
    assert torch.equal(found.max_abs_I, x.abs().amax(0))
    assert torch.equal(found.mean_square(), found.gram().diagonal())


def test_same_chunks_give_the_same_bits():
    x = inputs(64, 300)
    assert torch.equal(gathered(x[:30], x[30:]).gram(), gathered(x[:30], x[30:]).gram())


def test_merge_is_the_statistics_of_both():
    x = inputs(90, 40)
    both, whole = gathered(x[:50]).merge(gathered(x[50:])), gathered(x)
    assert both.tokens == whole.tokens
    assert torch.allclose(both.gram(), whole.gram(), atol=1e-6)
    assert torch.allclose(both.mean_abs(), whole.mean_abs(), rtol=1e-6)
    assert torch.equal(both.max_abs_I, whole.max_abs_I)


def test_scaled_is_the_statistics_of_the_divided_input():
    x, scale = inputs(90, 40), torch.linspace(0.2, 4, 40)
    scaled, direct = gathered(x).scaled(scale), gathered(x / scale)
    assert torch.allclose(scaled.gram(), direct.gram(), rtol=1e-4, atol=1e-6)
    assert torch.allclose(scaled.mean_abs(), direct.mean_abs(), rtol=1e-5)
    assert torch.allclose(scaled.max_abs_I, direct.max_abs_I, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_refused_by_name(bad: float):
    x = inputs(10, 8)
    x[3, 6] = bad
    with pytest.raises(RunError, match=r"here: the calibration input is not finite \(first in channel 6\)"):
        gathered(x)


def test_no_tokens_leave_finite_zeros():
    empty = gathered(inputs(0, 8))
    assert empty.tokens == 0
    assert not empty.gram().any()
    assert not empty.mean_abs().any()
