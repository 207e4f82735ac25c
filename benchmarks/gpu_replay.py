"""Attention in a CUDA graph: captured in one step, replayed in others. Where kernels are interpreted, called again.

Shapes: T tokens, H query heads, K KV heads, D head dim, R latent rank, E rotated dimensions, X = R + E, S slots,
L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_clock import Bench
from benchmarks.gpu_inputs import Check, Inputs
from benchmarks.gpu_paged import count_slots, fill_pages, random_queries
from compress.kernels.attention_triton import PagedAttentionTriton
from compress.kernels.mla import LatentPages
from compress.kernels.mla_triton import PagedLatentAttentionTriton
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries
from compress.runtime.cuda_graphs import CudaCapture

Plan = Any  # of either kind of attention
SMALL, LARGE = (40, 19, 25), (511, 4100, 1030, 64, 2600)  # contexts
WINDOW = 20


def check_replays(bench: Bench, inputs: Inputs) -> Iterator[Check]:
    """A replay computes the step of its plan's last update, to the bit; rows that belong to no request are zero."""
    contexts = SMALL if bench.interpreted else LARGE
    queries = random_queries((1,) * len(contexts), contexts, inputs.generator, bench.device)
    tokens, slots = len(contexts), count_slots(queries)
    heads, kv_heads, dim = (4, 2, 32) if bench.interpreted else (32, 8, 128)
    q_THD = inputs.normal(tokens, heads, dim)
    pages = fill_pages(inputs.normal(slots, kv_heads, dim), inputs.normal(slots, kv_heads, dim), queries, None)

    def attend(plan: Plan, rows: int) -> torch.Tensor:
        windows = (None, WINDOW)
        return torch.stack([plan(q_THD[:rows], pages, AttentionOptions(window)) for window in windows])

    differing = count_differing(
        bench, inputs, partial(PagedAttentionTriton, device=bench.device), attend, queries, q_THD
    )
    yield Check("attention replayed, differing", inputs.name, float(differing), 0.0)

    heads, rank, rotated = (4, 32, 16) if bench.interpreted else (128, 512, 64)
    q_THX = inputs.normal(tokens, heads, rank + rotated)
    kv_S1X = inputs.normal(slots, 1, rank + rotated)
    kv_PSX = fill_pages(kv_S1X, kv_S1X, queries, None).keys_PSKD[:, :, 0]
    latents = LatentPages(kv_PSX[..., :rank], kv_PSX[..., rank:])

    def attend_latents(plan: Plan, rows: int) -> torch.Tensor:
        q_THR, q_THE = q_THX[:rows].split((rank, rotated), dim=2)
        return plan(q_THR, q_THE, latents, 0.07)[None]

    make = partial(PagedLatentAttentionTriton, device=bench.device)
    differing = count_differing(bench, inputs, make, attend_latents, queries, q_THX)
    yield Check("latent attention replayed, differing", inputs.name, float(differing), 0.0)


def count_differing(
    bench: Bench,
    inputs: Inputs,
    make: Callable[..., Plan],
    attend: Callable[[Plan, int], torch.Tensor],
    queries: PagedQueries,
    q_THX: torch.Tensor,
) -> int:
    """Elements in which replays differ from plans of one step alone. `attend` gives [L, T, ...] of the first rows."""
    tokens = len(queries.lengths)
    pages = sum(len(table) for table in queries.tables)
    plan = make(queries, capacity=Capacity(tokens, 1, max(queries.contexts), pages, (None, WINDOW)))
    attend(plan, tokens)  # compiles and plans: a capture cannot
    replay, out_LTHX = capture(bench, lambda: attend(plan, tokens))
    differing = 0
    for count in (1, tokens - 1, tokens):
        contexts = [context - count for context in queries.contexts[-count:]]
        step = PagedQueries([1] * count, contexts, queries.tables[-count:], queries.page_size)
        assert plan.update(step)
        q_THX.copy_(inputs.normal(*q_THX.shape))
        replay()
        differing += int((out_LTHX[:, :count] != attend(make(step), count)).sum() + (out_LTHX[:, count:] != 0).sum())
    return differing


def capture(bench: Bench, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """How to run the function again, and where its result is then."""
    if not bench.interpreted:
        return CudaCapture()(function)
    result = function()
    return lambda: result.copy_(function()), result
