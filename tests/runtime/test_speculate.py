"""Speculation never changes the distribution: exact enumeration, χ², and the same tokens where nothing is drawn."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer, models

from compress.errors import UserError
from compress.runtime.executor import Executor, load_executor
from compress.runtime.pages import PagePool
from compress.runtime.request import Drafts, Request, SamplingParams, request_key
from compress.runtime.sampler import Draw, adjust, distributions, pick, sample
from compress.runtime.speculate import (
    DraftLength,
    DraftModelProposer,
    NgramProposer,
    Proposer,
    check_tokenizers,
    decide,
    residual,
    verify,
)
from tests.tiny import tiny_model

Law = Callable[[tuple[int, ...]], torch.Tensor]  # the tokens before → probabilities [V] of the next


def random_law(vocab: int, seed: int, zeros: float = 0.0, allowed: Sequence[int] | None = None) -> Law:
    """float64 probabilities that depend on every token before; a share of them zero, or all outside `allowed`."""

    @cache
    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)  # hashes of integers are fixed
        probs_V = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 3
        probs_V[torch.rand(vocab, generator=generator) < zeros] = 0
        if allowed is not None:
            probs_V[[i for i in range(vocab) if i not in allowed]] = 0
        if probs_V.sum() == 0:
            probs_V[allowed[0] if allowed else 0] = 1
        return probs_V / probs_V.sum()

    return law


def enumerate_outputs(target: Law, draft: Law | None, drafts: Law, vocab: int, k: int) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of k + 1 tokens: `verify` on every draft, then the target for what is missing.

    `verify` itself is driven through all its outcomes: numbers that force an acceptance or a rejection, weighed by
    min(1, p / q), and one number for each token of the last draw, weighed by the token's share.
    """
    outputs: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(vocab), repeat=k + 1), 0.0)
    for tokens in itertools.product(range(vocab), repeat=k):
        weight = math.prod(float(drafts(tokens[:i])[token]) for i, token in enumerate(tokens))
        if weight == 0:
            continue
        p = torch.stack([target(tokens[:i]) for i in range(k + 1)])
        q = None if draft is None else torch.stack([draft(tokens[:i]) for i in range(k)])
        for prefix, chance in outcomes(p, q, tokens):
            for sequence, rest in continuations(target, prefix, k + 1):
                outputs[sequence] += weight * chance * rest
    return outputs


def outcomes(p: torch.Tensor, q: torch.Tensor | None, tokens: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
    """What `verify` can put out for one draft, with probabilities."""
    k, vocab = len(tokens), p.shape[1]
    found = []
    for accepted in range(k + 1):
        ratios = [min(1.0, float(p[i, t] / q[i, t])) if q is not None else float(p[i, t]) for i, t in enumerate(tokens)]
        reached = math.prod(ratios[:accepted])
        chance = reached * (1 - ratios[accepted]) if accepted < k else reached
        if chance < 1e-15:
            continue
        chances = [0.0] * accepted + [1 - 2**-48] * (k - accepted)
        last_V = p[accepted] if accepted == k else residual(p[accepted], point(q, p, tokens, accepted))
        ends = last_V.cumsum(0)
        for token in range(vocab):
            if last_V[token] == 0:
                continue
            middle = float((ends[token] - last_V[token] / 2) / ends[-1])
            uniforms = [middle] * (k + 1)
            if q is None:  # each position is drawn: those before hit the draft's token, this one `token`
                uniforms = [hit(p[i], t) for i, t in enumerate((*tokens[:accepted], token))] + [0.5] * (k - accepted)
            verdict = verify(p, tokens, q, chances, uniforms)
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
def test_the_distribution_is_the_targets_exactly(vocab: int, k: int, kind: str) -> None:
    """Every output sequence, by enumeration: error below 1e-12."""
    zeros = 0.4 if kind == "zeros" else 0.0
    half = vocab // 2
    target = random_law(vocab, 1, zeros, range(half) if kind == "disjoint" else None)
    draft = random_law(vocab, 2, zeros, range(half, vocab) if kind == "disjoint" else None)
    if kind == "equal":
        draft = target
    outputs = enumerate_outputs(target, None if kind == "point" else draft, draft, vocab, k)
    assert sum(outputs.values()) == pytest.approx(1, abs=1e-12)
    for sequence, probability in outputs.items():
        expected = math.prod(float(target(sequence[:i])[token]) for i, token in enumerate(sequence))
        assert abs(probability - expected) < 1e-12


def test_the_chance_of_acceptance_is_the_quotient() -> None:
    """Just below p / q a token is accepted, just above it is not; a token with p ≥ q always, with p = 0 never."""
    p = torch.tensor([[0.2, 0.0, 0.8], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.1, 0.4]], dtype=torch.float64)
    for chance, accepted in ((0.4 - 1e-12, 1), (0.4 + 1e-12, 0)):
        assert verify(p, [0], q, [chance], [0.5, 0.5]).accepted == accepted
    assert verify(p, [2], q, [1 - 2**-48], [0.5, 0.5]).accepted == 1
    assert verify(p, [1], q, [0.0], [0.5, 0.5]).accepted == 0


def test_a_residual_of_nothing_is_the_target() -> None:
    """Rounding may reject where p = q: then p is what there is to draw from."""
    p_V = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p_V, p_V), p_V.double())
    assert residual(p_V, torch.tensor([0.75, 0.25])).tolist() == [0, 0.5]


def make_request(params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), sample_number: int = 0) -> Request:
    key = request_key(list(prompt), sample_number)
    return Request(list(prompt), len(prompt), params, key, frozenset(), len(prompt) + params.max_tokens)


def law_logits(law: Law, request: Request, drafted: Sequence[int]) -> torch.Tensor:
    """Logits [1 + k, V] of a law after the request's output and each draft token."""
    output = tuple(request.generated)
    return torch.stack([law((*output, *drafted[:i])).log().float() for i in range(len(drafted) + 1)])


def drafted_by(law: Law, requests: Sequence[Request], k: int) -> list[Drafts]:
    """As a draft model would: from its law under the request's rules, by stream 1."""
    drafts = []
    for request in requests:
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(k):
            draw = Draw.of(request, tuple(tokens))
            logits_V = law_logits(law, request, tokens)[-1]
            rows.append(distributions(adjust(logits_V[None], [draw]), [draw])[0])
            tokens.append(pick(rows[-1], draw.uniform(1)))
        drafts.append(Drafts(tuple(tokens), torch.stack(rows) if rows else None))
    return drafts


@pytest.mark.parametrize(
    ("params", "stated"),
    [
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=0.8, top_k=9, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.2), True),
        (SamplingParams(temperature=1.0, min_p=0.05), False),
    ],
)
def test_frequencies_of_20000_draws(params: SamplingParams, stated: bool) -> None:
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
        return distributions(adjust(law(drafted).log().float()[None], [draw]), [draw])[0]

    logits, drafts = [], []
    for request in requests:
        tokens: list[int] = []
        for _ in range(2):
            tokens.append(pick(rules(draft, tuple(tokens)), Draw.of(request, tuple(tokens)).uniform(1)))
        stack = torch.stack([rules(draft, ()), rules(draft, (tokens[0],))]) if stated else None
        drafts.append(Drafts(tuple(tokens), stack))
        logits += [target(tuple(tokens[:i])).log().float() for i in range(3)]
    counts = torch.zeros(vocab, vocab)
    accepted = 0
    outputs = []
    for verdict, drafted in zip(decide(torch.stack(logits), requests, drafts), drafts, strict=True):
        outputs.append(verdict.tokens(drafted))
        accepted += verdict.accepted
    # where the first draft token was rejected, the second token comes from the next step, here without drafts
    short = [i for i, out in enumerate(outputs) if len(out) == 1]
    for i in short:
        requests[i].token_ids += outputs[i]
    next_NV = torch.stack([target(tuple(outputs[i])).log().float() for i in short])
    for i, token in zip(short, sample(next_NV, [Draw.of(requests[i]) for i in short]), strict=True):
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
def test_given_drafts_change_no_token(temperature: float) -> None:
    """Prompt lookup and the like: token by token what the seed gives without them, whatever is guessed."""
    vocab = 12
    target = random_law(vocab, 5)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=9, repetition_penalty=1.1, top_p=0.95)
    plain = make_request(params)
    while len(plain.generated) < 40:
        plain.append(sample(law_logits(target, plain, ()), [Draw.of(plain)])[0])
    chance = random.Random(0)
    request, steps = make_request(params), 0
    while len(request.generated) < 40:
        here = len(request.generated)
        right = plain.generated[here : here + chance.randint(0, 4)]
        guess = tuple(token if chance.random() < 0.8 else chance.randrange(vocab) for token in right)
        verdict = decide(law_logits(target, request, guess), [request], [Drafts(guess)])[0]
        for token in verdict.tokens(Drafts(guess))[: 40 - here]:
            request.append(token)
        steps += 1
    assert request.generated == plain.generated
    assert steps < 30


def test_greedy_verdicts_equal_greedy_for_any_draft() -> None:
    target, draft = random_law(9, 6), random_law(9, 7)
    request = make_request(SamplingParams(max_tokens=30))
    best: list[int] = []
    while len(best) < 30:
        best.append(int(target(tuple(best)).argmax()))
    while len(request.generated) < 30:
        drafts = drafted_by(draft, [request], 3)
        verdict = decide(law_logits(target, request, drafts[0].tokens), [request], drafts)[0]
        for token in verdict.tokens(drafts[0])[: 30 - len(request.generated)]:
            request.append(token)
    assert request.generated == best


def test_verdicts_do_not_depend_on_company() -> None:
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
    drafts = [drafted_by(draft, [request], k)[0] for request, (_, k) in zip(requests, kinds, strict=True)]
    drafts[4] = Drafts(drafts[4].tokens)
    logits = [law_logits(target, r, d.tokens) for r, d in zip(requests, drafts, strict=True)]
    together = decide(torch.cat(logits), requests, drafts)
    for _ in range(2):
        assert together == [decide(logits[i], [requests[i]], [drafts[i]])[0] for i in range(5)]
    back = decide(torch.cat(logits[::-1]), requests[::-1], drafts[::-1])
    assert back[::-1] == together


def looked_up(known: list[int], longest: int, limit: int) -> tuple[int, ...]:
    """Prompt lookup by search: the longest suffix that occurs earlier, where it occurs last."""
    for length in range(min(longest, len(known) - 1), 0, -1):
        for start in range(len(known) - length - 1, -1, -1):
            if known[start : start + length] == known[-length:]:
                text = list(known)
                for i in range(limit):
                    text.append(text[start + length + i])
                return tuple(text[len(known) :])
    return ()


def test_prompt_lookup_equals_a_search() -> None:
    """As the request grows, by one or several tokens a step."""
    chance = random.Random(1)
    for alphabet in (2, 4, 30):
        proposer = NgramProposer(longest=3)
        request = make_request(SamplingParams(max_tokens=200), [chance.randrange(alphabet) for _ in range(5)])
        for step in range(60):
            limit = step % 6
            drafts = proposer.propose([request], [limit])[0]
            assert drafts.distributions is None
            assert drafts.tokens == (looked_up(request.token_ids, 3, limit) if limit else ())
            for _ in range(chance.randint(1, 3)):
                request.append(chance.randrange(alphabet))
            if step % 2:
                proposer.update(request)
        proposer.forget(request)
        proposer.forget(request)
        assert not proposer._indices


def test_prompt_lookup_by_hand() -> None:
    def guess(known: list[int], limit: int = 4) -> tuple[int, ...]:
        return NgramProposer().propose([make_request(SamplingParams(), known)], [limit])[0].tokens

    assert guess([1]) == ()
    assert guess([1, 2, 3]) == ()
    assert guess([7, 7]) == (7, 7, 7, 7)
    assert guess([1, 2, 3, 4, 1, 2]) == (3, 4, 1, 2)
    assert guess([5, 1, 2, 8, 2, 9, 1, 2]) == (8, 2, 9, 1)  # the longer match wins over the later one


def test_the_length_of_drafts_follows_acceptance() -> None:
    """k maximises (1 + a + … + a^k) / (1 + c k); nothing is drafted where that does not pay, but for a try."""
    for rate, cost in itertools.product((0.0, 0.2, 0.5, 0.8, 0.95, 1.0), (0.0, 0.05, 0.2, 1.0)):
        values = [sum(rate**i for i in range(k + 1)) / (1 + cost * k) for k in range(9)]
        best = max(range(9), key=lambda k: (values[k], -k))
        chosen = DraftLength(8, cost, rate).length()
        assert values[chosen] == pytest.approx(values[best])
    length = DraftLength(8, cost=0.1)
    for _ in range(20):
        length.observe(4, 4)
    assert length.length() >= 7
    for _ in range(60):
        length.observe(length.length(), 0)
    assert length.rate < 0.11
    asked = []
    for _ in range(100):
        asked.append(length.length())
        length.observe(asked[-1], 0)
    assert set(asked) == {0, 1}
    assert 2 <= sum(asked) <= 4
    for _ in range(60):
        length.observe(1, 1)
    assert length.length() >= 7
    assert DraftLength(0).length() == 0


def test_the_rate_is_of_tokens_that_were_tried() -> None:
    """Behind a rejection nothing is tried: 1 of 4 is one success and one failure."""
    length = DraftLength(8, rate=0.5, weight=0.5)
    length.observe(4, 1)
    assert length.rate == (0.5 + 0.5 * 0.5) / 2


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Executor]:
    def load(name: str, **changes: Any) -> Executor:
        path = tiny_model(tmp_path_factory.mktemp(name), **changes)
        return load_executor(path, torch.device("cpu"), torch.float32, 2048, 4)

    return {
        "target": load("target", max_position_embeddings=96),
        "other": load("other", seed=1, num_hidden_layers=1),
        "small": load("small", seed=2, vocab_size=250, max_position_embeddings=64),
        "large": load("large", seed=3, vocab_size=260),
    }


def full_logits(executor: Executor, tokens: Sequence[int], rows: int) -> torch.Tensor:
    """float32 logits [rows, V] after the last `rows` of the tokens, without a cache."""
    with torch.inference_mode():
        hidden_SC = executor.hidden_states(torch.tensor([list(tokens)]))[0, -rows:]
        return executor.model.logits(hidden_SC)


def verified_logits(target: Executor, request: Request, drafts: Drafts) -> torch.Tensor:
    return full_logits(target, [*request.token_ids, *drafts.tokens], len(drafts.tokens) + 1)


def complete(target: Executor, proposer: Proposer | None, requests: Sequence[Request], k: int) -> tuple[int, int]:
    """All requests to their ends, drafts verified together; draft tokens and how many of them were accepted."""
    drafted = accepted = 0
    while active := [r for r in requests if len(r.token_ids) < r.max_length]:
        limits = [min(k, r.max_length - len(r.token_ids) - 1) for r in active]
        drafts = proposer.propose(active, limits) if proposer else [Drafts(())] * len(active)
        assert all(len(d.tokens) <= limit for d, limit in zip(drafts, limits, strict=True))
        rows = [verified_logits(target, r, d) for r, d in zip(active, drafts, strict=True)]
        for request, one, verdict in zip(active, drafts, decide(torch.cat(rows), active, drafts), strict=True):
            drafted, accepted = drafted + len(one.tokens), accepted + verdict.accepted
            for token in verdict.tokens(one):
                request.append(token)
            if proposer:
                proposer.update(request)
    return drafted, accepted


def model_proposer(executor: Executor, pages: int = 200) -> DraftModelProposer:
    return DraftModelProposer(executor, PagePool(min(pages, 512), 4, caching=False), 256, max_batched_tokens=16)


def workload(params: SamplingParams, count: int = 6) -> list[Request]:
    """Prompts of 1 to 41 tokens, some longer than the draft model's batches."""
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(256, (1 + 8 * i,), generator=generator).tolist() for i in range(count)]
    return [make_request(params, prompt) for prompt in prompts]


@pytest.mark.parametrize("name", ["target", "other", "small", "large", "ngram"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_speculation_is_greedy(executors: dict[str, Executor], name: str, k: int) -> None:
    """Itself, another, one of 250 tokens and 64 positions, one of 260, and prompt lookup."""
    params = SamplingParams(max_tokens=30)
    plain = workload(params)
    complete(executors["target"], None, plain, 0)
    proposer = NgramProposer() if name == "ngram" else model_proposer(executors[name])
    requests = workload(params)
    drafted, accepted = complete(executors["target"], proposer, requests, k)
    assert [r.token_ids for r in requests] == [r.token_ids for r in plain]
    assert drafted > 0
    if name == "target":
        assert accepted == drafted
    if isinstance(proposer, DraftModelProposer):
        proposer.check()
        for request in requests:
            proposer.forget(request)
        proposer.check()
        assert proposer.pool.free == proposer.pool.total


@pytest.mark.parametrize("name", ["target", "other", "small", "large"])
def test_drafts_are_drawn_from_the_stated_distributions(executors: dict[str, Executor], name: str) -> None:
    """After acceptances and rejections alike the cache is right: its distributions are those without a cache.

    Under the same rules as the model's: penalties that count drafts, a minimum length, top-k.
    """
    params = SamplingParams(
        max_tokens=24, temperature=1.0, top_k=30, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=24, seed=3
    )
    draft, proposer = executors[name], model_proposer(executors[name])
    requests = workload(params, 4)
    for request in requests:
        request.stop_ids = frozenset(range(40))
    compared = impossible = 0
    for _ in range(5):
        drafts = proposer.propose(requests, [4, 2, 3, 1])
        for request, one in zip(requests, drafts, strict=True):
            assert one.distributions.shape == (len(one.tokens), 256)
            for i, q_V in enumerate(one.distributions):
                known = [t if t < draft.model.spec.vocab else 0 for t in [*request.token_ids, *one.tokens[:i]]]
                draw = Draw.of(request, one.tokens[:i])
                own = full_logits(draft, known, 1)[:, :256]
                own = torch.nn.functional.pad(own, (0, 256 - own.shape[1]), value=-math.inf)
                expected_V = distributions(adjust(own, [draw]), [draw])[0]
                torch.testing.assert_close(q_V, expected_V, atol=2e-4, rtol=1e-3)
                assert one.tokens[i] == pick(q_V, draw.uniform(1))
                assert q_V[:40].sum() == 0 or len(request.generated) + i >= 24
                compared += 1
                impossible += int(q_V[250:].sum() == 0)
        rows = [verified_logits(executors["target"], r, d) for r, d in zip(requests, drafts, strict=True)]
        for request, one, verdict in zip(requests, drafts, decide(torch.cat(rows), requests, drafts), strict=True):
            request.token_ids += verdict.tokens(one)
            if name == "target":
                assert verdict.accepted == len(one.tokens)
    assert compared == 50
    assert impossible == compared if name == "small" else impossible < compared


def test_a_full_pool_costs_drafts_alone(executors: dict[str, Executor]) -> None:
    """Requests that are not asked for make room; where nobody can, there are no drafts."""
    params = SamplingParams(max_tokens=20)
    plain, requests = workload(params), workload(params)
    complete(executors["target"], None, plain, 0)
    proposer = model_proposer(executors["other"], pages=20)
    complete(executors["target"], proposer, requests, 3)
    assert [r.token_ids for r in requests] == [r.token_ids for r in plain]
    proposer.check()
    fresh = workload(params, 1)
    assert len(proposer.propose(fresh, [3])[0].tokens) == 3  # at the cost of the others
    proposer.check()


def test_sampled_speculation_reproduces_by_seed(executors: dict[str, Executor]) -> None:
    """Alone and together, and with another seed something else."""
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1)
    first, again, other = workload(params), workload(params), workload(SamplingParams(max_tokens=16, temperature=1.0))
    complete(executors["target"], model_proposer(executors["other"]), first, 3)
    for request in again:
        complete(executors["target"], model_proposer(executors["other"]), [request], 3)
    complete(executors["target"], model_proposer(executors["other"]), other, 3)
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True))


def vocabulary(names: Sequence[str]) -> Tokenizer:
    return Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))


def test_tokenizers_may_differ_in_padding_alone() -> None:
    check_tokenizers(vocabulary("abcd"), vocabulary("abcd"))
    check_tokenizers(vocabulary("abcdef"), vocabulary("abcd"))
    check_tokenizers(vocabulary("abcd"), vocabulary("abcdef"))
    with pytest.raises(UserError, match=r"draft: .*2 of 4 token ids differ; id 2 is 'd', not 'c'"):
        check_tokenizers(vocabulary("abcd"), vocabulary("abdc"))
