"""Requests follow from the seed: lengths, ids and arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from compress.bench.workload import Arrivals, Clients, Span, Workload, arrivals, asks_for, check_fits
from compress.errors import UserError

WORK = Workload(Span(16, 40), Span(5, 9), vocab=256, seed=3)


def test_equal_arguments_give_equal_requests() -> None:
    assert asks_for(WORK, Clients(4), 12, 2) == asks_for(WORK, Clients(4), 12, 2)
    other = Workload(WORK.prompt, WORK.output, WORK.vocab, seed=4)
    assert asks_for(WORK, Clients(4), 12, 2) != asks_for(other, Clients(4), 12, 2)


def test_runs_differ_in_ids_and_in_nothing_else() -> None:
    level = Arrivals(2.0)
    first, second = asks_for(WORK, level, 20, 0), asks_for(WORK, level, 20, 1)
    for one, two in zip(first, second, strict=True):
        assert (len(one.prompt), one.output, one.due) == (len(two.prompt), two.output, two.due)
        assert one.prompt[:16] != two.prompt[:16]


def test_no_first_page_is_met_twice() -> None:
    """Over levels, runs and requests, so that a prefix cache finds nothing."""
    levels = (Clients(1), Clients(4), Arrivals(1.0), Arrivals(4.0))
    pages = [tuple(ask.prompt[:16]) for level in levels for run in range(6) for ask in asks_for(WORK, level, 8, run)]
    assert len(set(pages)) == len(pages) == 4 * 6 * 8


def test_a_shared_prefix_begins_every_prompt_of_every_run() -> None:
    work = Workload(Span(20, 20), Span(4, 4), vocab=256, shared_prefix=12)
    asks = [ask for run in range(3) for ask in asks_for(work, Clients(2), 5, run)]
    assert {len(ask.prompt) for ask in asks} == {20}
    assert len({tuple(ask.prompt[:12]) for ask in asks}) == 1
    assert len({tuple(ask.prompt) for ask in asks}) == len(asks)


def test_lengths_reach_both_ends_and_ids_stay_in_the_vocabulary() -> None:
    asks = asks_for(Workload(Span(3, 6), Span(1, 2), vocab=5), Clients(1), 200, 0)
    assert {len(ask.prompt) for ask in asks} == {3, 4, 5, 6}
    assert {ask.output for ask in asks} == {1, 2}
    assert {token for ask in asks for token in ask.prompt} == {0, 1, 2, 3, 4}


def test_arrivals_are_a_poisson_process() -> None:
    """Mean gap 1/rate, standard deviation the same, and e⁻¹ of the gaps longer than the mean; 4 standard errors."""
    rate, count = 2.5, 20_001
    due = arrivals(rate, count, seed=0)
    gaps = np.diff(due)
    assert due[0] == 0
    assert gaps.mean() == pytest.approx(1 / rate, rel=4 / np.sqrt(count))
    assert gaps.std() == pytest.approx(1 / rate, rel=4 * np.sqrt(2 / count))
    assert (gaps > 1 / rate).mean() == pytest.approx(np.exp(-1), abs=4 * 0.5 / np.sqrt(count))


def test_a_closed_loop_has_no_arrivals() -> None:
    assert {ask.due for ask in asks_for(WORK, Clients(3), 9, 0)} == {0.0}


def test_what_cannot_fit_is_told_with_its_numbers() -> None:
    check_fits(WORK, 49, "m")
    with pytest.raises(UserError, match=r"--prompt-tokens 16-40 and --output-tokens 5-9: together up to 49.* m has 48"):
        check_fits(WORK, 48, "m")
