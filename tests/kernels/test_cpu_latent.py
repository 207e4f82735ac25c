"""Latent attention by the compiled kernel: against float64, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from compress.kernels.cpu.isa import supported
from compress.kernels.cpu.latent import CompiledLatentAttention
from compress.kernels.mla import LatentPages, PagedLatentAttention
from compress.kernels.queries import PagedQueries
from tests.kernels.latent_batches import LatentBatch, expected, latent_batch

REQUESTS = [(1, 1), (1, 37), (20, 20), (4, 40), (24, 60), (0, 5)]
pytestmark = pytest.mark.skipif(not supported(), reason="the compiled kernels cannot be built here")


def attend(batch: LatentBatch, queries: PagedQueries, tokens: slice = slice(None)) -> torch.Tensor:
    attention = CompiledLatentAttention(queries, supported()[-1])
    return attention(batch.q_THR[tokens], batch.q_THE[tokens], batch.pages, 0.2)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("rank", "rotated"), [(32, 16), (24, 8), (200, 56), (7, 4), (512, 64), (640, 16)])
def test_equals_float64(rank: int, rotated: int, page_size: int) -> None:
    """7 + 4 and 640 + 16 go to the reference: a width that is no multiple of 16, and one above DeepSeek's 576."""
    batch = latent_batch(REQUESTS, page_size, 3, rank, rotated)
    bound = 5e-5 * max(1, rank / 256)  # the scores that are rounded grow with the rank
    assert (attend(batch, batch.queries) - expected(batch, 0.2)).abs().max() < bound


def test_what_nobody_wrote_is_not_read() -> None:
    batch = latent_batch(REQUESTS, 16, 3, 24, 8, blank=float("nan"))
    assert attend(batch, batch.queries).isfinite().all()


def test_pages_that_are_not_neighbours_go_to_the_reference() -> None:
    batch = latent_batch(REQUESTS, 16, 3, 24, 8)
    apart = LatentPages(batch.pages.latents_PSR.clone(), batch.pages.keys_PSE.clone())
    attention = CompiledLatentAttention(batch.queries, supported()[-1])
    reference = PagedLatentAttention(batch.queries)(batch.q_THR, batch.q_THE, batch.pages, 0.2)
    assert torch.equal(attention(batch.q_THR, batch.q_THE, apart, 0.2), reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "rotated"), [(24, 8), (7, 4)])
def test_pages_of_16_bits(rank: int, rotated: int, dtype: torch.dtype) -> None:
    """float32 queries over a narrower cache; 7 + 4 goes to the reference."""
    batch = latent_batch(REQUESTS, 16, 3, rank, rotated, dtype)
    wide = LatentBatch(batch.q_THR.float(), batch.q_THE.float(), batch.pages, batch.queries)
    assert (attend(wide, wide.queries) - expected(wide, 0.2)).abs().max() < 5e-5


def test_a_request_is_the_same_bits_alone_and_in_company() -> None:
    batch = latent_batch(REQUESTS, 16, 3, 32, 16)
    together, queries, token = attend(batch, batch.queries), batch.queries, 0
    for length, context, table in zip(queries.lengths, queries.contexts, queries.tables, strict=True):
        tokens = slice(token, token := token + length)
        alone = attend(batch, PagedQueries([length], [context], [table], 16), tokens)
        assert torch.equal(alone, together[tokens])
