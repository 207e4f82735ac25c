"""Log-probabilities on a GPU: each logit is read once, in tiles of the vocabulary that are then merged in order.

The tiles depend on V alone, so a row's result does not depend on the other rows.
Shapes: T tokens, V vocabulary, N tiles of a row.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compress.kernels.launch import Launch, Target, run, target_of, unit_stride
from compress.kernels.logprob import TokenLogprobs

TILE = 8192  # logits of one program: 32 to a thread of 8 warps


@triton.jit
def _finite_or_zero(top):
    """What to subtract before exp: 0 for a tile that is −∞ throughout, where −∞ − −∞ would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _sum_tiles(logits, tops, sums, ids, vocabulary, tiles, row_stride, TILE: tl.constexpr):
    """For each tile: its largest logit, where it is, and Σ exp(logit − largest)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    value = tl.load(logits + row * row_stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    top, where = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tiles + tile
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(tl.exp(value - _finite_or_zero(top)), axis=0))
    tl.store(ids + out, tile * TILE + where)


@triton.jit
def _merge_tiles(
    logits,
    target,
    tops,
    sums,
    ids,
    logprob,
    logsumexp,
    argmax,
    vocabulary,
    tiles,
    row_stride,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    part = tl.load(tops + row * tiles + tile, mask=inside, other=float("-inf"))
    top, first = tl.max(part, axis=0, return_indices=True, return_indices_tie_break_left=True)
    weight = tl.exp(part - _finite_or_zero(top))
    total = tl.sum(tl.load(sums + row * tiles + tile, mask=inside, other=0.0) * weight, axis=0)
    above = tl.log(total)
    wanted = tl.load(target + row).to(tl.int64)
    known = (wanted >= 0) & (wanted < vocabulary)
    picked = tl.load(logits + row * row_stride + wanted, mask=known, other=float("nan")).to(tl.float32)
    # From the largest logit: its rounding, not that of the sum, bounds the error of a likely token.
    tl.store(logprob + row, picked - top - above)
    tl.store(logsumexp + row, top + above)
    tl.store(argmax + row, tl.load(ids + row * tiles + first).to(tl.int64))


def plan_token_logprobs(
    logits_TV: torch.Tensor,
    target_T: torch.Tensor,
    partial_2TN: torch.Tensor,
    id_TN: torch.Tensor,
    out: TokenLogprobs,
    target: Target,
) -> list[Launch]:
    """partial_2TN (float32) and id_TN (int32) are scratch of `tiles(V)` columns; logits' last stride is 1."""
    tokens, vocabulary = logits_TV.shape
    count = tiles(vocabulary)
    shared = {
        "logits": logits_TV,
        "tops": partial_2TN[0],
        "sums": partial_2TN[1],
        "ids": id_TN,
        "vocabulary": vocabulary,
        "tiles": count,
        "row_stride": logits_TV.stride(0),
    }
    results = {"logprob": out.logprob_T, "logsumexp": out.logsumexp_T, "argmax": out.argmax_T, "target": target_T}
    merge = shared | results | {"TILES": triton.next_power_of_2(count)}
    return [
        Launch(_sum_tiles, (tokens, count), shared | {"TILE": TILE}, num_warps=8),
        Launch(_merge_tiles, (tokens,), merge, num_warps=1),
    ]


def tiles(vocabulary: int) -> int:
    return -(-vocabulary // TILE)


def token_logprobs(logits_TV: torch.Tensor, target_T: torch.Tensor) -> TokenLogprobs:
    """logprob.token_logprobs."""
    logits_TV, target_T = unit_stride(logits_TV), unit_stride(target_T)
    tokens, device = logits_TV.shape[0], logits_TV.device
    count = tiles(logits_TV.shape[1])
    partial_2TN = torch.empty(2, tokens, count, dtype=torch.float32, device=device)
    id_TN = torch.empty(tokens, count, dtype=torch.int32, device=device)
    logprob_T, logsumexp_T = (torch.empty(tokens, dtype=torch.float32, device=device) for _ in range(2))
    out = TokenLogprobs(logprob_T, logsumexp_T, torch.empty(tokens, dtype=torch.int64, device=device))
    run(plan_token_logprobs(logits_TV, target_T, partial_2TN, id_TN, out, target_of(device)))
    return out


@triton.jit(do_not_specialize=["plane"])  # one build for all batches
def _diverge_tiles(p, q, parts, vocabulary, tiles, plane, p_row, q_row, TILE: tl.constexpr):
    """Five planes for each tile: p's largest logit and sum, Σ exp(p − largest)·(p − q), q's largest and sum."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocabulary
    a = tl.load(p + row * p_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    b = tl.load(q + row * q_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    a_top, b_top = tl.max(a, axis=0), tl.max(b, axis=0)
    weight = tl.exp(a - _finite_or_zero(a_top))
    out = parts + row * tiles + tile
    tl.store(out, a_top)
    tl.store(out + plane, tl.sum(weight, axis=0))
    tl.store(out + 2 * plane, tl.sum(tl.where(a == float("-inf"), 0.0, weight * (a - b)), axis=0))
    tl.store(out + 3 * plane, b_top)
    tl.store(out + 4 * plane, tl.sum(tl.exp(b - _finite_or_zero(b_top)), axis=0))


@triton.jit(do_not_specialize=["plane"])
def _merge_divergence(parts, out, tiles, plane, TILES: tl.constexpr):
    """KL = Σ softmax(p)·(p − q) + logsumexp(q) − logsumexp(p)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    source = parts + row * tiles + tile
    a_part = tl.load(source, mask=inside, other=float("-inf"))
    b_part = tl.load(source + 3 * plane, mask=inside, other=float("-inf"))
    a_top, b_top = tl.max(a_part, axis=0), tl.max(b_part, axis=0)
    a_weight, b_weight = tl.exp(a_part - _finite_or_zero(a_top)), tl.exp(b_part - _finite_or_zero(b_top))
    a_sum = tl.sum(tl.load(source + plane, mask=inside, other=0.0) * a_weight, axis=0)
    cross = tl.sum(tl.load(source + 2 * plane, mask=inside, other=0.0) * a_weight, axis=0)
    b_sum = tl.sum(tl.load(source + 4 * plane, mask=inside, other=0.0) * b_weight, axis=0)
    tl.store(out + row, cross / a_sum + ((b_top - a_top) + (tl.log(b_sum) - tl.log(a_sum))))


def plan_kl_divergence(
    p_TV: torch.Tensor, q_TV: torch.Tensor, parts_5TN: torch.Tensor, out_T: torch.Tensor, target: Target
) -> list[Launch]:
    """parts_5TN (float32) is scratch of `tiles(V)` columns; the logits' last stride is 1."""
    tokens, vocabulary = p_TV.shape
    count = tiles(vocabulary)
    shared = {"parts": parts_5TN, "tiles": count, "plane": tokens * count}
    sizes = {"vocabulary": vocabulary, "p_row": p_TV.stride(0), "q_row": q_TV.stride(0), "TILE": TILE}
    return [
        Launch(_diverge_tiles, (tokens, count), {"p": p_TV, "q": q_TV} | shared | sizes, num_warps=8),
        Launch(
            _merge_divergence, (tokens,), shared | {"out": out_T, "TILES": triton.next_power_of_2(count)}, num_warps=1
        ),
    ]


def kl_divergence(p_TV: torch.Tensor, q_TV: torch.Tensor) -> torch.Tensor:
    """logprob.kl_divergence; the terms cancel to about 1e-6 of the largest |p − q|, so tiny divergences are noise."""
    p_TV, q_TV = unit_stride(p_TV), unit_stride(q_TV)
    tokens, device = p_TV.shape[0], p_TV.device
    parts_5TN = torch.empty(5, tokens, tiles(p_TV.shape[1]), dtype=torch.float32, device=device)
    out_T = torch.empty(tokens, dtype=torch.float32, device=device)
    run(plan_kl_divergence(p_TV, q_TV, parts_5TN, out_T, target_of(device)))
    return out_T
