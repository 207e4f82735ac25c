"""Distributions by hand and by χ²; randomness that depends on nothing but its key."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from scipy.stats import chisquare

from compress.kernels.operations import Operations
from compress.runtime.request import SamplingParams, TokenLogprobs, request_key
from compress.runtime.sampler import Draw, adjust, distributions, logprobs, sample
from tests.runtime.paths import CPU_PATHS, operations_of

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.fixture(params=CPU_PATHS)
def ops(request: pytest.FixtureRequest) -> Operations:
    return operations_of(request.param)


def distribution(ops: Operations, logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return distributions(ops, logits_V[None], [Draw(params, b"", 0)])[0]


def filtered(ops: Operations, probs_V: torch.Tensor, top_k: int | None, top_p: float, min_p: float) -> torch.Tensor:
    return distribution(ops, probs_V.log(), SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))


def pick(ops: Operations, probs_V: torch.Tensor, u: float) -> int:
    return int(ops.pick_tokens(probs_V[None], [u]))


def logprobs_of(ops: Operations, logits_V: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    return logprobs(ops, logits_V[None], [token], [count])[0]


def uniform(seed: int, key: bytes, position: int, stream: int = 0) -> float:
    return Draw(SamplingParams(seed=seed), key, position).uniform(stream)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (None, 1.0, 0.0, [0.1, 0.4, 0.05, 0.25, 0.2]),
        (0, 1.0, 0.0, [0.1, 0.4, 0.05, 0.25, 0.2]),
        (1, 1.0, 0.0, [0, 1, 0, 0, 0]),
        (2, 1.0, 0.0, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (99, 1.0, 0.0, [0.1, 0.4, 0.05, 0.25, 0.2]),
        # 0.4 falls short of 0.6, 0.4 + 0.25 does not
        (None, 0.6, 0.0, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (None, 0.0001, 0.0, [0, 1, 0, 0, 0]),
        # after top-3 the shares are 0.47, 0.29, 0.24: two of them pass 0.7, which they would not without
        (3, 0.7, 0.0, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        # at least half as likely as 0.4
        (None, 1.0, 0.45, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        (None, 1.0, 1.0, [0, 1, 0, 0, 0]),
        (2, 1.0, 0.7, [0, 1, 0, 0, 0]),
    ],
)
def test_filters_by_hand(ops: Operations, top_k: int | None, top_p: float, min_p: float, expected: list[float]) -> None:
    torch.testing.assert_close(filtered(ops, PROBS, top_k, top_p, min_p), torch.tensor(expected, dtype=torch.float32))


def test_a_nucleus_wider_than_the_first_try(ops: Operations) -> None:
    """A flat vocabulary of 5,000: half of the probability is half of the tokens, those with the lower ids."""
    kept = filtered(ops, torch.full((5000,), 1 / 5000), None, 0.5, 0.0)
    assert (kept > 0).nonzero()[:, 0].tolist() == list(range(2500))


def test_temperature_scales_logits_and_zero_is_greedy(ops: Operations) -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0])
    torch.testing.assert_close(
        distribution(ops, logits_V, SamplingParams(temperature=2.0)), torch.softmax(logits_V / 2, dim=-1)
    )
    assert distribution(ops, logits_V, SamplingParams()).tolist() == [0, 1, 0]
    for tiny in (1e-30, 1e-300, 5e-324):  # the last two are zero in float32
        assert distribution(ops, logits_V, SamplingParams(temperature=tiny)).tolist() == [0, 1, 0]
    torch.testing.assert_close(distribution(ops, logits_V, SamplingParams(temperature=1e300)), torch.full((3,), 1 / 3))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=6),
        SamplingParams(temperature=1.3, top_p=0.8),
    ],
)
def test_frequencies_follow_the_distribution(ops: Operations, params: SamplingParams) -> None:
    """χ² of 10,000 draws on a vocabulary of ten: p > 0.001. The draws are fixed, so this does not flicker."""
    logits_V = torch.randn(10, generator=torch.Generator().manual_seed(0)) * 1.5
    probs_V = distribution(ops, logits_V, params)
    counts_V = torch.zeros(10)
    for position in range(10_000):
        counts_V[pick(ops, probs_V, uniform(params.seed, b"key", position))] += 1
    possible = probs_V > 0
    assert counts_V[~possible].sum() == 0
    expected = (probs_V[possible].double() / probs_V[possible].double().sum() * 10_000).numpy()
    assert chisquare(counts_V[possible].numpy(), expected).pvalue > 0.001


def test_every_part_of_the_key_changes_the_draw() -> None:
    base = (1, b"a", 7, 0)
    others = [(2, b"a", 7, 0), (1, b"b", 7, 0), (1, b"a", 8, 0), (1, b"a", 7, 1), (-1, b"a", 7, 0)]
    assert uniform(*base) == uniform(*base)
    assert len({uniform(*key) for key in [base, *others]}) == 6
    assert request_key([1, 23], 0) != request_key([12, 3], 0)
    assert request_key([1, 2], 0) != request_key([1, 2], 1)


def test_the_draw_is_the_inverse_of_the_cumulative_distribution(ops: Operations) -> None:
    probs_V = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [pick(ops, probs_V, u) for u in (0.0, 0.2499, 0.25, 1 - 2**-48)] == [1, 1, 3, 3]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 128, 1000, 1024])
def test_the_draw_agrees_with_a_search_through_all_tokens(ops: Operations, vocab: int) -> None:
    """At the middle of each token's share, and a hair inside both of its ends; impossible tokens never come."""
    generator = torch.Generator().manual_seed(vocab)
    probs_V = torch.rand(vocab, generator=generator) ** 4 + 1e-4
    probs_V[torch.rand(vocab, generator=generator) < 0.5] = 0
    probs_V[vocab // 2] = 0.5
    ends_V = probs_V.double().cumsum(0)
    total = float(ends_V[-1])
    for token in probs_V.nonzero()[:, 0].tolist():
        end, share = float(ends_V[token]), float(probs_V[token])
        for point in (end - share * (1 - 1e-9), end - share / 2, end - share * 1e-9):
            assert pick(ops, probs_V, point / total) == token
    assert pick(ops, probs_V, 0.0) == int(probs_V.nonzero()[0])
    assert pick(ops, probs_V, 1 - 2**-48) == int(probs_V.nonzero()[-1])


WIDE = 3001  # of the vocabulary below: odd, above the 1024 of sampling.NUCLEUS, enough that reductions would be split
HISTORY = [5, 5, 7, 9, 2, 9, 9]  # the first three are the prompt


def mixed_draws() -> list[Draw]:
    """Every rule, some of them twice so that rows share a group; flat and peaked nuclei among them."""
    kinds = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.3, seed=5),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=2.0, top_k=5, logit_bias={3: 40.0, 4: -100.0}),
        SamplingParams(temperature=1.0, top_k=200, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=30.0, top_p=0.5),  # needs the whole vocabulary sorted
        SamplingParams(temperature=3.0, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, frequency_penalty=0.5, presence_penalty=-0.25, min_tokens=50),
    ]
    return [Draw(p, b"k", 50 + i, HISTORY, (1, 9)[: i % 3], 3, frozenset({8, 11})) for i, p in enumerate(kinds)]


@pytest.mark.parametrize("vocab", [16, 255, WIDE, 49152])
def test_rows_do_not_see_each_other(ops: Operations, vocab: int) -> None:
    """Tokens, distributions, logits and log-probabilities of a row: the same bits alone, in pairs and in any order."""
    draws = mixed_draws()
    logits_NV = torch.randn(len(draws), vocab, generator=torch.Generator().manual_seed(2)) * 3
    logits_NV[:, 3] = logits_NV[:, 5]  # ties
    adjusted_NV, tokens = adjust(logits_NV, draws), sample(ops, logits_NV, draws)
    probs_NV = distributions(ops, adjusted_NV, draws)
    of_own = logprobs(ops, logits_NV, tokens, [3] * len(draws))
    orders = [[i] for i in range(len(draws))] + [[i, (i + 3) % len(draws)] for i in range(len(draws))]
    for order in [*orders, list(reversed(range(len(draws))))]:
        some, picked = [draws[i] for i in order], logits_NV[order]
        assert torch.equal(adjust(picked, some), adjusted_NV[order])
        assert sample(ops, picked, some) == [tokens[i] for i in order]
        assert torch.equal(distributions(ops, adjust(picked, some), some), probs_NV[order])
        assert logprobs(ops, picked, [tokens[i] for i in order], [3] * len(order)) == [of_own[i] for i in order]
    assert tokens[0] == int(logits_NV[0].argmax())
    for row, draw in enumerate(draws):
        assert tokens[row] == pick(ops, probs_NV[row], draw.uniform()) or draw.params.temperature == 0
        assert abs(float(probs_NV[row].double().sum()) - 1) < 1e-6


def by_hand(logits_V: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The rules, one token after the other, in float64."""
    params, out = draw.params, logits_V.double().clone()
    seen, output = [*draw.tokens, *draw.drafted], draw.output
    for token in range(len(out)):
        if token in seen:
            out[token] *= 1 / params.repetition_penalty if out[token] > 0 else params.repetition_penalty
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        bias = params.logit_bias.get(token, 0.0)
        out[token] = -math.inf if bias <= -100 else out[token] + bias
        if token in draw.stop_ids and len(output) < params.min_tokens:
            out[token] = -math.inf
    return out


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=0.75),
        SamplingParams(frequency_penalty=-0.5),
        SamplingParams(logit_bias={0: 5.0, 4: -99.0, 6: -100.0}),
        SamplingParams(min_tokens=6),
        SamplingParams(min_tokens=5),  # four known and one drafted: reached
        SamplingParams(
            repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={9: 3.0}, min_tokens=9
        ),
    ],
)
def test_penalties_by_hand(params: SamplingParams) -> None:
    """Repetition counts prompt and output, presence and frequency the output alone; drafts are output."""
    logits_NV = torch.randn(2, 12, generator=torch.Generator().manual_seed(4))
    draw = Draw(params, b"", 8, HISTORY, (1,), 3, frozenset({8, 11}))
    adjusted_NV = adjust(logits_NV, [Draw(SamplingParams(), b"", 8), draw])
    assert torch.equal(adjusted_NV[0], logits_NV[0])
    torch.testing.assert_close(adjusted_NV[1].double(), by_hand(logits_NV[1], draw), atol=1e-6, rtol=1e-6)
    prompt_alone = {5, 7}  # tokens 0 and 1 of HISTORY, and its third
    if params.repetition_penalty == 1:
        assert all(adjusted_NV[1, token] == logits_NV[1, token] for token in prompt_alone)


def test_nothing_is_copied_where_nobody_asks() -> None:
    logits_NV = torch.randn(2, 12)
    plain = [
        Draw(SamplingParams(temperature=1.0, top_k=3), b"", 7, HISTORY, (), 3, frozenset({8})),
        Draw(SamplingParams(frequency_penalty=1.0, min_tokens=2), b"", 3, HISTORY[:3], (), 3),  # no output, no stops
    ]
    assert adjust(logits_NV, plain) is logits_NV
    before_NV = logits_NV.clone()
    adjust(logits_NV, mixed_draws()[1:3])
    assert torch.equal(logits_NV, before_NV)


def test_a_ban_that_leaves_nothing_is_not_applied(ops: Operations) -> None:
    """Biases first: where they ban all but the end, the end may come early; where they ban all, nothing is banned."""
    logits_V = torch.tensor([1.0, 3.0, 2.0, 0.5])
    stops = frozenset({3})

    def adjusted(bias: dict[int, float], min_tokens: int) -> list[float]:
        params = SamplingParams(logit_bias=bias, min_tokens=min_tokens)
        return adjust(logits_V[None], [Draw(params, b"", 0, (), (), 0, stops)])[0].tolist()

    inf = math.inf
    assert adjusted({0: -100, 1: -100}, 5) == [-inf, -inf, 2.0, -inf]
    assert adjusted({0: -100, 1: -100, 2: -100}, 5) == [-inf, -inf, -inf, 0.5]
    assert adjusted(dict.fromkeys(range(4), -100.0), 0) == logits_V.tolist()
    assert adjusted(dict.fromkeys(range(4), -100.0), 5) == [1.0, 3.0, 2.0, -inf]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(3), -100.0))
        assert {sample(ops, logits_V[None], [Draw(params, b"", i)])[0] for i in range(20)} == {3}


def test_ids_beyond_the_models_are_ignored() -> None:
    """A draft model may have fewer tokens than the request's history names."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={9: -100.0})
    adjusted_NV = adjust(torch.ones(1, 6), [Draw(params, b"", 7, HISTORY, (), 3)])
    assert adjusted_NV[0].tolist() == [1.0, 1.0, 0.5 - 1.0, 1.0, 1.0, 0.5]


def test_a_seed_reproduces_in_another_process() -> None:
    """Python's own hash differs from process to process; draws must not."""
    code = (
        "from compress.runtime.sampler import Draw; from compress.runtime.request import SamplingParams;"
        "print(Draw(SamplingParams(seed=3), b'key', 11).uniform(1))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(other.stdout) == uniform(3, b"key", 11, 1)


def test_torchs_generator_is_left_alone(ops: Operations) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sample(ops, torch.randn(3, 40, generator=torch.Generator().manual_seed(1)), mixed_draws()[4:7])
    assert torch.equal(torch.get_rng_state(), before)


def test_logprobs_are_the_models_own(ops: Operations) -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0])
    expected_V = torch.log_softmax(logits_V, -1)
    found = logprobs_of(ops, logits_V, 0, 2)
    assert found.chosen == pytest.approx(float(expected_V[0]), abs=1e-6)
    assert list(found.top) == [1, 2]
    assert found.top[2] == pytest.approx(float(expected_V[2]), abs=1e-6)


def test_impossible_tokens_have_minus_infinity_never_nan(ops: Operations) -> None:
    logits_NV = torch.tensor([[1.0, -math.inf, 2.0], [math.inf, 0.0, 1.0]])
    first, second = logprobs(ops, logits_NV, [1, 0], [3, 2])
    assert first.chosen == -math.inf
    assert list(first.top) == [2, 0, 1]
    assert first.top[1] == -math.inf
    assert not any(math.isnan(value) for value in [second.chosen, *second.top.values()])


def test_logprobs_of_many_rows(ops: Operations) -> None:
    """A prompt's rows, different counts: as one row after the other; the same float for the chosen and in the top."""
    logits_NV = torch.randn(40, 300, generator=torch.Generator().manual_seed(6)) * 4
    tokens, counts = logits_NV.argmax(-1).tolist(), [i % 4 for i in range(40)]
    together = logprobs(ops, logits_NV, tokens, counts)
    assert together == [logprobs_of(ops, logits_NV[i], tokens[i], counts[i]) for i in range(40)]
    assert all(one.chosen == max(one.top.values()) for one in together if one.top)
    assert [len(one.top) for one in together] == counts
    assert logprobs(ops, logits_NV[:0], [], []) == []
