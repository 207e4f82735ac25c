from __future__ import annotations

import pytest
import torch

from compress.quant.awq import expand_tied, search_scale
from compress.quant.ranges import find_range
from compress.quant.rtn import round_to_nearest
from compress.quant.scheme import Scheme
from compress.statistics import Statistics
from tests.quant.samples import SCHEMES, correlated_inputs, statistics_of, weights


def rounded(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return round_to_nearest(weight, scheme, *find_range(weight, scheme)).dequantize()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("duo", [True, False])
def test_the_closed_form_is_the_error_of_the_outputs(scheme: Scheme, duo: bool):
    shared = [weights(10, 64), weights(6, 64, seed=1)]
    x, fresh = correlated_inputs(400, 64), correlated_inputs(300, 64, seed=1)
    found = search_scale(shared, statistics_of(x), statistics_of(fresh), scheme, duo=duo, max_rows=None)
    whole = torch.cat(shared)
    outputs = fresh @ whole.T
    with_scale = (fresh / found.scale_I) @ rounded(whole * found.scale_I, scheme).T
    without = fresh @ rounded(whole, scheme).T

    def relative(approximation: torch.Tensor) -> float:
        return float((approximation - outputs).square().sum() / outputs.square().sum())

    assert found.applied == (found.error_after < found.error_before)
    assert found.error_before == pytest.approx(relative(without), rel=2e-3)
    if found.applied:
        assert found.error_after == pytest.approx(relative(with_scale), rel=2e-3)
    else:
        assert torch.equal(found.scale_I, torch.ones(64))


def test_unequal_channels_gain():
    """Inputs whose sizes span two decades: scaling must pay, at 4 bits and per channel."""
    x, fresh = correlated_inputs(800, 64), correlated_inputs(800, 64, seed=1)
    for scheme in (Scheme(4, 32, True), Scheme(4, None, False), Scheme(3, 32, True)):
        found = search_scale([weights(48, 64)], statistics_of(x), statistics_of(fresh), scheme)
        assert found.applied
        assert found.ratio > 0
        assert found.error_after < 0.8 * found.error_before


def test_equal_channels_keep_the_identity_or_gain():
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    found = search_scale([weights(48, 64)], statistics_of(x), None, Scheme(4, 32, True))
    assert found.error_after <= found.error_before


def test_a_scale_that_hurts_held_out_tokens_is_refused():
    """The held-out inputs are large exactly where the calibration inputs are small."""
    size = torch.logspace(-1.5, 1.5, 64)
    noise = [torch.randn(500, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    found = search_scale(
        [weights(48, 64)], statistics_of(noise[0] * size), statistics_of(noise[1] * size.flip(0)), Scheme(4, 32, True)
    )
    assert not found.applied
    assert found.error_after > found.error_before
    assert "held-out" in found.reason
    assert torch.equal(found.scale_I, torch.ones(64))


@pytest.mark.parametrize("duo", [True, False])
def test_zero_channels_and_vanishing_rows_stay_finite(duo: bool):
    """Row 2: an input channel that is never on, a column of zeros, a row at 1e-9."""
    x, weight = correlated_inputs(400, 64), weights(12, 64)
    x[:, 7] = 0
    weight[3] = 1e-9
    weight[:, 9] = 0
    scheme = Scheme(4, 32, False)
    found = search_scale([weight], statistics_of(x), None, scheme, duo=duo)
    assert found.applied
    assert found.scale_I[7] == found.scale_I[9] == 1
    assert (found.scale_I > 0).all()
    scale, zero = find_range(weight * found.scale_I, scheme)
    assert (scale != 0).all()
    dense = round_to_nearest(weight * found.scale_I, scheme, scale, zero).dequantize() / found.scale_I
    assert torch.isfinite(dense).all()


def test_no_input_at_all_gives_the_identity():
    """Row 2."""
    found = search_scale([weights(8, 64)], Statistics.empty(64), None, Scheme(4, 32, True))
    assert not found.applied
    assert torch.equal(found.scale_I, torch.ones(64))


def attend(
    x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Grouped-query attention of 4 heads over 2, without mask or positions."""
    q = (x @ query.T).view(-1, 4, 8).transpose(0, 1)
    k, v = ((x @ w.T).view(-1, 2, 8).transpose(0, 1).repeat_interleave(2, dim=0) for w in (key, value))
    mixed = torch.softmax(q @ k.transpose(1, 2) / 8**0.5, dim=-1) @ v
    return mixed.transpose(0, 1).flatten(1) @ out.T


def test_a_tied_scale_leaves_grouped_query_attention_unchanged():
    """Row 8: o_proj's columns take the scale, v_proj's rows give it; exact before rounding."""
    torch.manual_seed(0)
    x, query, out = torch.randn(20, 32), torch.randn(32, 32), torch.randn(32, 32)
    key, value = torch.randn(16, 32), torch.randn(16, 32)
    inputs = statistics_of(correlated_inputs(400, 32))
    found = search_scale([out], inputs, None, Scheme(3, 16, True), group_tied=(4, 2, 8))
    assert found.applied
    per_kv_channel = found.scale_I.view(2, 2, 8)
    assert torch.equal(per_kv_channel[:, 0], per_kv_channel[:, 1])
    scale = per_kv_channel[:, 0].reshape(-1)
    assert torch.equal(expand_tied(scale, (4, 2, 8)), found.scale_I)
    assert float(scale.max() / scale.min()) > 1.5
    before = attend(x, query, key, value, out)
    after = attend(x, query, key, value / scale[:, None], out * found.scale_I)
    assert torch.allclose(before, after, rtol=1e-5, atol=1e-4)


def test_fewer_rows_choose_about_as_well():
    x, weight = statistics_of(correlated_inputs(800, 64)), weights(600, 64)
    scheme = Scheme(4, 32, True)
    few, every = (search_scale([weight], x, None, scheme, max_rows=rows) for rows in (100, None))
    assert few.error_before == pytest.approx(every.error_before)
    assert few.error_after < 1.03 * every.error_after
