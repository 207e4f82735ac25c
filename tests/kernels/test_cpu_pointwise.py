"""The compiled norms, rotations, gates and stores against their references in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.kernels import activation, norm, rotary
from compress.kernels.activation import Gate
from compress.kernels.cpu.isa import supported
from compress.kernels.cpu.pointwise import CompiledRows

pytestmark = pytest.mark.skipif(not supported(), reason="no C compiler on this machine")
ISAS = supported()


@pytest.fixture(params=ISAS)
def rows(request: pytest.FixtureRequest) -> CompiledRows:
    return CompiledRows(request.param)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms(rows: CompiledRows, unit_offset: bool) -> None:
    """Float32 sums of at most 576 squares: 1e-6 of values up to 10, an outlier of 1e4 among them."""
    torch.manual_seed(0)
    x_TC, residual_TC, weight_C = torch.randn(5, 576), torch.randn(5, 576), torch.randn(576)
    x_TC[0, 3], x_TC[1] = 1e4, -0.0
    close: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-6}
    expected = norm.rms_norm(x_TC.double(), weight_C.double(), 1e-5, unit_offset).float()
    torch.testing.assert_close(rows.rms_norm(x_TC, weight_C, 1e-5, unit_offset), expected, **close)
    ours, total = rows.add_rms_norm(x_TC, residual_TC, weight_C, 1e-5, unit_offset)
    assert torch.equal(total, x_TC + residual_TC)
    torch.testing.assert_close(
        ours, norm.rms_norm(total.double(), weight_C.double(), 1e-5, unit_offset).float(), **close
    )
    wide_T = torch.randn(5, 9 * 64 + 7)
    heads_THD, weight_HD = wide_T[:, : 9 * 64].view(5, 9, 64), torch.randn(9, 64)
    expected = norm.rms_norm(heads_THD.double(), weight_HD.double(), 1e-5, unit_offset).float()
    torch.testing.assert_close(rows.rms_norm(heads_THD, weight_HD, 1e-5, unit_offset), expected, **close)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [32, 10])
def test_rotations(rows: CompiledRows, interleaved: bool, pairs: int) -> None:
    """Two products and a sum: equal to the reference's bits; whole heads and a part of them."""
    torch.manual_seed(0)
    qkv_TX = torch.randn(7, 5 * 64)
    q_THD = qkv_TX.view(7, 5, 64)[:, :3]
    angle_TF = torch.randn(7, pairs)
    ours = rows.rotate(q_THD, angle_TF.cos(), angle_TF.sin(), interleaved)
    torch.testing.assert_close(
        ours, rotary.rotate(q_THD, angle_TF.cos(), angle_TF.sin(), interleaved), rtol=0, atol=2e-7
    )


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "gelu"])
def test_gates(rows: CompiledRows, gate: Gate) -> None:
    """3e-6 of the result: the exponential to 2 ulp, and the cancellation of tanh near −1; the tails vanish."""
    torch.manual_seed(0)
    x_T2I = torch.randn(3, 2 * 192) * 4
    x_T2I[0, :6] = torch.tensor([-200.0, 200.0, -88.5, 0.0, -0.0, 1e-40])
    x_T2I[:, 192:] = x_T2I[:, 192:].sign()
    ours, expected = rows.gated(x_T2I, gate), activation.gated(x_T2I.double(), gate).float()
    torch.testing.assert_close(ours, expected, rtol=5e-6, atol=1e-6)
    assert torch.isfinite(ours).all()
    x_T2I[1, 5] = torch.nan
    assert rows.gated(x_T2I, gate).isnan().nonzero().tolist() == [[1, 5]]


def test_instruction_sets_give_the_same_bits() -> None:
    torch.manual_seed(0)
    x_TC, weight_C = torch.randn(9, 96) * 3, torch.randn(96)
    results = [
        (
            *rows.add_rms_norm(x_TC, x_TC.flip(0), weight_C, 1e-6),
            rows.gated(x_TC, "silu"),
            rows.gated(x_TC, "gelu_tanh"),
        )
        for rows in map(CompiledRows, ISAS)
    ]
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_what_the_kernels_do_not_take_goes_to_the_reference(rows: CompiledRows) -> None:
    torch.manual_seed(0)
    odd_TC, weight_C = torch.randn(3, 23), torch.randn(23)
    assert torch.equal(rows.rms_norm(odd_TC, weight_C, 1e-5), norm.rms_norm(odd_TC, weight_C, 1e-5))
    half = torch.randn(3, 32).bfloat16()
    assert torch.equal(rows.gated(half, "silu"), activation.gated(half, "silu"))
    assert rows.gated(torch.randn(0, 64), "silu").shape == (0, 32)


def test_shapes_that_broadcast_go_to_the_reference(rows: CompiledRows) -> None:
    """The kernels would read past the end of what is broadcast."""
    torch.manual_seed(0)
    x_TC, one_1, row_C = torch.randn(4, 32), torch.randn(1), torch.randn(32)
    x_THD, angle_1F = x_TC.view(4, 2, 16), torch.randn(1, 8)
    assert torch.equal(rows.rms_norm(x_TC, one_1, 1e-5), norm.rms_norm(x_TC, one_1, 1e-5))
    assert torch.equal(rows.rms_norm(x_THD, row_C[None, :16], 1e-5), norm.rms_norm(x_THD, row_C[None, :16], 1e-5))
    ours, expected = (f(x_TC, row_C[None], row_C, 1e-5)[1] for f in (rows.add_rms_norm, norm.add_rms_norm))
    assert torch.equal(ours, expected)
    assert torch.equal(rows.rotate(x_THD, angle_1F, angle_1F), rotary.rotate(x_THD, angle_1F, angle_1F))
    with pytest.raises(RuntimeError):
        rows.rms_norm(x_TC, row_C[:16], 1e-5)
    with pytest.raises(RuntimeError):
        rows.rotate(x_THD, torch.randn(4, 16), torch.randn(4, 16))
