"""A draft model in front of a model: its cache, its distributions, and what comes of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from compress.errors import UserError
from compress.kernels.dispatch import prepare_operations
from compress.runtime.executor import Executor, load_executor
from compress.runtime.pages import PagePool
from compress.runtime.request import Drafts, Request, SamplingParams
from compress.runtime.sampler import Draw, adjust, distributions
from compress.runtime.speculate import DraftModelProposer, NgramProposer, Proposer, check_tokenizers, decide
from tests.runtime.laws import make_request
from tests.tiny import tiny_model

OPS = prepare_operations(torch.device("cpu"))


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
        for request, one, verdict in zip(active, drafts, decide(OPS, torch.cat(rows), active, drafts), strict=True):
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
                expected_V = distributions(OPS, adjust(own, [draw]), [draw])[0]
                torch.testing.assert_close(q_V, expected_V, atol=2e-4, rtol=1e-3)
                assert one.tokens[i] == int(OPS.pick_tokens(q_V[None], [draw.uniform(1)]))
                assert q_V[:40].sum() == 0 or len(request.generated) + i >= 24
                compared += 1
                impossible += int(q_V[250:].sum() == 0)
        rows = [verified_logits(executors["target"], r, d) for r, d in zip(requests, drafts, strict=True)]
        for request, one, verdict in zip(requests, drafts, decide(OPS, torch.cat(rows), requests, drafts), strict=True):
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
