from __future__ import annotations

import pytest
import torch

from compress.quant.ranges import find_range
from compress.quant.rtn import round_to_nearest
from compress.quant.scheme import Scheme
from tests.quant.samples import SCHEMES, weights


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme_stays_within_half_a_step_of_what_is_not_clipped(scheme: Scheme):
    weight = weights(6, 64)
    scale, zero = find_range(weight, scheme)
    rounded = round_to_nearest(weight, scheme, scale, zero)
    assert rounded.codes_OI.dtype == torch.int8
    assert scheme.qmin <= int(rounded.codes_OI.min())
    assert int(rounded.codes_OI.max()) <= scheme.qmax
    step = scale.float().repeat_interleave(64 // scale.shape[1], dim=1).abs()
    clipped = (rounded.codes_OI == scheme.qmin) | (rounded.codes_OI == scheme.qmax)
    error = (rounded.dequantize() - weight).abs()
    assert (error <= 0.5 * step * (1 + 1e-5))[~clipped].all()
    # The range covers the weights: where it clips, it is by no more than one step (the fp16 scale, the uneven codes).
    assert (error <= 1.01 * step).all()


def test_the_code_is_the_nearest_of_all():
    scheme, weight = Scheme(3, 8, False), weights(4, 16)
    scale, zero = find_range(weight, scheme)
    assert zero is not None
    rounded = round_to_nearest(weight, scheme, scale, zero)
    points = torch.arange(scheme.qmin, scheme.qmax + 1)
    grid = (points - zero[..., None].float()) * scale.float()[..., None]  # [O, G, codes]
    nearest = (weight.unflatten(1, (2, 8))[..., None] - grid[:, :, None]).abs().amin(-1).flatten(1)
    assert torch.allclose((rounded.dequantize() - weight).abs(), nearest, atol=1e-7)
