"""Absorbed latent attention on a GPU: a latent is loaded once, for the scores and for the sums.

A program takes some heads of one token and walks over the latents of one split; the splits, the page ids that are
loaded ahead, and the reduction are those of the attention kernel.

Shapes: T tokens, H heads, R latent rank, E rotated dimensions, P pages, S slots of a page.
"""

# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compress.kernels.attention_kernel_triton import add_tile, divide_sums, load_page_ids
from compress.kernels.attention_plan import DeviceWork, Partials, StepPlan
from compress.kernels.attention_triton import LOG2E, plan_reduction
from compress.kernels.attention_work import Cut, Tile
from compress.kernels.cpu.program import NotRecordable
from compress.kernels.launch import Launch, Target, run, strides, target_of, unit_stride
from compress.kernels.mla import LatentPages, PagedLatentAttention
from compress.kernels.queries import Capacity, PagedQueries


@triton.jit
def _attend_latents(
    items,
    table,
    queries,
    rotated_queries,
    latents,
    keys,
    out,
    partial_sums,
    partial_norms,
    score_scale,
    heads,
    head_blocks,
    query_t,
    query_h,
    rotated_t,
    rotated_h,
    latent_p,
    latent_s,
    key_p,
    key_s,
    out_t,
    out_h,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    item = items + (program // head_blocks).to(tl.int64) * 8
    token = tl.load(item).to(tl.int64)
    tokens = tl.load(item + 1)
    first_key = tl.load(item + 3)
    end_key = tl.load(item + 4)  # a single token's keys end with itself: no more mask is needed
    table += tl.load(item + 5)
    if tokens == 0:
        return

    head = (program % head_blocks) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, KEYS)
    ranks = tl.arange(0, RANK_PADDED)
    turns = tl.arange(0, ROTATED_PADDED)
    used = (head < heads)[:, None] & (ranks < RANK)[None, :]
    query_at = queries + token * query_t + head[:, None] * query_h + ranks[None, :]
    q = tl.load(query_at, mask=used, other=0.0)
    rotated_at = rotated_queries + token * rotated_t + head[:, None] * rotated_h + turns[None, :]
    q_rotated = tl.load(rotated_at, mask=(head < heads)[:, None] & (turns < ROTATED)[None, :], other=0.0)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, RANK_PADDED), tl.float32)
    ids = load_page_ids(table, first_key, columns, PAGE_BITS, KEYS)
    for key in range(first_key, end_key, KEYS):
        next_ids = load_page_ids(table, key + KEYS, columns, PAGE_BITS, KEYS)
        page = ids.to(tl.int64)
        slot = (key + columns) & ((1 << PAGE_BITS) - 1)
        written = key + columns < end_key  # a slot that nobody wrote may hold NaN
        latent_at = latents + (page * latent_p + slot * latent_s)[:, None] + ranks[None, :]
        c = tl.load(latent_at, mask=written[:, None] & (ranks < RANK)[None, :], other=0.0).to(q.dtype)
        key_at = keys + (page * key_p + slot * key_s)[:, None] + turns[None, :]
        k = tl.load(key_at, mask=written[:, None] & (turns < ROTATED)[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q_rotated, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(c), scores, input_precision=PRECISION) * score_scale
        weights, top, total, decay = add_tile(tl.where(written[None, :], scores, float("-inf")), top, total)
        sums = tl.dot(weights.to(q.dtype), c, sums * decay[:, None], input_precision=PRECISION)
        ids = next_ids

    partial = tl.load(item + 6).to(tl.int64)
    token = tl.load(item + 7).to(tl.int64)  # loaded anew: no register need hold it through the loop
    if partial < 0:
        result = divide_sums(sums, total)
        out_at = out + token * out_t + head[:, None] * out_h + ranks[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=used)
    else:
        row = partial * heads + head
        tl.store(partial_sums + row[:, None] * RANK + ranks[None, :], sums, mask=used)
        tl.store(partial_norms + row * 2, top, mask=head < heads)
        tl.store(partial_norms + row * 2 + 1, total, mask=head < heads)


def choose_latent_tile(q_THR: torch.Tensor, target: Target) -> Tile:
    """16 heads: more need more registers for their sums than there are. float32 of a rank above 128 spills even so."""
    rank = q_THR.shape[2]
    aligned = rank * q_THR.itemsize % 16 == 0  # else each number is a load of its own, with registers of its own
    return Tile(
        rows=16,
        keys=32 if aligned and q_THR.dtype != torch.float32 else 16,
        warps=8 if rank > 256 and target.backend == "cuda" else 4,
        stages=3 if aligned and target.backend == "cuda" else 2,
    )


def plan_latent_attention(
    q_THR: torch.Tensor,
    q_THE: torch.Tensor,
    pages: LatentPages,
    scale: float,
    work: DeviceWork,
    table: torch.Tensor,
    tile: Tile,
    out_THR: torch.Tensor,
    partials: Partials,
    target: Target,
) -> list[Launch]:
    """`work` in blocks of one token. Rows of `out_THR` that belong to no request are left as they are."""
    heads, rank = q_THR.shape[1:]
    rotated = q_THE.shape[2]
    blocks = -(-heads // tile.rows)
    attend = Launch(
        _attend_latents,
        (len(work.items_X8) * blocks,),
        {
            "items": work.items_X8,
            "table": table,
            "queries": q_THR,
            "rotated_queries": q_THE,
            "latents": pages.latents_PSR,
            "keys": pages.keys_PSE,
            "out": out_THR,
            "partial_sums": partials.sums_BHD,
            "partial_norms": partials.norms_BH2,
            "score_scale": scale * LOG2E,
            "heads": heads,
            "head_blocks": blocks,
            **strides("query", q_THR, "th"),
            **strides("rotated", q_THE, "th"),
            **strides("latent", pages.latents_PSR, "ps"),
            **strides("key", pages.keys_PSE, "ps"),
            **strides("out", out_THR, "th"),
            "RANK": rank,
            "RANK_PADDED": triton.next_power_of_2(rank),
            "ROTATED": rotated,
            "ROTATED_PADDED": triton.next_power_of_2(rotated),
            "PAGE_BITS": pages.keys_PSE.shape[1].bit_length() - 1,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "PRECISION": "tf32x3" if target.backend == "cuda" else "ieee",  # as in the attention kernel
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not work.partial_rows:
        return [attend]
    return [attend, plan_reduction(work, partials, None, out_THR)]


WIDEST_FLOAT32 = 128  # rank


class PagedLatentAttentionTriton:
    """Latent attention of one step: what is to be done goes to the device once, and is used by every layer."""

    def __init__(self, queries: PagedQueries, device: torch.device, capacity: Capacity | None = None) -> None:
        self._target = target_of(device)
        self._step = StepPlan(queries, device, capacity)

    def update(self, queries: PagedQueries) -> bool:
        """As `operations.LatentAttention`."""
        return self._step.update(queries)

    def __call__(self, q_THR: torch.Tensor, q_THE: torch.Tensor, pages: LatentPages, scale: float) -> torch.Tensor:
        """[T, H, R] in the dtype of q; with a capacity, T is its tokens.

        Wide float32 latents, too many registers, go to the reference; with a capacity they raise NotRecordable.
        """
        self._step.check_rows(len(q_THR))
        if q_THR.dtype == torch.float32 and q_THR.shape[2] > WIDEST_FLOAT32:
            if self._step.capacity is not None:
                raise NotRecordable(f"float32 latents of rank {q_THR.shape[2]} are attended to by torch")
            return PagedLatentAttention(self._step.queries)(q_THR, q_THE, pages, scale)
        q_THR, q_THE = unit_stride(q_THR), unit_stride(q_THE)
        out_THR = torch.empty(q_THR.shape, dtype=q_THR.dtype, device=q_THR.device)
        tile = choose_latent_tile(q_THR, self._target)
        cut = Cut(None, 1, tile.keys)
        packed = self._step.packed([cut])
        arguments = (packed.works[cut], packed.table, tile, out_THR, packed.partials(*q_THR.shape[1:]), self._target)
        run(plan_latent_attention(q_THR, q_THE, pages, scale, *arguments))
        return out_THR
