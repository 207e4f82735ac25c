"""Decode attention over a paged cache beside torch's attention over a contiguous one.

Shapes: B requests, H query heads, K KV heads, D head dim, S keys, R latent rank, E rotated dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu_clock import Bench, Roofline, Timing
from benchmarks.gpu_linear import cell, describe
from benchmarks.gpu_paged import count_slots, random_queries
from benchmarks.gpu_tables import Column, Deadline, Section
from compress.kernels.attention_triton import PagedAttentionTriton
from compress.kernels.kv import Pages
from compress.kernels.mla import LatentPages
from compress.kernels.mla_triton import PagedLatentAttentionTriton
from compress.kernels.queries import AttentionOptions

MEMORY_SHARE = 0.2  # of the free memory, for the keys and values of one figure
CONTEXTS = (1024, 8192, 32768, 131072)
BATCHES = (1, 4, 16, 64)
FORMATS: dict[str, torch.dtype | None] = {"paged": None, "paged, fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Heads:
    model: str
    query: int  # H
    kv: int  # K
    dim: int  # D

    def kv_bytes(self, batch: int, context: int, itemsize: int) -> int:
        scales = 4 if itemsize == 1 else 0  # one float32 for each slot and head
        return 2 * batch * context * self.kv * (self.dim * itemsize + scales)


MODELS = (Heads("Llama-3.1-8B", 32, 8, 128), Heads("Qwen3-0.6B", 16, 8, 128), Heads("Llama-2-13B", 40, 40, 128))
SMALL_MODELS = (Heads("small", 4, 2, 32),)


def measure_attention(bench: Bench, roofline: Roofline | None, deadline: Deadline) -> Section:
    contexts, batches = ((48,), (1, 2)) if bench.interpreted else (CONTEXTS, BATCHES)
    columns = (Column("model"), Column("context"), Column("keys and values"))
    section = Section("Decode attention", (*columns, *(Column(f"batch {batch}") for batch in batches)))
    for heads in SMALL_MODELS if bench.interpreted else MODELS:
        for context in contexts:
            if deadline.passed(f"{heads.model} at {context}"):
                continue
            peers = {batch: measure_peer(bench, heads, batch, context) for batch in batches}
            rows = {"torch": peers} | {
                name: {batch: measure_paged(bench, heads, batch, context, codes) for batch in batches}
                for name, codes in FORMATS.items()
            }
            for name, timings in rows.items():
                itemsize = 1 if FORMATS.get(name) else bench.dtypes[0].itemsize
                cells = []
                for batch, timing in timings.items():
                    moved = heads.kv_bytes(batch, context, itemsize)
                    operations = 4 * batch * heads.query * context * heads.dim
                    peer = None if name == "torch" else peers[batch]
                    figure = describe(timing, peer, roofline, moved, operations)
                    told = {**vars(heads), "context": context, "batch": batch, "keys_and_values": name}
                    section.figures.append(told | figure)
                    cells.append(cell(figure))
                section.add(heads.model, str(context), name, *cells)
    section.notes.append("One layer. torch: scaled_dot_product_attention over contiguous keys and values.")
    section.notes += deadline.note()
    return section


def fits(bench: Bench, nbytes: int) -> bool:
    if bench.interpreted:
        return True
    torch.cuda.empty_cache()
    return nbytes < MEMORY_SHARE * torch.cuda.mem_get_info(bench.device)[0]


def measure_peer(bench: Bench, heads: Heads, batch: int, context: int) -> Timing | None:
    dtype = bench.dtypes[0]
    nbytes = heads.kv_bytes(batch, context, dtype.itemsize)
    if not fits(bench, nbytes):
        return None
    q_BH1D = torch.randn(batch, heads.query, 1, heads.dim, device=bench.device, dtype=dtype)
    kv_2BKSD = torch.randn(2, batch, heads.kv, context, heads.dim, device=bench.device, dtype=dtype)
    copies = bench.copies(kv_2BKSD, nbytes)
    return bench.measure(
        [
            lambda k=keys, v=values: F.scaled_dot_product_attention(q_BH1D, k, v, enable_gqa=True)
            for keys, values in copies
        ]
    )


def measure_paged(bench: Bench, heads: Heads, batch: int, context: int, codes: torch.dtype | None) -> Timing | None:
    dtype = bench.dtypes[0]
    nbytes = heads.kv_bytes(batch, context, 1 if codes else dtype.itemsize)
    if not fits(bench, nbytes):
        return None
    queries = random_queries((1,) * batch, (context,) * batch, torch.Generator(bench.device), bench.device)
    pages = random_pages(bench, heads, count_slots(queries) // queries.page_size, queries.page_size, codes)
    q_THD = torch.randn(batch, heads.query, heads.dim, device=bench.device, dtype=dtype)
    attend = PagedAttentionTriton(queries, bench.device)
    attend(q_THD, pages, AttentionOptions())  # plans on the host, once for a step
    copies = bench.copies(pages, nbytes)
    return bench.measure([lambda each=each: attend(q_THD, each, AttentionOptions()) for each in copies])


def random_pages(bench: Bench, heads: Heads, pages: int, size: int, codes: torch.dtype | None) -> Pages:
    shape = (pages, size, heads.kv, heads.dim)
    keys, values = (torch.randn(shape, device=bench.device, dtype=bench.dtypes[0]) for _ in range(2))
    if codes is None:
        return Pages(keys, values)
    scales = torch.full((2, *shape[:3]), 0.01, device=bench.device)
    return Pages(keys.to(codes), values.to(codes), scales[0].contiguous(), scales[1].contiguous())


@dataclass(frozen=True)
class Latent:
    """DeepSeek-V3's heads, or a few small ones."""

    heads: int  # H
    rank: int  # R
    rotated: int  # E

    @property
    def scale(self) -> float:
        return (128 + self.rotated) ** -0.5


def measure_latent_attention(bench: Bench, roofline: Roofline | None, deadline: Deadline) -> Section:
    contexts, batches = ((48,), (1, 2)) if bench.interpreted else (CONTEXTS, BATCHES)
    shape = Latent(4, 32, 16) if bench.interpreted else Latent(128, 512, 64)
    columns = (Column("context"), Column("path"), *(Column(f"batch {batch}") for batch in batches))
    section = Section(f"Latent decode attention, {shape.heads} heads, {shape.rank} + {shape.rotated}", columns)
    for context in contexts:
        if deadline.passed(f"context {context}"):
            continue
        peers = {batch: measure_latent_peer(bench, shape, batch, context) for batch in batches}
        paged = {batch: measure_latent(bench, shape, batch, context) for batch in batches}
        for name, timings in (("torch", peers), ("paged", paged)):
            cells = []
            for batch, timing in timings.items():
                moved = batch * context * (shape.rank + shape.rotated) * bench.dtypes[0].itemsize
                operations = 2 * batch * shape.heads * context * (2 * shape.rank + shape.rotated)
                figure = describe(timing, peers[batch] if name == "paged" else None, roofline, moved, operations)
                section.figures.append({**vars(shape), "context": context, "batch": batch, "path": name} | figure)
                cells.append(cell(figure))
            section.add(str(context), name, *cells)
    section.notes.append("One layer. torch: two batched products and a softmax over contiguous latents.")
    section.notes += deadline.note()
    return section


def measure_latent_peer(bench: Bench, shape: Latent, batch: int, context: int) -> Timing | None:
    width, dtype = shape.rank + shape.rotated, bench.dtypes[0]
    nbytes = batch * context * width * dtype.itemsize
    if not fits(bench, nbytes + 2 * batch * shape.heads * context * dtype.itemsize):
        return None
    q_BHX = torch.randn(batch, shape.heads, width, device=bench.device, dtype=dtype)
    copies = bench.copies(torch.randn(batch, context, width, device=bench.device, dtype=dtype), nbytes)

    def attend(kv_BSX: torch.Tensor) -> torch.Tensor:
        weights_BHS = (q_BHX @ kv_BSX.mT * shape.scale).softmax(dim=-1)
        return weights_BHS @ kv_BSX[..., : shape.rank]

    return bench.measure([lambda each=each: attend(each) for each in copies])


def measure_latent(bench: Bench, shape: Latent, batch: int, context: int) -> Timing | None:
    width, dtype = shape.rank + shape.rotated, bench.dtypes[0]
    nbytes = batch * context * width * dtype.itemsize
    if not fits(bench, nbytes):
        return None
    queries = random_queries((1,) * batch, (context,) * batch, torch.Generator(bench.device), bench.device)
    slots = (count_slots(queries) // queries.page_size, queries.page_size)
    q_THR = torch.randn(batch, shape.heads, shape.rank, device=bench.device, dtype=dtype)
    q_THE = torch.randn(batch, shape.heads, shape.rotated, device=bench.device, dtype=dtype)
    attend = PagedLatentAttentionTriton(queries, bench.device)
    copies = bench.copies(torch.randn(*slots, width, device=bench.device, dtype=dtype), nbytes)
    layers = [LatentPages(each[..., : shape.rank], each[..., shape.rank :]) for each in copies]
    attend(q_THR, q_THE, layers[0], shape.scale)  # plans on the host, once for a step
    return bench.measure([lambda each=each: attend(q_THR, q_THE, each, shape.scale) for each in layers])
