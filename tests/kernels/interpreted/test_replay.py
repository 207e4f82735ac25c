"""Plans with a capacity, as a CUDA graph uses them: launches are recorded in one step and run again in others.

Shapes: T tokens, H heads, D head dim, R latent rank, E rotated dimensions, X any of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from compress.kernels import attention_triton, mla_triton
from compress.kernels.attention_triton import PagedAttentionTriton
from compress.kernels.cpu.program import NotRecordable
from compress.kernels.launch import Launch, run
from compress.kernels.mla_triton import PagedLatentAttentionTriton
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries
from tests.kernels.latent_batches import latent_batch
from tests.kernels.paged_batches import make_batch

Plan = Any  # of either kind of attention
POOLED = ("out", "partial_sums", "partial_norms")
CPU = torch.device("cpu")
CONTEXTS = (520, 40, 1030, 530)  # of what is written; a step sees some of it
DECODING = [  # (which request, new tokens, context) of each step
    [(0, 1, 520), (1, 1, 40), (2, 1, 1030), (3, 1, 530)],
    [(3, 1, 512), (0, 1, 513)],
    [(1, 1, 1), (1, 0, 3), (2, 1, 1024)],
    [],
    [(2, 1, 90), (0, 1, 17), (3, 1, 530)],
]
VERIFYING = [
    [(0, 4, 520), (1, 4, 40), (2, 4, 1030), (3, 4, 530)],
    [(3, 2, 514), (0, 4, 513), (1, 1, 3)],
    [(2, 3, 1026)],
]
AT_LENGTH = [  # beyond the requests whose keys are split among many
    [(0, 11, 520), (1, 2, 40), (2, 11, 1030)],
    [(1, 9, 9), (3, 8, 520), (0, 1, 515)],
]
STEPS = {"decode": DECODING, "verify": VERIFYING, "verify at length": AT_LENGTH}


def choose(queries: PagedQueries, step: Sequence[tuple[int, int, int]]) -> PagedQueries:
    tables = [queries.tables[index] for index, _, _ in step]
    return PagedQueries([length for _, length, _ in step], [context for _, _, context in step], tables, 16)


def capacity_of(steps: Sequence[PagedQueries], windows: tuple[int | None, ...] = (None,)) -> Capacity:
    requests = max(len(step.lengths) for step in steps)
    length = max(length for step in steps for length in step.lengths)
    return Capacity(requests, length, max(CONTEXTS), sum(-(-context // 16) for context in CONTEXTS), windows)


class Recorder:
    """Keeps launches, and runs them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.running = True

    def __call__(self, launches: Sequence[Launch]) -> None:
        self.launches += launches
        if self.running:
            run(launches)


def described(launch: Launch) -> tuple[object, ...]:
    """Grid, numbers, shapes and addresses, but for those of memory that a capture takes from its pool."""
    values = {
        name: (value.shape, None if name in POOLED else value.data_ptr()) if isinstance(value, torch.Tensor) else value
        for name, value in launch.arguments.items()
    }
    return launch.kernel, launch.grid, values, launch.num_warps, launch.num_stages


def check_replays(
    layers: Callable[[Plan, int], list[torch.Tensor]],
    plan_step: Callable[..., Plan],
    steps: Sequence[PagedQueries],
    capacity: Capacity,
    q_THX: torch.Tensor,
    recorder: Recorder,
) -> None:
    """`layers` runs a plan on so many of the first rows of q. Launches are recorded in the first step."""
    plan = plan_step(steps[0], capacity=capacity)
    layers(plan, capacity.tokens)  # what there is to plan, or to compile, is done before a capture
    recorder.launches.clear()
    results = layers(plan, capacity.tokens)
    recorded = list(recorder.launches)
    for step in (*steps[1:], steps[0]):
        assert plan.update(step)
        q_THX.normal_()
        for result in results:
            result.fill_(torch.nan)
        run(recorded)
        rows = sum(step.lengths)
        for result, fresh in zip(results, layers(plan_step(step), rows), strict=True):
            assert torch.equal(result[:rows], fresh)
            assert not result[rows:].any()
        recorder.launches.clear()
        recorder.running = False
        layers(plan, capacity.tokens)
        recorder.running = True
        assert list(map(described, recorder.launches)) == list(map(described, recorded))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for module in (attention_triton, mla_triton):
        monkeypatch.setattr(module, "run", recorder)
    return recorder


LAYERS = (
    AttentionOptions(),
    AttentionOptions(window=100, soft_cap=5.0, sinks_H=torch.tensor([0.5, -torch.inf])),
)


@pytest.mark.parametrize(
    ("name", "dtype", "pages"),
    [
        ("decode", torch.float32, None),
        ("verify", torch.float16, torch.int8),
        ("verify at length", torch.float16, None),
    ],
)
def test_recorded_attention_is_that_of_the_last_update(
    name: str, dtype: torch.dtype, pages: torch.dtype | None, recorder: Recorder
) -> None:
    batch = make_batch([(1, context) for context in CONTEXTS], 16, 2, 1, 32, dtype, pages, pages)
    steps = [choose(batch.queries, step) for step in STEPS[name]]
    capacity = capacity_of(steps, tuple(options.window for options in LAYERS))
    q_THD = torch.randn(capacity.tokens, 2, 32).to(dtype)

    def layers(plan: Plan, rows: int) -> list[torch.Tensor]:
        return [plan(q_THD[:rows], batch.pages, options) for options in LAYERS]

    check_replays(layers, partial(PagedAttentionTriton, device=CPU), steps, capacity, q_THD, recorder)
    # each layer's attention and reduction; requests at length have keys for one split
    assert len(recorder.launches) == len(LAYERS) * (3 if name == "verify at length" else 2)


@pytest.mark.parametrize("name", ["decode", "verify"])
def test_recorded_latent_attention_is_that_of_the_last_update(name: str, recorder: Recorder) -> None:
    batch = latent_batch([(1, context) for context in CONTEXTS], 16, 2, 32, 16, torch.float16, blank=torch.nan)
    steps = [choose(batch.queries, step) for step in STEPS[name]]
    capacity = capacity_of(steps)
    q_THX = torch.randn(capacity.tokens, 2, 48).to(torch.float16)

    def layers(plan: Plan, rows: int) -> list[torch.Tensor]:
        q_THR, q_THE = q_THX[:rows].split((32, 16), dim=2)
        return [plan(q_THR, q_THE, batch.pages, 0.1)]

    check_replays(layers, partial(PagedLatentAttentionTriton, device=CPU), steps, capacity, q_THX, recorder)


def test_a_step_beyond_the_capacity_changes_nothing() -> None:
    batch = make_batch([(1, context) for context in CONTEXTS], 16, 2, 1, 32)
    step = choose(batch.queries, [(0, 1, 520), (1, 1, 40)])
    plan = PagedAttentionTriton(step, CPU, Capacity(2, 1, 520, 36))
    before = plan(batch.q_THD[:2], batch.pages, LAYERS[0])
    for beyond in ([(0, 1, 520), (3, 1, 50)], [(2, 1, 521)], [(1, 2, 3)], [(1, 1, 3)] * 3):
        assert not plan.update(choose(batch.queries, beyond))
        assert torch.equal(plan(batch.q_THD[:2], batch.pages, LAYERS[0]), before)
    assert not PagedAttentionTriton(step, CPU).update(step)


def test_what_a_capacity_does_not_plan_is_refused() -> None:
    batch = make_batch([(1, 40)], 16, 2, 1, 32)
    plan = PagedAttentionTriton(batch.queries, CPU, Capacity(1, 1, 40, 3, (None, 20)))
    with pytest.raises(ValueError, match=r"window 30 .* \(None, 20\)"):
        plan(batch.q_THD, batch.pages, AttentionOptions(window=30))
    with pytest.raises(ValueError, match=r"2 rows .* of 1"):
        plan(batch.q_THD.repeat(2, 1, 1), batch.pages, LAYERS[0])


def test_latents_that_torch_attends_to_are_not_recorded() -> None:
    latents = latent_batch([(1, 40)], 16, 2, 144, 16)
    wide = PagedLatentAttentionTriton(latents.queries, CPU, Capacity(1, 1, 40, 3))
    with pytest.raises(NotRecordable, match="rank 144"):
        wide(latents.q_THR, latents.q_THE, latents.pages, 0.1)
