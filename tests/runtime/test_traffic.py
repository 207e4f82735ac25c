"""Random traffic: whatever its company, chunks, pages, preemption or drafts, a request has the bits it has alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compress.runtime.drafting import Drafting
from compress.runtime.engine import Completion, Engine, Request, SamplingParams
from compress.runtime.pages import PagePool
from compress.runtime.scheduler import Scheduler
from compress.runtime.speculate import DraftModelProposer, NgramProposer
from tests.tiny import tiny_model

LONGEST = 70  # tokens of the largest request, all told
KINDS = [
    SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, seed=1, logprobs=0),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=20, seed=2, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=15, temperature=1.2, top_p=0.9, min_p=0.02, seed=3, min_tokens=4, logprobs=1),
    SamplingParams(max_tokens=20, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=1),
    SamplingParams(max_tokens=20, temperature=1.0, seed=4, stop=("e", "th"), stop_token_ids=(9,), logprobs=1),
    SamplingParams(max_tokens=8, logit_bias={5: 4.0, 9: -100.0}, prompt_logprobs=0, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
]


@dataclass(frozen=True)
class Arrival:
    wait: int  # steps after the one before
    shared: int  # tokens of a text that all prompts begin with
    own: tuple[int, ...]
    kind: int
    n: int
    abort_after: int | None  # steps

    @property
    def prompt(self) -> list[int]:
        return [2 + i * 37 % 250 for i in range(self.shared)] + list(self.own)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        wait=st.integers(0, 4),
        # the same few lengths again and again, so that prompts are equal up to the ends of pages, and about them
        shared=st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 40]),
        own=st.lists(st.integers(2, 6), min_size=1, max_size=9).map(tuple),
        kind=st.integers(0, len(KINDS) - 1),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        abort_after=st.one_of(st.none(), st.none(), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=9,
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    directory = tiny_model(tmp_path_factory.mktemp("llama"))
    other = tiny_model(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)
    loaded = {str(size): Engine.load(directory, page_size=size, max_tokens_in_cache=2048) for size in (1, 16, 32)}
    loaded["alone"] = Engine.load(directory, prefix_caching=False)
    loaded["draft"] = Engine.load(other)
    return loaded


Alone = Callable[[list[int], SamplingParams, int], Completion]


@pytest.fixture(scope="module")
def alone(engines: dict[str, Engine]) -> Alone:
    known: dict[str, Completion] = {}

    def complete(prompt: list[int], params: SamplingParams, sample: int) -> Completion:
        name = repr((prompt, params, sample))
        if name not in known:
            engine = engines["alone"]
            request = engine.add(prompt, params, sample)
            while engine.scheduler.busy:
                engine.step()
            known[name] = Completion.of(request)
        return known[name]

    return complete


def configured(
    loaded: Engine, page_size: int, tokens: int, budget: int, running: int, caching: bool, drafting: Drafting | None
) -> Engine:
    """The same model and cache, with what earlier examples left in it, under another scheduler."""
    pool = PagePool(-(-tokens // page_size), page_size, caching)
    return Engine(loaded.path, loaded.executor, Scheduler(pool, budget, running), drafting)


def drafting_by(kind: str | None, engines: dict[str, Engine]) -> Drafting | None:
    if kind is None:
        return None
    if kind == "text":
        return Drafting(NgramProposer(), 3)
    small = engines[{"other": "draft", "itself": "alone"}[kind]]
    pool = PagePool(small.scheduler.pool.total, small.scheduler.pool.page_size, caching=False)
    return Drafting(DraftModelProposer(small.executor, pool, 256), 3)


def play(engine: Engine, arrivals: list[Arrival]) -> list[tuple[Arrival, int, Request]]:
    """Feed the arrivals and run to the end; accounts are checked after each step."""
    started: list[tuple[Arrival, int, Request]] = []
    aborts: list[tuple[int, Request]] = []
    todo, step, due = list(arrivals), 0, 0
    while todo or engine.scheduler.busy:
        while todo and due + todo[0].wait <= step:
            arrival = todo.pop(0)
            due = step
            requests = engine.fork(arrival.prompt, KINDS[arrival.kind], arrival.n)
            started += [(arrival, sample, request) for sample, request in enumerate(requests)]
            if arrival.abort_after is not None:
                aborts.append((step + arrival.abort_after, requests[0]))  # the first: what others may wait for
        for at, request in aborts:
            if at == step:
                engine.abort(request)
                assert not request.pages
                engine.scheduler.check()
        engine.step()
        engine.scheduler.check()
        step += 1
        assert step < 5000, "nothing moves any more"
    assert engine.scheduler.pool.used == 0
    return started


def assert_as_alone(started: list[tuple[Arrival, int, Request]], alone: Alone) -> None:
    for arrival, sample, request in started:
        expected = alone(arrival.prompt, KINDS[arrival.kind], sample)
        count = len(request.generated)
        assert request.finish_reason in (expected.finish_reason, "abort")
        if request.finish_reason != "abort":
            assert count == len(expected.token_ids)
            assert request.text is not None
            assert request.text.take() == expected.text
            assert request.prompt_logprobs == (expected.prompt_logprobs or [])
        assert request.generated == expected.token_ids[:count]
        assert request.logprobs == (expected.logprobs or [])[:count], "the same bits"


@given(
    arrivals=ARRIVALS,
    page_size=st.sampled_from([1, 16, 32]),
    budget=st.sampled_from([4, 7, 19, 64, 2048]),
    tokens=st.sampled_from([80, 100, 160, 1000]),
    running=st.sampled_from([1, 3, 64]),
    caching=st.booleans(),
    drafts=st.sampled_from([None, None, "text"]),
)
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_company_never_matters(
    engines: dict[str, Engine],
    alone: Alone,
    arrivals: list[Arrival],
    page_size: int,
    budget: int,
    tokens: int,
    running: int,
    caching: bool,
    drafts: str | None,
) -> None:
    """Rows 22, 23 and 29, and drafts from the text: they change nothing, for seeds too."""
    loaded = engines[str(page_size)]
    engine = configured(loaded, page_size, tokens, budget, running, caching, drafting_by(drafts, engines))
    assert_as_alone(play(engine, arrivals), alone)


@given(
    arrivals=ARRIVALS,
    budget=st.sampled_from([4, 19, 2048]),
    tokens=st.sampled_from([80, 160, 1000]),
    drafts=st.sampled_from(["other", "itself"]),
)
@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drafts_of_a_model_change_no_greedy_token(
    engines: dict[str, Engine], alone: Alone, arrivals: list[Arrival], budget: int, tokens: int, drafts: str
) -> None:
    """Row 24, in company and under preemption."""
    engine = configured(engines["16"], 16, tokens, budget, 64, True, drafting_by(drafts, engines))
    greedy = [replace(arrival, kind=(0, 4, 6)[arrival.kind % 3]) for arrival in arrivals]
    assert_as_alone(play(engine, greedy), alone)
    if drafts == "itself" and engine.stats.draft_tokens:
        assert engine.stats.accepted_tokens > 0


@given(
    arrivals=ARRIVALS,
    budget=st.sampled_from([4, 19, 2048]),
    tokens=st.sampled_from([80, 160]),
    drafts=st.sampled_from(["other", "itself"]),
)
@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_drafts_do_not_see_the_company(
    engines: dict[str, Engine], arrivals: list[Arrival], budget: int, tokens: int, drafts: str
) -> None:
    """Sampled tokens under speculation depend on the drafts; these depend on the request alone."""
    started = play(configured(engines["16"], 16, tokens, budget, 64, True, drafting_by(drafts, engines)), arrivals)

    def alone(prompt: list[int], params: SamplingParams, sample: int) -> Completion:
        engine = configured(engines["16"], 16, 1000, 2048, 64, False, drafting_by(drafts, engines))
        request = engine.add(prompt, params, sample)
        while engine.scheduler.busy:
            engine.step()
        return Completion.of(request)

    assert_as_alone(started, alone)
