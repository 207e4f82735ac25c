"""Absorbed latent attention against keys and values written out, and against Transformers' DeepSeek-V3."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from compress.kernels.kv import copy_pages
from compress.kernels.mla import LatentCache, LatentPages, PagedLatentAttention, store_latents
from compress.kernels.queries import PagedQueries
from tests.kernels.latent_batches import expected, latent_batch

BATCHES = {
    "decode": [(1, 1), (1, 37), (1, 38), (1, 90)],
    "fresh prompts": [(20, 20), (3, 3)],
    "chunks and drafts": [(1, 70), (4, 40), (24, 60)],
    "empty": [(0, 5), (2, 9)],
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", list(BATCHES))
def test_reference(name: str, page_size: int) -> None:
    batch = latent_batch(BATCHES[name], page_size, 3, 20, 6)
    ours = PagedLatentAttention(batch.queries)(batch.q_THR, batch.q_THE, batch.pages, 0.2)
    # scores of about 10 in float32, then values of up to 16
    assert (ours - expected(batch, 0.2)).abs().max() < 2e-5


def test_slots_of_padding_are_left_out_and_pages_copied() -> None:
    cache = LatentCache((torch.zeros(3, 4, 6),), (torch.zeros(3, 4, 2),))
    x = torch.randn(3, 8)
    store_latents(x[:, :6], x[:, 6:], cache.layer(0), torch.tensor([5, -1, 2]))
    written = torch.cat((cache.latents[0], cache.keys[0]), dim=-1).flatten(0, 1)
    assert torch.equal(written[[5, 2]], x[[0, 2]])
    assert written.count_nonzero() == 16
    copy_pages(cache, [(1, 2)])
    assert torch.equal(cache.latents[0][2], cache.latents[0][1])
    assert cache.nbytes == 4 * 3 * 4 * 8


def test_decode_is_the_last_token_of_deepseek_v3() -> None:
    """Projections of Transformers' module, its rotated queries and keys, and our attention between them."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=24,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=12,
        initializer_range=0.3,
    )
    config._attn_implementation = "eager"
    module = DeepseekV3Attention(config, 0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    length, heads = 21, 4
    hidden = torch.randn(1, length, 48)
    # positions all at 0 leave queries and keys as they are: rotation is another kernel's matter
    cos, sin = torch.ones(1, length, 8), torch.zeros(1, length, 8)
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    assert module.q_proj is not None
    with torch.no_grad():
        wanted = module(hidden, (cos, sin), mask)[0][0, -1]
        # rotation by 0 of interleaved pairs still brings the even ones to the front, in queries and keys alike
        q = module.q_proj(hidden)[0, -1].view(heads, 18)
        compressed = module.kv_a_proj_with_mqa(hidden)[0]
        latents, keys = module.kv_a_layernorm(compressed[:, :24]), compressed[:, 24:]
        up = module.kv_b_proj.weight.view(heads, 22, 24)
        cache = LatentPages(torch.zeros(4, 8, 24), torch.zeros(4, 8, 8))
        store_latents(latents, keys, cache, torch.tensor([*range(24, 32), *range(8, 16), *range(5)]))
        q_latent = torch.einsum("hn,hnr->hr", q[:, :10], up[:, :10])
        paged = PagedLatentAttention(PagedQueries([1], [length], [[3, 1, 0]], 8))
        out = paged(q_latent[None], q[None, :, 10:], cache, module.scaling)[0]
        ours = module.o_proj(torch.einsum("hr,hvr->hv", out, up[:, 10:]).flatten())
    # float32, and another order of its products
    assert (ours - wanted).abs().max() < 1e-4 * wanted.abs().max()
