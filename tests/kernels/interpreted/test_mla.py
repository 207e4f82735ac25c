"""The latent attention kernel against float64, and against itself in other batches and pages."""

from __future__ import annotations

import pytest
import torch

from compress.kernels.attention_plan import PackedWork
from compress.kernels.attention_work import Cut
from compress.kernels.launch import Target, run
from compress.kernels.mla import LatentPages
from compress.kernels.mla_triton import PagedLatentAttentionTriton, choose_latent_tile, plan_latent_attention
from compress.kernels.queries import PagedQueries
from tests.kernels.latent_batches import LatentBatch, expected, latent_batch

CPU = torch.device("cpu")
REQUESTS = [(1, 37), (0, 5), (1, 1), (3, 40), (1, 600), (10, 12)]
NAN = float("nan")


def attend(batch: LatentBatch, scale: float) -> torch.Tensor:
    return PagedLatentAttentionTriton(batch.queries, CPU)(batch.q_THR, batch.q_THE, batch.pages, scale)


def check(ours: torch.Tensor, batch: LatentBatch, scale: float) -> None:
    """Two roundings to the dtype, of weights and of the result; latents are below 20. float32: scores below 64."""
    bound = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[ours.dtype] * 20
    assert (ours.double() - expected(batch, scale)).abs().max() < bound


@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "dtype"),
    [
        (5, 64, 16, torch.float32),
        (20, 96, 24, torch.float16),  # two blocks of heads; neither width is a power of two
        (3, 64, 32, torch.bfloat16),
    ],
)
def test_requests_of_every_kind_in_one_batch(heads: int, rank: int, rotated: int, dtype: torch.dtype) -> None:
    batch = latent_batch(REQUESTS, 16, heads, rank, rotated, dtype, blank=NAN)
    scale = rank**-0.5
    check(attend(batch, scale), batch, scale)


@pytest.mark.parametrize("rank", [512, 385])
def test_full_rank(rank: int) -> None:
    batch = latent_batch([(1, 70), (2, 33)], 16, 4, rank, 64, torch.float16, blank=NAN)
    check(attend(batch, 0.04), batch, 0.04)


def test_results_are_the_same_bits_for_every_page_size() -> None:
    batches = [latent_batch(REQUESTS, size, 4, 64, 16, torch.float16, blank=NAN) for size in (1, 16, 32)]
    first, *others = [attend(batch, 0.1) for batch in batches]
    for other in others:
        assert torch.equal(first, other)


def test_results_are_the_same_bits_alone_and_in_a_batch() -> None:
    batch = latent_batch([(1, 37), (2, 513), (1, 1100)], 16, 4, 64, 16, torch.float16, blank=NAN)
    together = attend(batch, 0.1).split([1, 2, 1])
    tokens = batch.q_THR.split([1, 2, 1]), batch.q_THE.split([1, 2, 1])
    for index, result in enumerate(together):
        queries = batch.queries
        alone = PagedQueries([queries.lengths[index]], [queries.contexts[index]], [queries.tables[index]], 16)
        batch_of_one = LatentBatch(tokens[0][index], tokens[1][index], batch.pages, alone)
        assert torch.equal(attend(batch_of_one, 0.1), result)


def test_rows_of_no_request_are_left_as_they_are() -> None:
    batch = latent_batch([(1, 37), (2, 530)], 16, 4, 64, 16, torch.float32, blank=NAN)
    target = Target("cuda", 90)
    tile = choose_latent_tile(batch.q_THR, target)
    cut = Cut(None, 1, tile.keys)
    packed = PackedWork(batch.queries, [cut], CPU)
    out = torch.full((5, 4, 64), NAN)
    arguments = (packed.works[cut], packed.table, tile, out, packed.partials(4, 64), target)
    run(plan_latent_attention(batch.q_THR, batch.q_THE, batch.pages, 0.1, *arguments))
    check(out[:3], batch, 0.1)
    assert out[3:].isnan().all()


def test_latents_and_keys_in_tensors_of_their_own() -> None:
    batch = latent_batch([(1, 37)], 16, 4, 64, 16, torch.float32, blank=NAN)
    pages = LatentPages(batch.pages.latents_PSR.contiguous(), batch.pages.keys_PSE.contiguous())
    apart = LatentBatch(batch.q_THR, batch.q_THE, pages, batch.queries)
    assert torch.equal(attend(apart, 0.1), attend(batch, 0.1))
