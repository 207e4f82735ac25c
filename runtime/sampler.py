"""Choosing the next token.

Every random number is a hash of (seed, request key, position, stream), so a request draws the same whatever else is
running, in whatever order, and again after preemption. Nothing here sums a row by a reduction that torch may split, in
a way that depends on the other rows: softmax and cumulative sums go row by row.

Shapes: N rows (a request has one, or one for each draft token to verify and one more), n some of them, V vocabulary,
k candidates, b blocks, c columns of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from compress.runtime.penalties import Draw, adjust
from compress.runtime.request import SamplingParams, TokenLogprobs

# so many of the likeliest tokens nearly always hold the nucleus; the whole vocabulary seldom has to be sorted
NUCLEUS_TRIES = (128, 1024)
BLOCK = 64  # columns that are summed together before a point of the cumulative distribution is looked for

__all__ = [
    "Draw",
    "adjust",
    "choose",
    "distribution",
    "distributions",
    "logprobs",
    "logprobs_of",
    "pick",
    "pick_rows",
    "sample",
    "select_rows",
    "uniform",
]


def sample(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of the model's float32 logits, under the rules of its request."""
    return choose(adjust(logits_NV, draws), draws)


def choose(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of logits that penalties and biases have already changed."""
    greedy = [row for row, draw in enumerate(draws) if draw.params.temperature == 0]
    tokens = [0] * len(draws)
    if greedy:
        for row, token in zip(greedy, _likeliest(logits_NV, greedy).tolist(), strict=True):
            tokens[row] = token
    for rows, ids_nk, probs_nk in _candidates(logits_NV, draws):
        numbers = [draws[row].uniform() for row in rows]
        picked_n1 = _pick(probs_nk, torch.tensor(numbers, dtype=torch.float64, device=probs_nk.device))
        picked_n1 = picked_n1 if ids_nk is None else ids_nk.gather(1, picked_n1)
        for row, token in zip(rows, picked_n1[:, 0].tolist(), strict=True):
            tokens[row] = token
    return tokens


def distributions(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The float32 probabilities [N, V] that `choose` draws from: temperature, then top-k, top-p and min-p.

    Greedy puts everything on the likeliest token, so that speculation treats it like any other distribution.
    """
    probs_NV = torch.zeros_like(logits_NV, dtype=torch.float32)
    greedy = [row for row, draw in enumerate(draws) if draw.params.temperature == 0]
    if greedy:
        index = torch.tensor(greedy, device=logits_NV.device)
        probs_NV[index, _likeliest(logits_NV, greedy)] = 1.0
    for rows, ids_nk, probs_nk in _candidates(logits_NV, draws):
        _spread(probs_NV, rows, ids_nk, probs_nk)
    return probs_NV


def distribution(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """`distributions` of one row of logits."""
    return distributions(logits_V[None], [Draw(params, b"", 0)])[0]


def filter_probabilities(probs_V: torch.Tensor, top_k: int | None, top_p: float, min_p: float) -> torch.Tensor:
    """Zero what the filters drop, and scale the rest to sum to 1.

    top_k keeps the k likeliest. top_p then keeps the fewest of those whose share reaches p (arXiv 1904.09751). min_p
    keeps what is at least min_p times as likely as the likeliest (arXiv 2407.01082). The likeliest always stays.
    """
    filtered_1V = torch.zeros_like(probs_V[None])
    for rows, ids_1k, probs_1k in _filter(probs_V[None], top_k, top_p, min_p):
        _spread(filtered_1V, rows, ids_1k, probs_1k)
    return filtered_1V[0]


def pick(probs_V: torch.Tensor, u: float) -> int:
    """The token at which the cumulative probability passes u ∈ [0, 1); the probabilities need not sum to 1."""
    return pick_rows(probs_V[None], [u])[0]


def pick_rows(probs_NV: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """`pick` for each row."""
    return _pick(probs_NV, torch.tensor(uniforms, dtype=torch.float64, device=probs_NV.device))[:, 0].tolist()


def uniform(seed: int, key: bytes, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 48 bits; `stream` tells apart several draws for one position."""
    return Draw(SamplingParams(seed=seed), key, position).uniform(stream)


def logprobs_of(logits_V: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probability of `token` and of the `count` likeliest, under the model's own distribution."""
    return logprobs(logits_V[None], [token], [count])[0]


def logprobs(logits_NV: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """`logprobs_of` for many rows: sampled tokens, or a prompt's next ones. −inf where a token is impossible."""
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    chosen = logprobs_NV.gather(1, torch.tensor(tokens, dtype=torch.long, device=logits_NV.device)[:, None])[
        :, 0
    ].tolist()
    found: list[TokenLogprobs | None] = [None] * len(tokens)
    for count in set(counts):
        rows = [row for row, wanted in enumerate(counts) if wanted == count]
        values_nk, ids_nk = torch.topk(select_rows(logprobs_NV, rows), count)
        for row, ids, values in zip(rows, ids_nk.tolist(), values_nk.tolist(), strict=True):
            found[row] = TokenLogprobs(_number(chosen[row]), dict(zip(ids, map(_number, values), strict=True)))
    return [one for one in found if one is not None]


def _number(logprob: float) -> float:
    """A model whose logits overflow has no probabilities; nobody may be sent NaN."""
    return -math.inf if math.isnan(logprob) else logprob


def select_rows(values_NV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows, in order; all of them without a copy."""
    if len(rows) == len(values_NV):
        return values_NV
    return values_NV[torch.tensor(rows, dtype=torch.long, device=values_NV.device)]


def _likeliest(logits_NV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The likeliest token [n] of some rows, the first of several."""
    return select_rows(logits_NV, rows).max(-1).indices  # argmax takes three times as long


# Rows, then ids [n, k] and probabilities [n, k] of the tokens that may be chosen in them, zero for what is dropped
# after all. No ids where the candidates are the vocabulary. Ids ascend, so that a cumulative sum over the candidates
# has the bits of one over the vocabulary.
_Candidates = tuple[list[int], torch.Tensor | None, torch.Tensor]


def _candidates(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> Iterator[_Candidates]:
    """What may be drawn in the rows with a temperature; rows with the same filters are worked on together."""
    groups: dict[tuple[int | None, float, float], list[int]] = {}
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            groups.setdefault((draw.params.top_k, draw.params.top_p, draw.params.min_p), []).append(row)
    # Shifted first, and the temperature held above float32's zero: a tiny one must give neither infinity nor 0 / 0.
    limits = torch.finfo(torch.float32)
    for (top_k, top_p, min_p), rows in groups.items():
        held = [min(max(draws[row].params.temperature, limits.tiny), limits.max) for row in rows]
        logits_nV = select_rows(logits_NV, rows)
        shifted_nV = logits_nV - logits_nV.amax(-1, keepdim=True)
        shifted_nV /= torch.tensor(held, dtype=torch.float32, device=logits_NV.device)[:, None]
        for some, ids_nk, probs_nk in _filter(torch.softmax(shifted_nV, dim=-1), top_k, top_p, min_p):
            yield [rows[i] for i in some], ids_nk, probs_nk


def _filter(probs_nV: torch.Tensor, top_k: int | None, top_p: float, min_p: float) -> Iterator[_Candidates]:
    """Apply top-k, top-p and min-p, in this order; see `filter_probabilities`."""
    vocab = probs_nV.shape[-1]
    limit = min(top_k or vocab, vocab)
    everyone = list(range(len(probs_nV)))
    if limit == vocab and top_p == 1:
        if min_p > 0:
            probs_nV = torch.where(probs_nV >= min_p * probs_nV.amax(-1, keepdim=True), probs_nV, 0.0)
        yield everyone, None, probs_nV
        return
    found = [(everyone, *torch.topk(probs_nV, limit))] if limit < vocab else _nuclei(probs_nV, top_p)
    for rows, sorted_nk, ids_nk in found:
        if top_p < 1:
            cumulative_nk = sorted_nk.cumsum(-1, dtype=torch.float64)
            reach_n1 = top_p * (cumulative_nk[:, -1:] if limit < vocab else torch.ones_like(cumulative_nk[:, -1:]))
            sorted_nk = torch.where(cumulative_nk - sorted_nk.double() < reach_n1, sorted_nk, 0.0)
        if min_p > 0:
            sorted_nk = torch.where(sorted_nk >= min_p * sorted_nk[:, :1], sorted_nk, 0.0)
        ids_nk, order_nk = ids_nk.sort(-1)
        yield rows, ids_nk, sorted_nk.gather(1, order_nk)


def _nuclei(probs_nV: torch.Tensor, top_p: float) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Rows, and enough of their likeliest tokens to hold the nucleus of each.

    How many are sorted depends on the row alone: among equal probabilities, that decides which of them is in.
    """
    rows = list(range(len(probs_nV)))
    for count in NUCLEUS_TRIES:
        if count >= probs_nV.shape[-1] or not rows:
            continue
        sorted_nk, ids_nk = torch.topk(select_rows(probs_nV, rows), count)
        enough = (sorted_nk.cumsum(-1, dtype=torch.float64)[:, -1] >= top_p).tolist()
        held = [i for i, holds in enumerate(enough) if holds]
        if held:
            yield [rows[i] for i in held], select_rows(sorted_nk, held), select_rows(ids_nk, held)
        rows = [row for row, holds in zip(rows, enough, strict=True) if not holds]
    if rows:
        sorted_nV, ids_nV = torch.sort(select_rows(probs_nV, rows), dim=-1, descending=True)
        yield rows, sorted_nV, ids_nV


def _spread(out_NV: torch.Tensor, rows: list[int], ids_nk: torch.Tensor | None, probs_nk: torch.Tensor) -> None:
    """Write candidates into some rows of `out`, which are zero, scaled to sum to 1."""
    probs_nk = probs_nk / _block_sums(probs_nk).cumsum(-1)[:, -1:].to(probs_nk.dtype)
    index_n1 = torch.tensor(rows, device=out_NV.device)[:, None]
    if ids_nk is None:
        out_NV[index_n1[:, 0]] = probs_nk
    else:
        out_NV[index_n1, ids_nk] = probs_nk


def _pick(probs_nk: torch.Tensor, u_n: torch.Tensor) -> torch.Tensor:
    """The column [n, 1] of each row at which the cumulative probability passes u of the whole.

    First the block of 64 columns, then the column in it: a cumulative sum over the vocabulary takes ten times as long.
    """
    sums_nb = _block_sums(probs_nk)
    cumulative_nb = sums_nb.cumsum(-1)
    point_n1 = u_n[:, None] * cumulative_nb[:, -1:]
    block_n1 = torch.searchsorted(cumulative_nb, point_n1, right=True)
    before_n1 = torch.where(block_n1 > 0, cumulative_nb.gather(1, (block_n1 - 1).clamp(min=0)), 0.0)
    columns_nc = block_n1 * BLOCK + torch.arange(BLOCK, device=probs_nk.device)
    inside_nc = probs_nk.gather(1, columns_nc.clamp(max=probs_nk.shape[1] - 1))
    inside_nc = torch.where(columns_nc < probs_nk.shape[1], inside_nc, 0.0).cumsum(-1, dtype=torch.float64)
    # the two sums of a block may differ by a rounding: the point stays below the end
    end_n1 = torch.nextafter(inside_nc[:, -1:], torch.zeros_like(point_n1))
    return block_n1 * BLOCK + torch.searchsorted(inside_nc, torch.minimum(point_n1 - before_n1, end_n1), right=True)


def _block_sums(probs_nk: torch.Tensor) -> torch.Tensor:
    """Sums [n, b] of 64 columns each, the last of what is left.

    float64: a float32 sum over 100,000 tokens is off by more than many of them weigh. Each sum is over one short run
    of memory, so that its order, and its bits, do not depend on the number of rows.
    """
    whole = probs_nk.shape[1] // BLOCK * BLOCK
    sums_nb = probs_nk[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)
    if whole == probs_nk.shape[1]:
        return sums_nb
    return torch.cat((sums_nb, probs_nk[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), dim=1)
