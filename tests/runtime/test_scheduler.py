"""Which tokens come next: budget, order, preemption."""

from __future__ import annotations

from itertools import count

import pytest

from compress.errors import UserError
from compress.runtime.pages import PagePool
from compress.runtime.request import Drafts, Request, SamplingParams
from compress.runtime.scheduler import Scheduler

OTHERS = count(1000)


def request(prompt: int, new: int = 4) -> Request:
    """With a prompt that no other one shares anything with."""
    return Request(
        token_ids=[next(OTHERS), *range(1, prompt)],
        prompt_length=prompt,
        params=SamplingParams(max_tokens=new),
        key=b"",
        stop_ids=frozenset(),
        max_length=prompt + new,
    )


def advance(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step with made-up tokens; (start, count) of each chunk."""
    plan = scheduler.plan()
    sampled = [chunk.request for chunk in plan.chunks if chunk.catches_up]
    for chunk in plan.chunks:
        scheduler.commit(chunk.request, chunk.end)
    for each in sampled:
        each.append(0)
        if each.finish_reason:
            scheduler.finish(each, each.finish_reason)
    scheduler.check()
    return [(chunk.start, chunk.count) for chunk in plan.chunks]


def test_prompts_are_cut_to_the_budget_and_mix_with_decoding() -> None:
    scheduler = Scheduler(PagePool(64, 4), max_batched_tokens=8)
    scheduler.add(request(5))
    scheduler.add(request(12))
    assert advance(scheduler) == [(0, 5), (0, 3)]
    assert advance(scheduler) == [(5, 1), (3, 7)]
    assert advance(scheduler) == [(6, 1), (10, 2)]
    assert advance(scheduler) == [(7, 1), (12, 1)]


def test_running_requests_go_before_waiting_ones() -> None:
    scheduler = Scheduler(PagePool(64, 4), max_batched_tokens=2)
    for _ in range(3):
        scheduler.add(request(1))
    assert advance(scheduler) == [(0, 1), (0, 1)]
    assert advance(scheduler) == [(1, 1), (1, 1)]
    assert len(scheduler.waiting) == 1


def test_the_last_is_preempted_and_nobody_admitted_in_that_step() -> None:
    scheduler = Scheduler(PagePool(4, 4), max_batched_tokens=64)
    old, young, late = request(8, new=8), request(8, new=8), request(1)
    for each in (old, young, late):
        scheduler.add(each)
    assert advance(scheduler) == [(0, 8), (0, 8)]
    assert advance(scheduler) == [(8, 1)]
    assert scheduler.preemptions == 1
    assert (young.status, young.pages, young.num_computed) == ("waiting", [], 0)
    assert list(scheduler.waiting) == [young, late]
    assert young.generated == [0], "its token is kept"


def test_the_last_running_request_may_have_to_preempt_itself() -> None:
    scheduler = Scheduler(PagePool(5, 4), max_batched_tokens=64)
    old, young = request(11, new=8), request(8, new=8)
    for each in (old, young):
        scheduler.add(each)
    assert advance(scheduler) == [(0, 11), (0, 8)]
    assert advance(scheduler) == [(11, 1)]
    assert young.status == "waiting"
    while scheduler.busy:
        advance(scheduler)
    assert (old.finish_reason, young.finish_reason) == ("length", "length")
    assert len(young.generated) == 8
    assert scheduler.pool.used == 0


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(PagePool(4, 4), max_batched_tokens=64)
    scheduler.add(request(13, new=4))  # 16 cached tokens: the 17th is never fed back
    with pytest.raises(UserError, match=r"14 tokens with up to 4 new ones needs 5 cache pages of 4 .* has 4 \(16"):
        scheduler.add(request(14, new=4))


def test_finishing_frees_pages_in_every_state() -> None:
    scheduler = Scheduler(PagePool(4, 4), max_batched_tokens=64)
    running, waiting = request(12), request(8)
    scheduler.add(running)
    scheduler.add(waiting)
    advance(scheduler)
    scheduler.finish(waiting, "abort")
    scheduler.finish(running, "abort")
    assert not scheduler.busy
    assert scheduler.pool.used == 0
    scheduler.check()


def test_no_more_run_than_may() -> None:
    scheduler = Scheduler(PagePool(64, 4), max_batched_tokens=64, max_running=2)
    for _ in range(3):
        scheduler.add(request(3, new=1))
    assert advance(scheduler) == [(0, 3), (0, 3)]
    assert advance(scheduler) == [(0, 3)]


def drafting(prompt: int, drafts: int, new: int = 20) -> Request:
    each = request(prompt, new)
    each.drafts = Drafts(tuple(range(drafts)))
    return each


def test_drafts_come_with_the_last_token_or_it_waits() -> None:
    """How many tokens are drafted must not depend on the company."""
    scheduler = Scheduler(PagePool(64, 4), max_batched_tokens=8)
    for each in (drafting(3, 2), drafting(4, 3), drafting(1, 1)):
        scheduler.add(each)
    plan = scheduler.plan()
    assert [(c.start, c.count, c.drafts, c.catches_up) for c in plan.chunks] == [
        (0, 5, (0, 1), True),
        (0, 3, (), False),
    ]
    for chunk in plan.chunks:
        scheduler.commit(chunk.request, chunk.end - len(chunk.drafts))
    scheduler.check()
    first = plan.chunks[0].request
    first.append(9)
    assert [(c.start, c.count, c.drafts) for c in scheduler.plan().chunks] == [(3, 3, (0, 1)), (3, 4, (0, 1, 2))]


def test_a_request_that_comes_back_brings_its_drafts() -> None:
    scheduler = Scheduler(PagePool(64, 4), max_batched_tokens=8)
    scheduler.add(drafting(3, 2))
    assert [(c.start, c.count, c.drafts) for c in scheduler.plan().chunks] == [(0, 5, (0, 1))]
    assert len(scheduler.running[0].pages) == 2, "with room for the drafts"


def test_a_window_bounds_what_a_request_needs() -> None:
    """9 + 8 tokens touch at most 6 pages of 4: 25 tokens or 2,500."""
    Scheduler(PagePool(6, 4), max_batched_tokens=8, window=9).add(request(2000, new=500))
    with pytest.raises(UserError, match="needs 6 cache pages of 4 tokens; the cache has 5"):
        Scheduler(PagePool(5, 4), max_batched_tokens=8, window=9).add(request(2000, new=500))
