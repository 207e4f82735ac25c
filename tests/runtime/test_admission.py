"""Who is let in when not all fit: first come, first served, but nobody waits for the room of one that is too large."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from compress.runtime.pages import PagePool
from compress.runtime.scheduler import PASSES, Scheduler
from tests.runtime.test_scheduler import advance, request


def test_a_short_request_passes_one_that_does_not_fit_yet() -> None:
    scheduler = Scheduler(PagePool(8, 4), max_batched_tokens=64)
    running, long, short = request(20, new=8), request(16), request(3, new=2)
    for each in (running, long, short):
        scheduler.add(each)
    assert advance(scheduler) == [(0, 20), (0, 3)]
    assert (long.status, short.status, long.passed) == ("waiting", "running", 1)
    while scheduler.busy:
        advance(scheduler)
    assert long.finish_reason == "length"
    assert scheduler.preemptions == 0


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    """Two new ones in each step: after so many have passed, all wait for the long one."""
    scheduler = Scheduler(PagePool(8, 4), max_batched_tokens=64)
    long, others = request(30, new=2), []
    scheduler.add(request(3, new=4))
    scheduler.add(long)
    while not long.finish_reason:
        for _ in range(2):
            others.append(request(3, new=4))
            scheduler.add(others[-1])
        advance(scheduler)
        assert len(others) < 100
    assert long.passed == PASSES
    assert sum(other.status != "waiting" for other in others) == PASSES


def test_one_step_with_room_for_many_keeps_the_bound() -> None:
    scheduler = Scheduler(PagePool(80, 1), max_batched_tokens=500, max_running=500)
    long = request(80, new=1)
    for each in (request(20, new=10), long, *(request(1, new=1) for _ in range(50))):
        scheduler.add(each)
    advance(scheduler)
    assert long.passed == PASSES


def test_many_samples_that_do_not_fit_let_others_pass_together() -> None:
    """Sixteen samples wait for the room of their prompt, and are looked at once in a step."""
    scheduler = Scheduler(PagePool(8, 4), max_batched_tokens=64)
    scheduler.add(request(20, new=8))
    samples = [request(17) for _ in range(16)]
    for each in samples:
        each.token_ids = list(samples[0].token_ids)
        each.siblings = tuple(other for other in samples if other is not each)
        scheduler.add(each)
    short = request(2, new=2)
    scheduler.add(short)
    assert advance(scheduler) == [(0, 20), (0, 2)]
    assert list(scheduler.waiting) == samples, "in their order"
    assert {each.passed for each in samples} == {1}
    while scheduler.busy:
        advance(scheduler)
    assert all(len(each.generated) == 4 for each in samples)


def test_nobody_passes_what_was_preempted() -> None:
    scheduler = Scheduler(PagePool(4, 4), max_batched_tokens=64)
    old, young, late = request(8, new=8), request(8, new=8), request(1)
    for each in (old, young, late):
        scheduler.add(each)
    advance(scheduler)
    while young.status != "waiting":
        advance(scheduler)
    advance(scheduler)
    assert (young.status, late.status, young.passed) == ("waiting", "waiting", 0)


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=60),
    pages=st.integers(13, 20),
    running=st.sampled_from([2, 5, 64]),
    budget=st.sampled_from([5, 16, 64]),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_every_request_ends_and_is_passed_so_often_at_most(
    arrivals: list[tuple[int, int, int]], pages: int, running: int, budget: int
) -> None:
    scheduler = Scheduler(PagePool(pages, 4), budget, running)
    todo, everyone, due, step = list(arrivals), [], 0, 0
    while todo or scheduler.busy:
        while todo and due + todo[0][0] <= step:
            due = step
            _, prompt, new = todo.pop(0)
            everyone.append(request(prompt, new))
            scheduler.add(everyone[-1])
        advance(scheduler)
        step += 1
        assert step < 5000, "nothing moves any more"
    assert all(len(each.generated) == each.max_length - each.prompt_length for each in everyone)
    assert max(each.passed for each in everyone) <= PASSES
