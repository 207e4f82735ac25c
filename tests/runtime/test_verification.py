"""Speculation never changes the distribution: exact enumeration, χ², and the same tokens where nothing is drawn."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from scipy.stats import chisquare

from compress.kernels.operations import Operations
from compress.kernels.sampling import residual
from compress.runtime.request import Drafts, SamplingParams
from compress.runtime.sampler import Draw, adjust, distributions, sample
from compress.runtime.speculate import Verdict, agreement, decide
from tests.runtime.laws import Law, drafted_by, law_logits, make_request, random_law
from tests.runtime.paths import CPU_PATHS, operations_of


@pytest.fixture(params=CPU_PATHS)
def ops(request: pytest.FixtureRequest) -> Operations:
    return operations_of(request.param)


def verify(
    ops: Operations,
    p: torch.Tensor,
    tokens: Sequence[int],
    q: torch.Tensor | None,
    chances: Sequence[float],
    uniforms: Sequence[float],
) -> Verdict:
    """One request, as `decide` does it: a draft that was not drawn stands where the model's own draw equals it."""
    p, q = p.float(), None if q is None else q.float()
    if q is None:
        own = ops.pick_tokens(p, uniforms).tolist()
        accepted = agreement(tokens, own)
        return Verdict(accepted, own[accepted])
    return Verdict(*(int(one) for one in ops.verify_drafts(p, [q], tokens, chances, uniforms)))


def enumerate_outputs(
    ops: Operations, target: Law, draft: Law | None, drafts: Law, vocab: int, k: int
) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of k + 1 tokens: verification of every draft, then the target for what is missing.

    Verification itself is driven through all its outcomes: numbers that force an acceptance or a rejection, weighed by
    min(1, p / q), and one number for each token of the last draw, weighed by the token's share.
    """
    outputs: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(vocab), repeat=k + 1), 0.0)
    for tokens in itertools.product(range(vocab), repeat=k):
        weight = math.prod(float(drafts(tokens[:i])[token]) for i, token in enumerate(tokens))
        if weight == 0:
            continue
        p = torch.stack([target(tokens[:i]) for i in range(k + 1)])
        q = None if draft is None else torch.stack([draft(tokens[:i]) for i in range(k)])
        for prefix, chance in outcomes(ops, p, q, tokens):
            for sequence, rest in continuations(target, prefix, k + 1):
                outputs[sequence] += weight * chance * rest
    return outputs


def outcomes(
    ops: Operations, p: torch.Tensor, q: torch.Tensor | None, tokens: tuple[int, ...]
) -> list[tuple[tuple[int, ...], float]]:
    """What verification can put out for one draft, with probabilities."""
    k, vocab = len(tokens), p.shape[1]
    found = []
    for accepted in range(k + 1):
        ratios = [min(1.0, float(p[i, t] / q[i, t])) if q is not None else float(p[i, t]) for i, t in enumerate(tokens)]
        reached = math.prod(ratios[:accepted])
        chance = reached * (1 - ratios[accepted]) if accepted < k else reached
        if chance < 1e-15:
            continue
        chances = [0.0] * accepted + [1 - 2**-48] * (k - accepted)
        last_V = p[accepted] if accepted == k else residual(p[accepted][None], point(q, p, tokens, accepted)[None])[0]
        ends = last_V.cumsum(0)
        for token in range(vocab):
            if last_V[token] == 0:
                continue
            middle = float((ends[token] - last_V[token] / 2) / ends[-1])
            uniforms = [middle] * (k + 1)
            if q is None:  # each position is drawn: those before hit the draft's token, this one `token`
                uniforms = [hit(p[i], t) for i, t in enumerate((*tokens[:accepted], token))] + [0.5] * (k - accepted)
            verdict = verify(ops, p, tokens, q, chances, uniforms)
            assert (verdict.accepted, verdict.token) == (accepted, token)
            found.append(((*tokens[:accepted], token), chance * float(last_V[token] / ends[-1])))
    return found


def point(q: torch.Tensor | None, p: torch.Tensor, tokens: tuple[int, ...], i: int) -> torch.Tensor:
    if q is not None:
        return q[i]
    return torch.zeros_like(p[i]).index_fill(0, torch.tensor([tokens[i]]), 1.0)


def hit(p_V: torch.Tensor, token: int) -> float:
    """The number in the middle of a token's share."""
    ends = p_V.cumsum(0)
    return float((ends[token] - p_V[token] / 2) / ends[-1])


def continuations(target: Law, prefix: tuple[int, ...], length: int) -> list[tuple[tuple[int, ...], float]]:
    if len(prefix) == length:
        return [(prefix, 1.0)]
    p_V = target(prefix)
    return [
        (sequence, float(p_V[token]) * rest)
        for token in range(len(p_V))
        if p_V[token] > 0
        for sequence, rest in continuations(target, (*prefix, token), length)
    ]


@pytest.mark.parametrize(("vocab", "k"), [(2, 3), (4, 3), (5, 2), (10, 1), (10, 2)])
@pytest.mark.parametrize("kind", ["dense", "zeros", "disjoint", "equal", "point"])
def test_the_distribution_is_the_targets_exactly(ops: Operations, vocab: int, k: int, kind: str) -> None:
    """Every output sequence, by enumeration: error below 1e-12."""
    zeros = 0.4 if kind == "zeros" else 0.0
    half = vocab // 2
    target = random_law(vocab, 1, zeros, range(half) if kind == "disjoint" else None)
    draft = random_law(vocab, 2, zeros, range(half, vocab) if kind == "disjoint" else None)
    if kind == "equal":
        draft = target
    outputs = enumerate_outputs(ops, target, None if kind == "point" else draft, draft, vocab, k)
    assert sum(outputs.values()) == pytest.approx(1, abs=1e-12)
    for sequence, probability in outputs.items():
        expected = math.prod(float(target(sequence[:i])[token]) for i, token in enumerate(sequence))
        assert abs(probability - expected) < 1e-12


def test_the_chance_of_acceptance_is_the_quotient(ops: Operations) -> None:
    """Just below p / q a token is accepted, just above it is not; a token with p ≥ q always, with p = 0 never."""
    p = torch.tensor([[0.1875, 0.0, 0.8125], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.5, 0.125, 0.375]])
    for chance, accepted in ((0.375 - 1e-12, 1), (0.375 + 1e-12, 0)):
        assert verify(ops, p, [0], q, [chance], [0.5, 0.5]).accepted == accepted
    assert verify(ops, p, [2], q, [1 - 2**-48], [0.5, 0.5]).accepted == 1
    assert verify(ops, p, [1], q, [0.0], [0.5, 0.5]).accepted == 0


def test_a_residual_of_nothing_is_the_target() -> None:
    """Rounding may reject where p = q: then p is what there is to draw from."""
    p_1V = torch.tensor([[0.25, 0.75]])
    assert torch.equal(residual(p_1V, p_1V), p_1V.double())
    assert residual(p_1V, torch.tensor([[0.75, 0.25]])).tolist() == [[0, 0.5]]


@pytest.mark.parametrize(
    ("params", "stated"),
    [
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=0.8, top_k=9, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.2), True),
        (SamplingParams(temperature=1.0, min_p=0.05), False),
    ],
)
def test_frequencies_of_20000_draws(ops: Operations, params: SamplingParams, stated: bool) -> None:
    """χ² of pairs of tokens on a vocabulary of 16, two drafts each, through the engine's path: p > 0.001.

    Not stated: the draft's distributions are withheld, so that its tokens count as given.
    """
    vocab, draws = 16, 20_000
    target, draft = random_law(vocab, 3), random_law(vocab, 4)
    prompt = (1, 2, 3)
    requests = [make_request(params, prompt, number) for number in range(draws)]

    @cache
    def rules(law: Law, drafted: tuple[int, ...]) -> torch.Tensor:
        draw = Draw.of(make_request(params, prompt), drafted)
        return distributions(ops, adjust(law(drafted).log().float()[None], [draw]), [draw])[0]

    logits, drafts = [], []
    for request in requests:
        tokens: list[int] = []
        for _ in range(2):
            number = Draw.of(request, tuple(tokens)).uniform(1)
            tokens.append(int(ops.pick_tokens(rules(draft, tuple(tokens))[None], [number])))
        stack = torch.stack([rules(draft, ()), rules(draft, (tokens[0],))]) if stated else None
        drafts.append(Drafts(tuple(tokens), stack))
        logits += [target(tuple(tokens[:i])).log().float() for i in range(3)]
    counts = torch.zeros(vocab, vocab)
    accepted = 0
    outputs = []
    for verdict, drafted in zip(decide(ops, torch.stack(logits), requests, drafts), drafts, strict=True):
        outputs.append(verdict.tokens(drafted))
        accepted += verdict.accepted
    # where the first draft token was rejected, the second token comes from the next step, here without drafts
    short = [i for i, out in enumerate(outputs) if len(out) == 1]
    for i in short:
        requests[i].token_ids += outputs[i]
    next_NV = torch.stack([target(tuple(outputs[i])).log().float() for i in short])
    for i, token in zip(short, sample(ops, next_NV, [Draw.of(requests[i]) for i in short]), strict=True):
        outputs[i].append(token)
    for out in outputs:
        counts[out[0], out[1]] += 1
    expected = torch.stack([rules(target, ())[a] * rules(target, (a,)) for a in range(vocab)]).double()
    assert counts[expected == 0].sum() == 0
    # cells with fewer than 5 expected are pooled
    large = expected * draws >= 5
    seen = [*counts[large].tolist(), float(counts[~large].sum())]
    hoped = [*(expected[large] * draws).tolist(), float(expected[~large].sum() * draws)]
    if hoped[-1] == 0:
        seen, hoped = seen[:-1], hoped[:-1]
    scale = sum(seen) / sum(hoped)
    assert chisquare(seen, [value * scale for value in hoped]).pvalue > 0.001
    assert 0.05 * draws < accepted < 1.9 * draws  # neither branch is idle


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_given_drafts_change_no_token(ops: Operations, temperature: float) -> None:
    """Prompt lookup and the like: token by token what the seed gives without them, whatever is guessed."""
    vocab = 12
    target = random_law(vocab, 5)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=9, repetition_penalty=1.1, top_p=0.95)
    plain = make_request(params)
    while len(plain.generated) < 40:
        plain.append(sample(ops, law_logits(target, plain, ()), [Draw.of(plain)])[0])
    chance = random.Random(0)
    request, steps = make_request(params), 0
    while len(request.generated) < 40:
        here = len(request.generated)
        right = plain.generated[here : here + chance.randint(0, 4)]
        guess = tuple(token if chance.random() < 0.8 else chance.randrange(vocab) for token in right)
        verdict = decide(ops, law_logits(target, request, guess), [request], [Drafts(guess)])[0]
        for token in verdict.tokens(Drafts(guess))[: 40 - here]:
            request.append(token)
        steps += 1
    assert request.generated == plain.generated
    assert steps < 30


def test_greedy_verdicts_equal_greedy_for_any_draft(ops: Operations) -> None:
    target, draft = random_law(9, 6), random_law(9, 7)
    request = make_request(SamplingParams(max_tokens=30))
    best: list[int] = []
    while len(best) < 30:
        best.append(int(target(tuple(best)).argmax()))
    while len(request.generated) < 30:
        drafts = drafted_by(ops, draft, [request], 3)
        verdict = decide(ops, law_logits(target, request, drafts[0].tokens), [request], drafts)[0]
        for token in verdict.tokens(drafts[0])[: 30 - len(request.generated)]:
            request.append(token)
    assert request.generated == best


def test_verdicts_do_not_depend_on_company(ops: Operations) -> None:
    """Greedy, sampled, with drafts drawn, given or none: together as alone, and again as before."""
    target, draft = random_law(300, 8), random_law(300, 9)
    kinds = [
        (SamplingParams(), 2),
        (SamplingParams(temperature=1.0, seed=1), 3),
        (SamplingParams(temperature=1.0, seed=2, top_p=0.8), 0),
        (SamplingParams(temperature=0.7, seed=3, top_k=20, presence_penalty=1.0), 2),
        (SamplingParams(temperature=1.0, seed=4), 1),
    ]
    requests = [make_request(params, (i, 2)) for i, (params, _) in enumerate(kinds)]
    drafts = [drafted_by(ops, draft, [request], k)[0] for request, (_, k) in zip(requests, kinds, strict=True)]
    drafts[4] = Drafts(drafts[4].tokens)
    logits = [law_logits(target, r, d.tokens) for r, d in zip(requests, drafts, strict=True)]
    together = decide(ops, torch.cat(logits), requests, drafts)
    for _ in range(2):
        assert together == [decide(ops, logits[i], [requests[i]], [drafts[i]])[0] for i in range(5)]
    back = decide(ops, torch.cat(logits[::-1]), requests[::-1], drafts[::-1])
    assert back[::-1] == together
