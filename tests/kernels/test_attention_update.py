"""A plan that is made again for another step gives the bits of a fresh one: the references and the compiled kernels.

Triton's are in interpreted/test_replay.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from compress.kernels.attention import PagedAttention
from compress.kernels.cpu.attention import CompiledAttention
from compress.kernels.cpu.isa import supported
from compress.kernels.cpu.latent import CompiledLatentAttention
from compress.kernels.mla import PagedLatentAttention
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries
from tests.kernels.latent_batches import latent_batch
from tests.kernels.paged_batches import make_batch

CAPACITY = Capacity(requests=4, length=3, context=90, pages=14)
OPTIONS = (AttentionOptions(), AttentionOptions(window=20, soft_cap=5.0))
PLANS: dict[str, tuple[Any, Any]] = {"reference": (PagedAttention, PagedLatentAttention)} | {
    isa: (partial(CompiledAttention, isa=isa), partial(CompiledLatentAttention, isa=isa)) for isa in supported()[-1:]
}
STEPS = [  # (which request, new tokens, context)
    [(0, 1, 60), (1, 3, 9), (2, 1, 33), (3, 2, 90)],
    [(3, 1, 50), (0, 2, 47)],
    [],
    [(2, 3, 3), (1, 0, 5), (3, 3, 88)],
]
BEYOND = [[(3, 1, 91)], [(0, 4, 40)], [(1, 1, 2)] * 5, [(3, 1, 90), (3, 1, 90), (0, 1, 33)]]


def choose(queries: PagedQueries, step: list[tuple[int, int, int]]) -> PagedQueries:
    tables = [queries.tables[index] for index, _, _ in step]
    return PagedQueries([length for _, length, _ in step], [context for _, _, context in step], tables, 16)


def check(plan_step: Any, attend: Callable[[Any, int], list[torch.Tensor]], queries: PagedQueries) -> None:
    """`attend` runs a plan on so many of the first rows."""
    plan = plan_step(choose(queries, STEPS[0]), capacity=CAPACITY)
    attend(plan, CAPACITY.tokens)
    for step in (*STEPS[1:], STEPS[0]):
        chosen = choose(queries, step)
        assert plan.update(chosen)
        for beyond in BEYOND:
            assert not plan.update(choose(queries, beyond))
        rows = sum(chosen.lengths)
        for result, fresh in zip(attend(plan, CAPACITY.tokens), attend(plan_step(chosen), rows), strict=True):
            assert torch.equal(result[:rows], fresh)
            assert not result[rows:].any()
    assert plan_step(choose(queries, STEPS[1])).update(choose(queries, BEYOND[0]))  # without a capacity


@pytest.mark.parametrize("name", PLANS)
def test_attention(name: str) -> None:
    batch = make_batch([(3, context) for context in (60, 9, 33, 91)], 16, 6, 2, 32, unwritten=0.0)

    def attend(plan: Any, rows: int) -> list[torch.Tensor]:
        return [plan(batch.q_THD[:rows], batch.pages, options) for options in OPTIONS]

    check(PLANS[name][0], attend, batch.queries)


@pytest.mark.parametrize("name", PLANS)
def test_latent_attention(name: str) -> None:
    batch = latent_batch([(3, context) for context in (60, 9, 33, 91)], 16, 5, 48, 16)

    def attend(plan: Any, rows: int) -> list[torch.Tensor]:
        return [plan(batch.q_THR[:rows], batch.q_THE[:rows], batch.pages, 0.1)]

    check(PLANS[name][1], attend, batch.queries)
