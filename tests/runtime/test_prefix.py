"""Prefix sharing, forks and windows: what is computed once, what is copied, what is given back, and the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from compress.runtime.engine import Completion, Engine, Request, SamplingParams
from compress.runtime.pages import PagePool
from compress.runtime.scheduler import Scheduler
from tests.tiny import tiny_model

GREEDY = SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Engine:
    return Engine.load(directory, max_tokens_in_cache=4096)


def fresh(loaded: Engine, budget: int = 2048, pages: int = 256, caching: bool = True, running: int = 64) -> Engine:
    """The same model with an empty cache."""
    pool = PagePool(pages, loaded.executor.page_size, caching)
    return Engine(loaded.path, loaded.executor, Scheduler(pool, budget, running, loaded.scheduler.window), None)


def finish(engine: Engine, requests: list[Request]) -> list[Completion]:
    while engine.scheduler.busy:
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.pool.used == 0
    return [Completion.of(request) for request in requests]


def numbers(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 256) for _ in range(count)]


@pytest.mark.parametrize("budget", [100, 2048, 100_000])
def test_a_common_prompt_is_computed_once(loaded: Engine, budget: int) -> None:
    """32 requests that arrive together share 512 tokens: those go through the model once."""
    common, engine = numbers(512), fresh(loaded, budget, pages=1024 // 16 + 32 * 2)
    requests = [engine.add([*common, 3 + i, 5], GREEDY) for i in range(32)]
    done = finish(engine, requests)
    fed_back = 3  # of the 4 generated tokens
    assert engine.stats.computed_tokens == 512 + 32 * (2 + fed_back)
    assert sorted(request.cached_tokens or 0 for request in requests) == [0, *[512] * 31]
    assert (engine.stats.prompt_tokens, engine.stats.cached_tokens) == (32 * 514, 31 * 512)
    assert engine.stats.preemptions == 0
    plain = fresh(loaded, caching=False, pages=4096 // 16)
    assert done[::8] == [plain.generate([[*common, 3 + i, 5]], GREEDY)[0] for i in range(0, 32, 8)]


@pytest.mark.parametrize("budget", [1, 3, 7, 2048])
def test_cold_warm_and_off_are_the_same_bits(loaded: Engine, budget: int) -> None:
    """Row 22: 40 prompts that share 0 to 80 tokens, lengths of exact multiples of a page among them, three times."""
    common = numbers(80, seed=1)
    prompts = [common[: i * 2] + numbers(1 + i % 5, seed=100 + i) for i in range(38)] + [common[:16], common[:32]]
    off = fresh(loaded, caching=False).generate(prompts, GREEDY)
    engine = fresh(loaded, budget)
    for _ in range(3 if budget > 1 else 2):
        assert finish(engine, [engine.add(prompt, GREEDY) for prompt in prompts]) == off
    assert engine.stats.cached_tokens > engine.stats.prompt_tokens // 2


def test_the_last_prompt_token_is_always_computed(loaded: Engine) -> None:
    engine = fresh(loaded)
    prompt = numbers(48)
    first, second = (finish(engine, [engine.add(prompt, GREEDY)])[0] for _ in range(2))
    assert first == second
    assert engine.stats.cached_tokens == 32, "the page of the last token is computed again"
    longer = engine.add([*prompt, *first.token_ids], GREEDY)
    engine.step()
    assert longer.cached_tokens == 48, "what was generated can be found, too"


def test_a_salt_keeps_requests_apart(loaded: Engine) -> None:
    engine = fresh(loaded)
    prompt = numbers(40)
    cached = []
    for salt in ("", "a", "b", "a"):
        request = engine.add(prompt, SamplingParams(max_tokens=1, cache_salt=salt))
        finish(engine, [request])
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 0, 32]


def test_a_prompt_that_is_scored_is_computed_whole_and_can_be_found(loaded: Engine) -> None:
    engine = fresh(loaded)
    prompt = numbers(40)
    scoring = SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    requests = [engine.add(prompt, params) for params in (GREEDY, scoring, scoring, GREEDY)]
    done = finish(engine, requests)
    assert [request.cached_tokens for request in requests] == [0, 0, 0, 32]
    assert done[1] == done[2] == fresh(loaded, caching=False).generate([prompt], scoring)[0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 48])
@pytest.mark.parametrize("budget", [5, 2048])
def test_samples_of_a_prompt_compute_it_once(loaded: Engine, caching: bool, length: int, budget: int) -> None:
    """Each sample computes the last token of the prompt itself, in a copy of its page where that is shared."""
    engine = fresh(loaded, budget, caching=caching)
    prompt, params = numbers(length, seed=length), SamplingParams(max_tokens=5, temperature=1.0, seed=1, logprobs=1)
    forked = finish(engine, engine.fork(prompt, params, 4))
    assert engine.stats.computed_tokens == length + 3 + sum(len(done.token_ids) - 1 for done in forked)
    plain = fresh(loaded, caching=False)
    assert forked == [finish(plain, [plain.add(prompt, params, sample)])[0] for sample in range(4)]
    assert len({tuple(done.token_ids) for done in forked}) == 4


def test_a_shared_page_is_copied_before_it_is_written(loaded: Engine) -> None:
    engine = fresh(loaded)
    requests = engine.fork(numbers(21), SamplingParams(max_tokens=3, temperature=1.0), 3)
    engine.step()
    plan = engine.scheduler.plan()
    assert [source for source, _ in plan.copies] == [requests[0].pages[1]] * 2
    assert [destination for _, destination in plan.copies] == [requests[1].pages[1], requests[2].pages[1]]
    assert requests[0].pages[0] == requests[1].pages[0] == requests[2].pages[0], "full pages are shared"
    engine.scheduler.check()


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_the_others_go_on_when_the_first_sample_is_aborted(loaded: Engine, steps: int) -> None:
    """Before its prompt is computed, while it is, and after that."""
    engine = fresh(loaded, budget=10, caching=False)
    prompt, params = numbers(37), SamplingParams(max_tokens=5, temperature=1.0, seed=2, ignore_eos=True)
    requests = engine.fork(prompt, params, 3)
    for _ in range(steps):
        engine.step()
    engine.abort(requests[0])
    done = finish(engine, requests[1:])
    plain = fresh(loaded, caching=False)
    assert done == [finish(plain, [plain.add(prompt, params, sample)])[0] for sample in (1, 2)]


def test_what_others_wait_for_may_be_aborted(loaded: Engine) -> None:
    engine = fresh(loaded, budget=20)
    prompt = numbers(100)
    first, second = engine.add(prompt, GREEDY), engine.add([*prompt, 7], GREEDY)
    engine.step()
    assert (first.num_computed, second.status) == (20, "waiting")
    stranger = engine.add(numbers(5, seed=9), GREEDY)
    for _ in range(3):
        engine.step()
    assert (second.status, stranger.status) == ("waiting", "waiting"), "the budget is spent on the first"
    engine.abort(first)
    assert finish(engine, [second])[0] == fresh(loaded, caching=False).generate([[*prompt, 7]], GREEDY)[0]
    assert second.cached_tokens == 80
    assert stranger.status == "finished"


def test_a_stranger_passes_those_who_wait(loaded: Engine) -> None:
    engine = fresh(loaded, budget=50)
    prompt = numbers(120)
    first, second = engine.add(prompt, GREEDY), engine.add([*prompt, 7], GREEDY)
    engine.step()
    engine.step()
    stranger = engine.add(numbers(5, seed=9), GREEDY)
    engine.step()
    assert [r.status for r in (first, second, stranger)] == ["running", "waiting", "running"]
    finish(engine, [first, second, stranger])


def test_old_pages_make_room(loaded: Engine) -> None:
    """A cache that is full of finished requests is as good as empty; the least recently used go first."""
    engine = fresh(loaded, pages=12)
    prompts = [numbers(60, seed=i) for i in range(3)]
    for prompt in prompts:
        finish(engine, [engine.add(prompt, SamplingParams(max_tokens=1))])
    assert engine.stats.pages_used == 0
    assert engine.stats.pages_cached + engine.scheduler.pool.free == 12
    again = [engine.add(prompt, SamplingParams(max_tokens=1)) for prompt in (prompts[2], prompts[0])]
    finish(engine, again)
    assert again[0].cached_tokens == 48
    wide = engine.add(numbers(180, seed=7), SamplingParams(max_tokens=1))
    finish(engine, [wide])
    assert wide.finish_reason == "length"
    assert engine.stats.preemptions == 0


def test_decoding_gives_the_bits_of_prefill(loaded: Engine) -> None:
    """The log-probabilities of generated tokens are those of the same tokens as a prompt."""
    engine = fresh(loaded)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, logprobs=3, ignore_eos=True)
    done = engine.generate([numbers(n, seed=n) for n in (3, 17, 50)], params)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=3)
    for one in done:
        assert one.logprobs is not None
        scored = fresh(loaded, budget=23).generate([one.prompt_ids + one.token_ids], scoring)[0]
        assert scored.token_ids == []
        assert scored.finish_reason == "length"
        assert scored.prompt_logprobs is not None
        assert scored.prompt_logprobs[0] is None
        assert scored.prompt_logprobs[len(one.prompt_ids) :] == one.logprobs


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tiny_model(tmp_path_factory.mktemp("mistral"), "mistral", sliding_window=24)
    return Engine.load(directory, max_tokens_in_cache=1024, page_size=4)


def test_pages_behind_the_window_are_given_back(windowed: Engine) -> None:
    """A request of 300 tokens runs in the pages of its window and of what a step computes."""
    params = SamplingParams(max_tokens=200, logprobs=1, ignore_eos=True)
    prompt = numbers(100)
    small = fresh(windowed, budget=16, pages=11, caching=False)
    request = small.add(prompt, params)
    most = 0
    while small.scheduler.busy:
        small.step()
        small.scheduler.check()
        most = max(most, small.stats.pages_used)
    assert most <= 11
    assert [Completion.of(request)] == fresh(windowed, caching=False).generate([prompt], params)


def test_windows_with_sharing_forks_and_preemption(windowed: Engine) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, logprobs=1, ignore_eos=True)
    common = numbers(50)
    plain = fresh(windowed, caching=False)
    for pages in (24, 256):
        engine = fresh(windowed, budget=16, pages=pages)
        requests = [engine.add([*common, 3 + i], params) for i in range(4)] + engine.fork(common[:45], params, 3)
        done = finish(engine, requests)
        assert engine.stats.cached_tokens > 0
        for one, sample in zip(done, [0, 0, 0, 0, 0, 1, 2], strict=True):
            assert one == finish(plain, [plain.add(one.prompt_ids, params, sample)])[0]
