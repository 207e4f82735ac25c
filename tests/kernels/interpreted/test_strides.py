"""Inputs whose neighbours lie apart in memory: every operation gives what it gives for a copy of them, to the bit.

A kernel that takes the elements of a row for neighbours would read the NaN between them, or another row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compress.kernels import activation_triton, kv_triton, logprob_triton, norm, norm_triton, rotary_triton
from compress.kernels import token_quant_triton as quant_triton
from compress.kernels.attention_triton import PagedAttentionTriton
from compress.kernels.kv import LIMITS, KVCache
from compress.kernels.matmul_triton import prepare_matmul
from compress.kernels.mla_triton import PagedLatentAttentionTriton
from compress.kernels.narrow_matmul import NarrowWeight
from compress.kernels.narrow_matmul_triton import W8A8Triton
from compress.kernels.queries import AttentionOptions
from tests.kernels.interpreted.quantized_weights import packed_weight
from tests.kernels.latent_batches import latent_batch
from tests.kernels.paged_batches import make_batch

CPU = torch.device("cpu")
NAN = float("nan")
Layout = Callable[[torch.Tensor], torch.Tensor]


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with NaN (or the largest integer) between neighbours."""
    blank = NAN if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
    room = torch.full((*x.shape, 2), blank, dtype=x.dtype)
    room[..., 0] = x
    return room[..., 0]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with the first axis innermost."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def in_room(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with NaN after each row of the last axis, as a slice of a wider matrix has them."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + 3), NAN, dtype=x.dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


LAYOUTS = pytest.mark.parametrize("layout", [apart, turned, in_room])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(ours: torch.Tensor, plain: torch.Tensor) -> None:
    assert not ours.float().isnan().any()
    assert torch.equal(ours, plain)


def test_the_layouts_are_what_they_say() -> None:
    x = randn(5, 3, 8)
    for layout in (apart, turned, in_room):
        same(layout(x), x)
        assert layout(x).stride() != x.stride()
    assert apart(x).stride(-1) == 2
    assert turned(x).stride(-1) == 5


@LAYOUTS
def test_pointwise(layout: Layout) -> None:
    x, residual, weight = randn(6, 64), randn(6, 64, seed=1), randn(64, seed=2)
    q, cos, sin = randn(6, 3, 16), randn(6, 8, seed=3), randn(6, 8, seed=4)
    scattered = apart(weight)
    same(norm_triton.rms_norm(layout(x), scattered, 1e-5), norm_triton.rms_norm(x, weight, 1e-5))
    plain = norm_triton.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(plain, norm.add_rms_norm(x, residual, weight, 1e-5))
    for one, other in zip(norm_triton.add_rms_norm(layout(x), layout(residual), scattered, 1e-5), plain, strict=True):
        same(one, other)
    same(activation_triton.gated(layout(x), "silu"), activation_triton.gated(x, "silu"))
    for interleaved in (False, True):
        ours = rotary_triton.rotate(layout(q), layout(cos), layout(sin), interleaved)
        same(ours, rotary_triton.rotate(q, cos, sin, interleaved))
    for one, other in zip(
        quant_triton.quantize_tokens(layout(x), "int8", 32), quant_triton.quantize_tokens(x, "int8", 32), strict=True
    ):
        same(one, other)


@LAYOUTS
def test_logprobs(layout: Layout) -> None:
    p, q, target = randn(6, 300), randn(6, 300, seed=1), torch.arange(6) * 7
    plain = logprob_triton.token_logprobs(p, target)
    ours = logprob_triton.token_logprobs(layout(p), apart(target))
    same(ours.logprob_T, plain.logprob_T)
    same(logprob_triton.kl_divergence(layout(p), layout(q)), logprob_triton.kl_divergence(p, q))


@LAYOUTS
@pytest.mark.parametrize("requests", [[(1, 37), (1, 600)], [(17, 17), (4, 40)]], ids=["decode", "prefill"])
def test_attention(layout: Layout, requests: list[tuple[int, int]]) -> None:
    batch = make_batch(requests, 16, 6, 2, 32)
    for options in (AttentionOptions(), AttentionOptions(window=20)):
        ours = PagedAttentionTriton(batch.queries, CPU)(layout(batch.q_THD), batch.pages, options)
        same(ours, PagedAttentionTriton(batch.queries, CPU)(batch.q_THD, batch.pages, options))


@LAYOUTS
@pytest.mark.parametrize("requests", [[(1, 37), (1, 600)], [(17, 17), (4, 40)]], ids=["decode", "prefill"])
def test_latent_attention(layout: Layout, requests: list[tuple[int, int]]) -> None:
    batch = latent_batch(requests, 16, 5, 64, 16, blank=NAN)
    ours = PagedLatentAttentionTriton(batch.queries, CPU)(layout(batch.q_THR), layout(batch.q_THE), batch.pages, 0.1)
    same(ours, PagedLatentAttentionTriton(batch.queries, CPU)(batch.q_THR, batch.q_THE, batch.pages, 0.1))


@LAYOUTS
@pytest.mark.parametrize("form", [torch.float32, torch.int8], ids=str)
def test_storing(layout: Layout, form: torch.dtype) -> None:
    k, v = randn(7, 2, 24), randn(7, 2, 16, seed=1)
    slots = torch.tensor([3, -1, 9, 0, 14, 15, 8])

    def stored(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
        keys, values = (torch.zeros(4, 4, 2, dim, dtype=form) for dim in (24, 16))
        scales = [(torch.zeros(4, 4, 2),) for _ in "kv"] if form in LIMITS else [None, None]
        cache = KVCache((keys,), (values,), *scales)
        kv_triton.store(k, v, cache, 0, slots)
        return [keys, values, *(scale[0] for scale in scales if scale is not None)]

    plain = stored(k, v, slots)
    assert plain[0].any()
    for one, other in zip(stored(layout(k), layout(v), apart(slots)), plain, strict=True):
        same(one, other)


@LAYOUTS
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_matmuls(layout: Layout, tokens: int) -> None:
    x = randn(tokens, 128)
    linear = prepare_matmul(packed_weight(4, 24, 128, 32, asymmetric=True), None, CPU, torch.float16)
    same(linear(layout(x.half())), linear(x.half()))
    codes = torch.randint(-128, 128, (24, 128), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    narrow = W8A8Triton(NarrowWeight("int8", codes, torch.full((24,), 0.01), None))
    same(narrow(layout(x)), narrow(x))
