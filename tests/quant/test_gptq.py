from __future__ import annotations

import itertools

import pytest
import torch

from compress.quant.gptq import dampening_for, gptq, output_error, row_errors
from compress.quant.ranges import find_range
from compress.quant.refine import descend_codes, refit_scales
from compress.quant.rtn import round_to_nearest
from compress.quant.scheme import QuantizedWeight, Scheme
from tests.quant.samples import SCHEMES, correlated_inputs, statistics_of, weights


def error(weight: torch.Tensor, quantized: QuantizedWeight, gram: torch.Tensor) -> float:
    return output_error(quantized.dequantize() - weight, gram)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("act_order", [True, False])
def test_without_correlation_it_is_round_to_nearest(scheme: Scheme, act_order: bool):
    weight = weights(6, 64)
    ranges = find_range(weight, scheme)
    rounded = round_to_nearest(weight, scheme, *ranges)
    for gram in (torch.eye(64), torch.diag(torch.logspace(-2, 2, 64))):
        found, report = gptq(weight, gram, scheme, *ranges, act_order=act_order, refine=0)
        assert torch.equal(found.codes_OI, rounded.codes_OI)
        assert not report.fallback
        assert report.dampening == 0.01


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_it_beats_round_to_nearest_on_correlated_inputs(scheme: Scheme):
    """Row 6: on the calibration tokens and on others, and with other codes."""
    weight, gram = weights(16, 64), statistics_of(correlated_inputs(2000, 64)).gram()
    held_out = statistics_of(correlated_inputs(2000, 64, seed=1)).gram()
    ranges = find_range(weight, scheme)
    rounded = round_to_nearest(weight, scheme, *ranges)
    for refine in (0, 1):
        found, _ = gptq(weight, gram, scheme, *ranges, refine=refine)
        assert error(weight, found, gram) < 0.8 * error(weight, rounded, gram)
        assert error(weight, found, held_out) < 0.9 * error(weight, rounded, held_out)
        assert scheme.qmin <= int(found.codes_OI.min())
        assert int(found.codes_OI.max()) <= scheme.qmax
        assert float((found.codes_OI != rounded.codes_OI).float().mean()) > 0.01


def test_no_row_is_worse_than_round_to_nearest():
    scheme, weight = Scheme(2, 16, True), weights(200, 64)
    gram = statistics_of(correlated_inputs(300, 64)).gram()
    ranges = find_range(weight, scheme)
    plain = row_errors(round_to_nearest(weight, scheme, *ranges).dequantize() - weight, gram)
    found, _ = gptq(weight, gram, scheme, *ranges)
    assert (row_errors(found.dequantize() - weight, gram) <= plain).all()


def test_the_column_loop_follows_the_paper():
    """Against the textbook recursion: after each column, the rest is refitted to least squares in closed form."""
    scheme, weight = Scheme(4, 8, False), weights(5, 24)
    gram = statistics_of(correlated_inputs(500, 24)).gram()
    scale, zero = find_range(weight, scheme)
    assert zero is not None
    dampened = (gram + 0.01 * gram.diagonal().mean() * torch.eye(24)).double()
    order = torch.argsort(gram.diagonal(), descending=True).tolist()
    current, codes = weight.double().clone(), torch.zeros(5, 24, dtype=torch.int8)
    for position, column in enumerate(order):
        step, offset = scale[:, column // 8].double(), zero[:, column // 8].double()
        code = ((current[:, column] / step).round() + offset).clamp(-8, 7)
        codes[:, column] = code.to(torch.int8)
        later = order[position + 1 :]
        change = (code - offset) * step - current[:, column]
        current[:, column] += change
        if later:
            # min over δ of (change, δ) H (change, δ)ᵀ
            current[:, later] -= change[:, None] * torch.linalg.solve(
                dampened[later][:, later], dampened[later, column]
            )
    found, _ = gptq(weight, gram, scheme, scale, zero, refine=0, block_size=7)
    assert torch.equal(found.codes_OI, codes)


def test_block_size_does_not_matter():
    scheme, weight = Scheme(4, 16, True), weights(8, 64)
    gram = statistics_of(correlated_inputs(500, 64)).gram()
    ranges = find_range(weight, scheme)
    codes = [gptq(weight, gram, scheme, *ranges, block_size=size)[0].codes_OI for size in (1, 16, 64, 100)]
    assert all(float((codes[0] != other).float().mean()) < 0.01 for other in codes[1:])


def test_rows_are_independent(monkeypatch: pytest.MonkeyPatch):
    scheme, weight = Scheme(4, 16, False), weights(12, 64)
    gram = statistics_of(correlated_inputs(500, 64)).gram()
    ranges = find_range(weight, scheme)
    whole, _ = gptq(weight, gram, scheme, *ranges)
    monkeypatch.setattr("compress.quant.gptq._ROWS", 5)
    parts, _ = gptq(weight, gram, scheme, *ranges)
    assert float((whole.codes_OI != parts.codes_OI).float().mean()) < 0.01
    assert parts.scale_OG.shape == whole.scale_OG.shape
    assert torch.equal(parts.zero_point_OG, whole.zero_point_OG)  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [2, 3])
def test_tiny_cases_reach_the_best_of_all_codes(columns: int):
    """Against all codes of a row: never better, the best itself for most rows, and 20 % from it on average."""
    scheme, rows = Scheme(3, columns, True), 60
    weight = weights(rows, columns, seed=3)
    gram = statistics_of(correlated_inputs(200, columns, seed=4)).gram()
    scale, _ = find_range(weight, scheme, scale_dtype=torch.float32)
    codes = torch.tensor(list(itertools.product(range(-4, 4), repeat=columns))).float()
    delta = codes[None] * scale[:, :, None] - weight[:, None]
    best = torch.einsum("oci,ij,ocj->oc", delta, gram, delta).amin(1)
    found, _ = gptq(weight, gram, scheme, scale, None, refine=0, dampening=1e-4)
    reached = row_errors(found.dequantize() - weight, gram)
    assert (reached >= best * (1 - 1e-3) - 1e-9).all()
    assert float(reached.sum()) < 1.2 * float(best.sum())
    assert float((reached <= best * 1.001 + 1e-9).float().mean()) > 0.6


def test_a_repeated_token_leaves_finite_weights():
    """Row 1: a Gram matrix of rank one."""
    token = correlated_inputs(1, 64)
    scheme, weight = Scheme(4, 32, True), weights(8, 64)
    gram = statistics_of(token.expand(40, -1)).gram()
    ranges = find_range(weight, scheme)
    found, report = gptq(weight, gram, scheme, *ranges)
    assert torch.isfinite(found.dequantize()).all()
    assert report.dampening is not None
    assert error(weight, found, gram) <= error(weight, round_to_nearest(weight, scheme, *ranges), gram)


def test_dampening_rises_until_the_matrix_factors():
    """Row 1: an indefinite matrix needs more than 0.01, and the report says how much."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 64, generator=generator)
    gram = torch.eye(64) + 0.01 * (noise + noise.T)
    eigenvalues, vectors = torch.linalg.eigh(gram)
    gram = vectors @ torch.diag(torch.where(eigenvalues == eigenvalues.min(), -0.05, eigenvalues)) @ vectors.T
    scheme, weight = Scheme(4, 32, True), weights(8, 64)
    found, report = gptq(weight, gram, scheme, *find_range(weight, scheme))
    assert report.dampening == pytest.approx(0.1)
    assert torch.isfinite(found.dequantize()).all()


@pytest.mark.parametrize("gram", [torch.zeros(64, 64), torch.full((64, 64), float("nan")), -10 * torch.ones(64, 64)])
def test_a_hopeless_matrix_falls_back_to_round_to_nearest(gram: torch.Tensor):
    """Row 1."""
    scheme, weight = Scheme(4, 32, False), weights(8, 64)
    ranges = find_range(weight, scheme)
    found, report = gptq(weight, gram, scheme, *ranges)
    assert report.fallback
    assert report.dampening is None
    assert torch.equal(found.codes_OI, round_to_nearest(weight, scheme, *ranges).codes_OI)


@pytest.mark.parametrize("refine", [0, 1])
def test_dead_columns_keep_their_rounded_values(refine: int):
    x = correlated_inputs(500, 64)
    x[:, [3, 40]] = 0
    scheme, weight = Scheme(4, 16, True), weights(8, 64)
    found, report = gptq(weight, statistics_of(x).gram(), scheme, *find_range(weight, scheme), refine=refine)
    rounded = round_to_nearest(weight, scheme, found.scale_OG, None)
    assert report.dead_columns == 2
    assert torch.equal(found.codes_OI[:, [3, 40]], rounded.codes_OI[:, [3, 40]])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_refinement_lowers_the_error(scheme: Scheme):
    weight, gram = weights(12, 64), statistics_of(correlated_inputs(2000, 64)).gram()
    start, _ = gptq(weight, gram, scheme, *find_range(weight, scheme, scale_dtype=torch.float32), refine=0)
    refitted = refit_scales(weight, gram, start)
    descended = descend_codes(weight, gram, refitted, block_size=24)
    errors = [error(weight, q, gram) for q in (start, refitted, descended)]
    assert errors[0] > errors[1] > errors[2]


def test_refitted_scales_solve_the_least_squares():
    """Against the same problem posed on samples: the scale of each group is a coefficient of its codes' output."""
    scheme, weight, x = Scheme(3, 16, False), weights(4, 64), correlated_inputs(400, 64).double()
    gram = statistics_of(x).gram()
    start = round_to_nearest(weight, scheme, *find_range(weight, scheme, scale_dtype=torch.float32))
    assert start.zero_point_OG is not None
    found = refit_scales(weight, gram, start).scale_OG
    codes = start.codes_OI.double().unflatten(1, (4, 16)) - start.zero_point_OG.double()[..., None]
    for row in range(4):
        outputs = torch.einsum("tgi,gi->tg", x.unflatten(1, (4, 16)), codes[row])
        best = torch.linalg.lstsq(outputs, (x @ weight[row].double())[:, None]).solution[:, 0]
        assert torch.allclose(found[row].double(), best, rtol=5e-3)


def test_a_group_of_zero_codes_keeps_its_scale():
    scheme, weight = Scheme(4, 16, True), weights(4, 64)
    weight[:, 16:32] = 0
    start = round_to_nearest(weight, scheme, *find_range(weight, scheme))
    found = refit_scales(weight, statistics_of(correlated_inputs(300, 64)).gram(), start)
    assert torch.equal(found.scale_OG[:, 1], start.scale_OG[:, 1])
    assert torch.isfinite(found.scale_OG).all()


def test_errors_are_mean_squares_of_outputs():
    weight, x = weights(5, 64), correlated_inputs(300, 64)
    scheme, gram = Scheme(4, 16, True), statistics_of(x).gram()
    rounded = round_to_nearest(weight, scheme, *find_range(weight, scheme))
    change = x @ (rounded.dequantize() - weight).T
    assert error(weight, rounded, gram) == pytest.approx(float(change.square().sum(1).mean()), rel=1e-4)


def test_few_tokens_ask_for_more_dampening():
    assert dampening_for(1536, 8192) == pytest.approx(0.28, abs=0.01)
    assert dampening_for(576, 10**6) == 0.01
    assert dampening_for(576, 10) == 1.0
