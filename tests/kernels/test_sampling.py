"""Choosing tokens, on every path of a CPU, against a walk through the sorted vocabulary in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from compress.kernels import sampling
from compress.kernels.cpu.isa import supported
from compress.kernels.cpu.sampling import CompiledSampling
from compress.kernels.sampling import Rules, top_logprobs

ISAS = supported()
PATHS = ["reference", *ISAS]


def operations(path: str):  # a module or an object with the same functions
    return sampling if path == "reference" else CompiledSampling(path)  # type: ignore[arg-type]


def rules_of(*rows: tuple[float, int, float, float]) -> Rules:
    return Rules(*(list(column) for column in zip(*rows, strict=True)))


def kept_by_hand(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probabilities: one token after the other, from the likeliest, the lower id first among equals."""
    weights = ((logits_V.double() - logits_V.double().max()) / temperature).exp().float().double().tolist()
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:top_k]
    whole = math.fsum(weights[i] for i in order)
    out, before = [0.0] * len(weights), 0.0
    for i in order:
        if (top_p == 1 or before < top_p * whole) and weights[i] >= min_p:
            out[i] = weights[i]
        before += weights[i]
    return [weight / math.fsum(out) for weight in out]


def rows_of_logits(vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=generator) * 3
    peaked = normal.clone()
    peaked[vocab // 2] = 40.0
    return {
        "normal": normal,
        "flat": torch.randn(vocab, generator=generator) * 0.01,
        "equal": torch.zeros(vocab),
        "peaked": peaked,
        "coarse": (normal * 2).round() / 2,  # many ties
        "impossible": torch.where(torch.rand(vocab, generator=generator) < 0.9, -math.inf, normal).index_fill(
            0, torch.tensor([vocab - 1]), 1.0
        ),
    }


FILTERS = [
    (1.0, 10**6, 1.0, 0.0),
    (0.7, 10**6, 0.9, 0.0),
    (1.0, 10**6, 0.999, 0.0),
    (1.0, 10**6, 1e-6, 0.0),
    (1.5, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 700, 1.0, 0.0),  # more than there are blocks of 64
    (1.0, 40, 0.8, 0.0),
    (1.0, 10**6, 1.0, 0.3),
    (2.0, 50, 0.95, 0.2),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("vocab", [1, 5, 64, 1000, 3001])
def test_distributions_by_hand(path: str, vocab: int) -> None:
    """The same tokens, but where a sum falls on the edge to rounding; probabilities to 5e-6 of themselves."""
    for name, logits_V in rows_of_logits(vocab).items():
        rules = rules_of(*FILTERS)
        found_NV = operations(path).token_distributions(logits_V.expand(len(FILTERS), -1), rules)
        for found_V, one in zip(found_NV, FILTERS, strict=True):
            expected_V = torch.tensor(kept_by_hand(logits_V, *one), dtype=torch.float64)
            moved = int(((found_V > 0) != (expected_V > 0)).sum())
            assert moved == 0 or (moved == 1 and one[2] < 1), (name, one)
            if not moved:
                torch.testing.assert_close(found_V.double(), expected_V, rtol=5e-6, atol=1e-12, msg=f"{name} {one}")


@pytest.mark.parametrize("path", PATHS)
def test_a_draw_is_of_the_distribution(path: str) -> None:
    """At the middle of the share of each token that may be drawn, where that is wide enough to tell."""
    for logits_V in rows_of_logits(300).values():
        for one in FILTERS:
            probs_V = operations(path).token_distributions(logits_V[None], rules_of(one))[0].double()
            ends_V = probs_V.cumsum(0)
            drawn = (probs_V > 1e-5).nonzero()[:, 0]
            points = ((ends_V - probs_V / 2) / ends_V[-1])[drawn].tolist()
            logits_NV = logits_V.expand(len(points), -1)
            found_N = operations(path).sample_tokens(logits_NV, rules_of(*[one] * len(points)), points)
            assert torch.equal(found_N, drawn)


@pytest.mark.parametrize("path", PATHS)
def test_greedy_takes_the_first_of_the_largest(path: str) -> None:
    logits_NV = torch.zeros(5, 2000)
    logits_NV[0, [1990, 130, 700]] = 2.0
    logits_NV[1, 1999] = 1e-30
    logits_NV[2] = -math.inf
    logits_NV[3, 64] = math.inf
    logits_NV[4] = -0.0
    logits_NV[4, 1000] = 0.0  # equal to −0
    rules = rules_of(*[(0.0, 2000, 1.0, 0.0)] * 5)
    assert operations(path).sample_tokens(logits_NV, rules, [0.5] * 5).tolist() == [130, 1999, 0, 64, 0]
    probs_NV = operations(path).token_distributions(logits_NV, rules)
    assert probs_NV.argmax(1).tolist() == [130, 1999, 0, 64, 0]
    assert torch.equal(probs_NV.sum(1), torch.ones(5))


@pytest.mark.parametrize("path", PATHS)
def test_logits_that_are_not_finite(path: str) -> None:
    """NaN is −∞; infinite logits share everything; where all are −∞, all are equal."""
    logits_NV = torch.randn(5, 130, generator=torch.Generator().manual_seed(0))
    logits_NV[0, ::2], logits_NV[1, [3, 128]], logits_NV[2] = math.nan, math.inf, -math.inf
    logits_NV[3] = math.nan
    logits_NV[4, 7], logits_NV[4, 9] = math.inf, math.nan
    probs_NV = operations(path).token_distributions(logits_NV, rules_of(*[(1.0, 130, 1.0, 0.0)] * 5))
    expected_V = torch.where(torch.arange(130) % 2 == 1, logits_NV[0].nan_to_num().exp(), 0.0)
    torch.testing.assert_close(probs_NV[0], expected_V / expected_V.sum())
    assert probs_NV[1].nonzero()[:, 0].tolist() == [3, 128]
    assert torch.equal(probs_NV[1, [3, 128]], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(probs_NV[2:4], torch.full((2, 130), 1 / 130))
    assert probs_NV[4].nonzero()[:, 0].tolist() == [7]
    for one in FILTERS:
        tokens_N = operations(path).sample_tokens(logits_NV, rules_of(*[one] * 5), [0.0, 0.3, 0.6, 0.9, 1 - 2**-48])
        assert ((tokens_N >= 0) & (tokens_N < 130)).all()
        assert tokens_N[0] % 2 == 1
        assert tokens_N[1] in (3, 128)
        assert tokens_N[4] == 7


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("vocab", [1, 65, 3001])
def test_logprobs_and_the_likeliest(path: str, vocab: int) -> None:
    """Against float64 to 4e-6; the order is exact, the lower id first among equals."""
    for name, logits_V in rows_of_logits(vocab).items():
        exact_V = logits_V.double().log_softmax(0)
        order = sorted(range(vocab), key=lambda i: (-float(logits_V[i]), i))
        for count in {0, 1, min(20, vocab), vocab}:
            found = operations(path).top_logprobs(logits_V[None], [vocab // 3], count)
            assert found.ids_Nk[0].tolist() == order[:count], name
            torch.testing.assert_close(found.chosen_N.double(), exact_V[[vocab // 3]], rtol=1e-6, atol=4e-6)
            torch.testing.assert_close(found.values_Nk[0].double(), exact_V[order[:count]], rtol=1e-6, atol=4e-6)


def verify(path: str, p: list, q: list, tokens: Sequence[int], chances: Sequence[float], uniforms: Sequence[float]):
    accepted, token = operations(path).verify_drafts(
        torch.tensor(p), [torch.tensor(one) for one in q], tokens, chances, uniforms
    )
    return accepted.tolist(), token.tolist()


@pytest.mark.parametrize("path", PATHS)
def test_verification_by_hand(path: str) -> None:
    """Three requests: one rejected at once, one with a token of p = 0, one accepted whole."""
    p = [[0.25, 0.75], [0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.25, 0.75]]
    q = [[[0.5, 0.5]], [[0.5, 0.5]], [[0.125, 0.875]]]
    # 0.25 / 0.5 is the chance of the first; the residual of a rejection is all on token 1
    assert verify(path, p, q, [0, 1, 0], [0.5, 0.0, 0.99], [0.0, 0.9, 0.0, 0.9, 0.9, 0.2]) == ([0, 0, 1], [1, 0, 0])
    assert verify(path, p, q, [0, 0, 1], [0.499, 0.9, 0.6], [0.9, 0.9, 0.9, 0.9, 0.3, 0.9]) == ([1, 1, 0], [1, 1, 0])


@pytest.mark.parametrize("path", PATHS)
def test_requests_are_verified_as_alone(path: str) -> None:
    """Drafts of 1 to 5 tokens, wide vocabularies, numbers at random; both ends are reached."""
    generator = torch.Generator().manual_seed(1)
    lengths, vocab = [1, 5, 2, 3, 1, 4, 4, 2, 5], 700
    p = torch.rand(sum(lengths) + len(lengths), vocab, generator=generator) ** 6
    drafts = [torch.rand(k, vocab, generator=generator) ** 6 for k in lengths]
    p /= p.sum(1, keepdim=True)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    for n, draft in enumerate(drafts):
        draft /= draft.sum(1, keepdim=True)
        if n % 2:
            draft[:] = p[starts[n] + n : starts[n] + n + lengths[n]]
    tokens = [int(torch.multinomial(row, 1, generator=generator)) for draft in drafts for row in draft]
    chances = torch.rand(sum(lengths), generator=generator, dtype=torch.float64).tolist()
    uniforms = torch.rand(len(p), generator=generator, dtype=torch.float64).tolist()
    accepted, token = operations(path).verify_drafts(p, drafts, tokens, chances, uniforms)
    assert all(accepted[n] == lengths[n] for n in range(1, 9, 2)), "p = q: all stand"
    assert any(accepted[n] < lengths[n] for n in range(0, 9, 2))
    for n, k in enumerate(lengths):
        first = starts[n]
        alone = operations(path).verify_drafts(
            p[first + n : first + n + k + 1],
            [drafts[n]],
            tokens[first : first + k],
            chances[first : first + k],
            uniforms[first + n : first + n + k + 1],
        )
        assert (int(alone[0]), int(alone[1])) == (int(accepted[n]), int(token[n]))
    expected = sampling.verify_drafts(p.double(), [draft.double() for draft in drafts], tokens, chances, uniforms)
    assert torch.equal(accepted, expected[0])
    assert torch.equal(token, expected[1])


def mixed(vocab: int) -> tuple[torch.Tensor, Rules, list[float]]:
    """All rows of logits under all rules, greedy rows among them."""
    rows = list(rows_of_logits(vocab).values())
    kinds = [*FILTERS, (0.0, 10**6, 1.0, 0.0)]
    logits_NV = torch.stack([rows[i % len(rows)] for i in range(len(kinds) * len(rows))])
    chosen = [kinds[i // len(rows)] for i in range(len(logits_NV))]
    return logits_NV, rules_of(*chosen), torch.rand(len(chosen), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.skipif(not ISAS, reason="no C compiler on this machine")
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


@pytest.mark.skipif(not ISAS, reason="no C compiler on this machine")
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
    half = top_logprobs(logits_NV.bfloat16(), [0] * len(logits_NV), 2)
    assert torch.equal(ops.top_logprobs(logits_NV.bfloat16(), [0] * len(logits_NV), 2).ids_Nk, half.ids_Nk)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_a_pick_agrees_with_a_search_through_all_tokens(path: str, dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs_V = torch.rand(vocab, generator=generator, dtype=dtype) ** 4 + 1e-4
    probs_V[torch.rand(vocab, generator=generator) < 0.5] = 0
    probs_V[vocab // 2] = 0.5
    ends_V = probs_V.double().cumsum(0)
    tokens = probs_V.nonzero()[:, 0].tolist()
    points = [
        float(ends_V[token] - float(probs_V[token]) * part) / float(ends_V[-1])
        for token in tokens
        for part in (1 - 1e-9, 0.5, 1e-9)
    ]
    found = operations(path).pick_tokens(probs_V.expand(len(points), -1), points).tolist()
    assert found == [token for token in tokens for _ in range(3)]
    ends = operations(path).pick_tokens(probs_V.expand(2, -1), [0.0, 1 - 2**-48]).tolist()
    assert ends == [tokens[0], tokens[-1]]
