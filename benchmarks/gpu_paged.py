"""Paged attention: random batches, and what they come to in float64.

Shapes: T tokens of a flat batch, H query heads, K KV heads, D head dim, P pages, S keys or slots of a page, L new
tokens of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.kernels.attention_triton import PagedAttentionTriton
from compress.kernels.kv import LIMITS, Pages, dequantize, dynamic_scales, quantize
from compress.kernels.mla import LatentPages
from compress.kernels.mla_triton import PagedLatentAttentionTriton
from compress.kernels.queries import AttentionOptions, PagedQueries

PAGE = 16


@dataclass(frozen=True)
class PagedCase:
    name: str
    heads: tuple[int, int, int]  # H, K, D
    lengths: tuple[int, ...]  # new tokens of each request
    contexts: tuple[int, ...]
    codes: torch.dtype | None = None  # of quantized keys and values
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def run(
        self, device: torch.device, dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the kernel computes and what is right, [T, H, D]."""
        heads, kv_heads, head_dim = self.heads
        queries = random_queries(self.lengths, self.contexts, generator, device)
        q_THD, *kv = (
            torch.randn(count, width, head_dim, device=device, generator=generator).to(dtype)
            for count, width in ((sum(self.lengths), heads), *(((count_slots(queries), kv_heads),) * 2))
        )
        pages = fill_pages(kv[0], kv[1], queries, self.codes)
        sinks_H = torch.randn(heads, device=device, generator=generator) if self.sinks else None
        options = AttentionOptions(self.window, None, self.soft_cap, sinks_H)
        got_THD = PagedAttentionTriton(queries, device)(q_THD, pages, options)
        return got_THD, reference(q_THD, pages, queries, options)


def paged_cases(small: bool) -> tuple[PagedCase, ...]:
    """Decode, verification and prefill side by side; contexts at and around the lengths at which keys are split."""
    if small:
        lengths, contexts = (1, 3, 1), (40, 19, 1)
        return (
            PagedCase("mixed", (4, 2, 32), lengths, contexts),
            PagedCase("fp8 keys", (4, 2, 32), lengths, contexts, torch.float8_e4m3fn),
            PagedCase("window, cap, sinks", (4, 1, 32), lengths, contexts, None, 7, 20.0, True),
        )
    lengths, contexts = (1, 1, 1, 1, 3, 8, 130, 517, 1), (1, 511, 512, 4100, 513, 1030, 130, 2600, 9000)
    llama, qwen, gemma = (32, 8, 128), (14, 2, 64), (8, 4, 256)
    return (
        PagedCase("32/8 heads of 128", llama, lengths, contexts),
        PagedCase("14/2 heads of 64", qwen, lengths, contexts),
        PagedCase("8/4 heads of 256", gemma, lengths, contexts),
        PagedCase("fp8 keys and values", llama, lengths, contexts, torch.float8_e4m3fn),
        PagedCase("int8 keys and values", llama, lengths, contexts, torch.int8),
        PagedCase("window of 700", llama, lengths, contexts, None, 700),
        PagedCase("soft cap", gemma, lengths, contexts, None, None, 20.0),
        PagedCase("sinks", llama, lengths, contexts, None, 128, None, True),
    )


def random_queries(
    lengths: Sequence[int], contexts: Sequence[int], generator: torch.Generator, device: torch.device
) -> PagedQueries:
    """Pages in random order; page 0 pads and belongs to nobody."""
    widths = [-(-context // PAGE) for context in contexts]
    shuffled = (torch.randperm(sum(widths), generator=generator, device=device) + 1).tolist()
    tables, first = [], 0
    for width in widths:
        tables.append(shuffled[first : first + width])
        first += width
    return PagedQueries(lengths, contexts, tables, PAGE)


def count_slots(queries: PagedQueries) -> int:
    return PAGE * (1 + sum(len(table) for table in queries.tables))


def fill_pages(k_SKD: torch.Tensor, v_SKD: torch.Tensor, queries: PagedQueries, codes: torch.dtype | None) -> Pages:
    """Keys and values in pages; slots that no request has reached hold NaN, which must not be read."""
    unused_S = torch.ones(len(k_SKD), dtype=torch.bool, device=k_SKD.device)
    for table, context in zip(queries.tables, queries.contexts, strict=True):
        slots = torch.tensor(table, device=k_SKD.device).repeat_interleave(PAGE) * PAGE
        slots += torch.arange(PAGE, device=k_SKD.device).repeat(len(table))
        unused_S[slots[:context]] = False
    stored: list[torch.Tensor | None] = []
    for x_SKD in (k_SKD, v_SKD):
        if codes is None:
            stored += [x_SKD.masked_fill(unused_S[:, None, None], torch.nan).unflatten(0, (-1, PAGE)), None]
            continue
        scale_SK = dynamic_scales(x_SKD, codes)
        code_SKD = quantize(x_SKD, scale_SK, codes)
        scale_SK = scale_SK.masked_fill(unused_S[:, None], torch.nan)
        stored += [code_SKD.unflatten(0, (-1, PAGE)), scale_SK.unflatten(0, (-1, PAGE))]
    keys, key_scales, values, value_scales = stored
    assert keys is not None
    assert values is not None
    return Pages(keys, values, key_scales, value_scales)


def reference(q_THD: torch.Tensor, pages: Pages, queries: PagedQueries, options: AttentionOptions) -> torch.Tensor:
    """In float64, one request at a time."""
    keys_SKD = _wide(pages.keys_PSKD, pages.key_scales_PSK)
    values_SKD = _wide(pages.values_PSKD, pages.value_scales_PSK)
    heads, head_dim = q_THD.shape[1:]
    group = heads // keys_SKD.shape[1]
    parts, first = [], 0
    for length, context, table in zip(queries.lengths, queries.contexts, queries.tables, strict=True):
        slot_S = torch.tensor(table, device=q_THD.device)[:, None] * PAGE + torch.arange(PAGE, device=q_THD.device)
        slot_S = slot_S.flatten()[:context]
        q_LHD = q_THD[first : first + length].double()
        first += length
        k_SHD, v_SHD = (x[slot_S].repeat_interleave(group, dim=1) for x in (keys_SKD, values_SKD))
        score_HLS = torch.einsum("lhd,shd->hls", q_LHD, k_SHD) * (options.scale or head_dim**-0.5)
        if options.soft_cap is not None:
            score_HLS = options.soft_cap * (score_HLS / options.soft_cap).tanh()
        position_L = torch.arange(context - length, context, device=q_THD.device)[:, None]
        key_S = torch.arange(context, device=q_THD.device)
        hidden_LS = key_S > position_L
        if options.window is not None:
            hidden_LS |= key_S <= position_L - options.window
        score_HLS = score_HLS.masked_fill(hidden_LS, -torch.inf)
        if options.sinks_H is not None:
            sink_HL1 = options.sinks_H.double()[:, None, None].expand(-1, length, 1)
            weight_HLS = torch.cat([score_HLS, sink_HL1], dim=2).softmax(dim=2)[..., :-1]
        else:
            weight_HLS = score_HLS.softmax(dim=2)
        parts.append(torch.einsum("hls,shd->lhd", weight_HLS, v_SHD))
    return torch.cat(parts)


def _wide(pages_PSKD: torch.Tensor, scales_PSK: torch.Tensor | None) -> torch.Tensor:
    if scales_PSK is None:
        return pages_PSKD.double().flatten(0, 1)
    assert pages_PSKD.dtype in LIMITS
    return dequantize(pages_PSKD, scales_PSK, torch.float64).flatten(0, 1)


def latent_case(
    shape: tuple[int, int, int],
    lengths: Sequence[int],
    contexts: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of H heads, rank R and E rotated dimensions: what the kernel computes and what is right."""
    heads, rank, rotated = shape
    queries = random_queries(lengths, contexts, generator, device)
    tokens, width, scale = sum(lengths), rank + rotated, (128 + rotated) ** -0.5
    q_THX = torch.randn(tokens, heads, width, device=device, generator=generator).to(dtype)
    kv_S1X = torch.randn(count_slots(queries), 1, width, device=device, generator=generator).to(dtype)
    kv_PSX = fill_pages(kv_S1X, kv_S1X, queries, None).keys_PSKD[:, :, 0]
    pages = LatentPages(kv_PSX[..., :rank], kv_PSX[..., rank:])
    attend = PagedLatentAttentionTriton(queries, device)
    got_THR = attend(q_THX[..., :rank].contiguous(), q_THX[..., rank:].contiguous(), pages, scale)
    values_PS1R = kv_PSX[:, :, None, :rank]
    wide = reference(q_THX, Pages(kv_PSX[:, :, None], values_PS1R), queries, AttentionOptions(scale=scale))
    return got_THR, wide
