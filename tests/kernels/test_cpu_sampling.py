"""The compiled kernels that choose tokens: the same bits in any company, and whom they leave rows to."""

from __future__ import annotations

import math

import pytest
import torch

from compress.kernels import sampling
from tests.kernels.sampled_rows import ISAS, mixed, operations

pytestmark = pytest.mark.skipif(not ISAS, reason="no C compiler on this machine")


@pytest.mark.parametrize("vocab", [17, 49152])
def test_bits_do_not_depend_on_instruction_set_threads_or_company(vocab: int) -> None:
    logits_NV, rules, uniforms = mixed(vocab)
    lengths = [3] * (len(logits_NV) // 4)

    def results(path: str, order: list[int]) -> list[torch.Tensor]:
        ops, rows = operations(path), logits_NV[order]
        probs_NV = ops.token_distributions(rows, rules.some(order))
        found = ops.top_logprobs(rows, [vocab // 2] * len(order), 7)
        picked_N = ops.pick_tokens(probs_NV, [uniforms[i] for i in order])
        sampled_N = ops.sample_tokens(rows, rules.some(order), [uniforms[i] for i in order])
        return [sampled_N, probs_NV, picked_N, found.chosen_N, found.ids_Nk, found.values_Nk]

    everyone, threads = list(range(len(logits_NV))), torch.get_num_threads()
    expected = results(ISAS[-1], everyone)
    draft = [probs_kV.flip(1).contiguous() for probs_kV in expected[1][: sum(lengths)].split(3)]
    numbers = ([5 % vocab] * sum(lengths), [0.7] * sum(lengths), uniforms[: sum(lengths) + len(lengths)])
    verdict = operations(ISAS[-1]).verify_drafts(expected[1][: sum(lengths) + len(lengths)], draft, *numbers)
    for isa in ISAS:
        again = operations(isa).verify_drafts(expected[1][: sum(lengths) + len(lengths)], draft, *numbers)
        for one, other in zip([*results(isa, everyone), *again], [*expected, *verdict], strict=True):
            assert torch.equal(one, other), isa
    for order in ([7], [65, 3, 20], everyone[::-1]):
        for one, other in zip(results(ISAS[-1], order), expected, strict=True):
            assert torch.equal(one, other[order])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for one, other in zip(results(ISAS[-1], everyone), expected, strict=True):
                assert torch.equal(one, other), f"{count} threads"
    finally:
        torch.set_num_threads(threads)


def test_rows_that_lie_apart_and_what_goes_to_the_reference() -> None:
    logits_NV, rules, uniforms = mixed(130)
    ops = operations(ISAS[-1])
    expected_N = ops.sample_tokens(logits_NV, rules, uniforms)
    room = torch.full((len(logits_NV), 151), math.nan)
    room[:, :130] = logits_NV
    assert torch.equal(ops.sample_tokens(room[:, :130], rules, uniforms), expected_N)
    wide_NV = logits_NV.double()
    assert torch.equal(
        ops.token_distributions(wide_NV.float().t().contiguous().t(), rules),
        sampling.token_distributions(logits_NV, rules),
    )
    nobody = rules.some([])
    assert ops.sample_tokens(logits_NV[:0], nobody, []).shape == (0,)
    assert ops.token_distributions(logits_NV[:0], nobody).shape == (0, 130)
    assert ops.top_logprobs(logits_NV[:0], [], 3).ids_Nk.shape == (0, 3)
    half = sampling.top_logprobs(logits_NV.bfloat16(), [0] * len(logits_NV), 2)
    assert torch.equal(ops.top_logprobs(logits_NV.bfloat16(), [0] * len(logits_NV), 2).ids_Nk, half.ids_Nk)
