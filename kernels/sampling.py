"""Choosing tokens: what is computed, in torch, without a word to the host in between.

A row of logits becomes weights exp((logit − largest) / temperature), of which top-k, top-p and min-p keep some; a
number u in [0, 1) then points into what is kept. No row sees another: softmax and cumulative sums go row by row.

Shapes: N rows, n some of them, V vocabulary, k candidates of a row, the likeliest first, b blocks, c columns of one.
Under verification: N requests, K draft tokens of all of them, R rows, 1 + k for k draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

BLOCK = 64  # columns that are summed together before a point of the cumulative distribution is looked for
NUCLEUS = 1024  # so many of the likeliest tokens nearly always hold the nucleus; to sort all takes ten times as long


@dataclass(frozen=True)
class Rules:
    """What may be drawn in each row: an entry for each.

    top_k keeps the k likeliest. top_p then keeps the fewest of those whose share reaches p (arXiv 1904.09751). min_p
    keeps what is at least min_p times as likely as the likeliest (arXiv 2407.01082). The likeliest always stays; among
    equals the lower id comes first. A NaN is −∞; where the largest logit is infinite, those that equal it share.
    """

    temperature: Sequence[float]  # 0: the likeliest token alone
    top_k: Sequence[int]  # at least 1; the vocabulary or more keeps all
    top_p: Sequence[float]  # 1 keeps all
    min_p: Sequence[float]  # 0 keeps all

    def some(self, rows: Sequence[int]) -> Rules:
        return Rules(
            [self.temperature[row] for row in rows],
            [self.top_k[row] for row in rows],
            [self.top_p[row] for row in rows],
            [self.min_p[row] for row in rows],
        )


@dataclass(frozen=True)
class TopLogprobs:
    """float32 log softmax of a token [N], and of the likeliest [N, k] with their ids, the likeliest first."""

    chosen_N: torch.Tensor
    ids_Nk: torch.Tensor
    values_Nk: torch.Tensor


def sample_tokens(logits_NV: torch.Tensor, rules: Rules, uniforms: Sequence[float]) -> torch.Tensor:
    """One token [N] for each row of float32 logits."""
    greedy, drawn = _split(rules)
    if not drawn:
        return _likeliest(logits_NV)
    weights_nV = _kept(select_rows(logits_NV, drawn), rules.some(drawn))
    picked_n = pick_tokens(weights_nV, [uniforms[row] for row in drawn])
    if not greedy:
        return picked_n
    found_N = torch.cat((_likeliest(select_rows(logits_NV, greedy)), picked_n))
    return torch.empty_like(found_N).scatter(0, torch.tensor([*greedy, *drawn], device=logits_NV.device), found_N)


def token_distributions(logits_NV: torch.Tensor, rules: Rules) -> torch.Tensor:
    """The float32 probabilities [N, V] that `sample_tokens` draws from; where it is greedy, 1 for the likeliest."""
    greedy, drawn = _split(rules)
    probs_NV = torch.zeros_like(logits_NV, dtype=torch.float32)
    if greedy:
        rows_n1 = torch.tensor(greedy, device=logits_NV.device)[:, None]
        probs_NV[rows_n1, _likeliest(select_rows(logits_NV, greedy))[:, None]] = 1.0
    if drawn:
        weights_nV = _kept(select_rows(logits_NV, drawn), rules.some(drawn))
        total_n1 = block_sums(weights_nV).cumsum(-1)[:, -1:]
        probs_NV[torch.tensor(drawn, device=logits_NV.device)] = weights_nV / total_n1.float()
    return probs_NV


def pick_tokens(probs_NV: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """The token [N] of each row at which the cumulative probability passes u; rows need not sum to 1."""
    return _pick(probs_NV, torch.tensor(uniforms, dtype=torch.float64, device=probs_NV.device))


def verify_drafts(
    target_RV: torch.Tensor,
    drafts: Sequence[torch.Tensor],
    tokens_K: Sequence[int],
    chances_K: Sequence[float],
    uniforms_R: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Modified rejection sampling (arXiv 2211.17192, algorithm 1): how many draft tokens stand [N], the next one [N].

    A request has the probabilities q [k, V] from which its k ≥ 1 draft tokens were drawn, each after the ones before
    it, and k + 1 rows p of `target_RV`, in order. Token x is accepted with probability min(1, p(x) / q(x)); `chances_K`
    decide. At the first rejection the next token is drawn from norm(max(p − q, 0)), after k acceptances from the last
    row of p; the number of that row among `uniforms_R` decides.
    """
    device, lengths = target_RV.device, [len(draft_kV) for draft_kV in drafts]
    starts = list(accumulate(lengths, initial=0))[:-1]  # among K; among R, one more for each request before
    owner_K = torch.tensor([n for n, k in enumerate(lengths) for _ in range(k)], device=device)
    place_K = torch.tensor([i for k in lengths for i in range(k)], device=device)
    lengths_N, starts_N = torch.tensor(lengths, device=device), torch.tensor(starts, device=device)
    tokens_K1 = torch.tensor(tokens_K, dtype=torch.long, device=device)[:, None]
    draft_KV = torch.cat(list(drafts))
    rows_K = torch.arange(len(owner_K), device=device) + owner_K
    p_K = target_RV[rows_K[:, None], tokens_K1][:, 0].double()
    q_K = draft_KV.gather(1, tokens_K1)[:, 0].double()
    stands_K = torch.tensor(chances_K, dtype=torch.float64, device=device) * q_K < p_K
    ends_K = torch.where(stands_K, lengths_N[owner_K], place_K)
    accepted_N = lengths_N.scatter_reduce(0, owner_K, ends_K, "amin")
    last_N = starts_N + torch.arange(len(lengths), device=device) + accepted_N
    rest_NV = residual(target_RV[last_N], draft_KV[starts_N + torch.minimum(accepted_N, lengths_N - 1)])
    rest_NV = torch.where((accepted_N < lengths_N)[:, None], rest_NV, target_RV[last_N].double())
    return accepted_N, _pick(rest_NV, torch.tensor(uniforms_R, dtype=torch.float64, device=device)[last_N])


def residual(target_NV: torch.Tensor, draft_NV: torch.Tensor) -> torch.Tensor:
    """What a rejected token is replaced from: max(p − q, 0) in float64, not scaled; p where nothing is left.

    Nothing is left only where p = q, and then a rejection is itself a rounding error.
    """
    rest_NV = (target_NV.double() - draft_NV.double()).clamp_(min=0)
    return torch.where(rest_NV.any(-1, keepdim=True), rest_NV, target_NV.double())


def top_logprobs(logits_NV: torch.Tensor, tokens: Sequence[int], count: int) -> TopLogprobs:
    """Of a token of each row and of its `count` likeliest; among equals the lower id comes first."""
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    ids_Nk = _order_keys(logits_NV.float()).topk(count).indices
    tokens_N1 = torch.tensor(tokens, dtype=torch.long, device=logits_NV.device)[:, None]
    return TopLogprobs(logprobs_NV.gather(1, tokens_N1)[:, 0], ids_Nk, logprobs_NV.gather(1, ids_Nk))


def inverse_temperatures(rules: Rules) -> list[float]:
    """What shifted logits are multiplied by, in float32's range: a tiny temperature gives no infinity."""
    limits = torch.finfo(torch.float32)
    return [1 / min(max(temperature, limits.tiny), limits.max) for temperature in rules.temperature]


def select_rows(values_NV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows, in order; all of them without a copy."""
    if len(rows) == len(values_NV):
        return values_NV
    return values_NV[torch.tensor(rows, dtype=torch.long, device=values_NV.device)]


def block_sums(probs_NV: torch.Tensor) -> torch.Tensor:
    """Sums [N, b] of 64 columns each, the last of what is left.

    float64: a float32 sum over 100,000 tokens is off by more than many of them weigh. Each sum is over one short run
    of memory, so that its order, and its bits, do not depend on the number of rows.
    """
    whole = probs_NV.shape[1] // BLOCK * BLOCK
    sums_Nb = probs_NV[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)
    if whole == probs_NV.shape[1]:
        return sums_Nb
    return torch.cat((sums_Nb, probs_NV[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), dim=1)


def _split(rules: Rules) -> tuple[list[int], list[int]]:
    """Greedy rows, and the others."""
    greedy = [row for row, temperature in enumerate(rules.temperature) if temperature == 0]
    return greedy, [row for row, temperature in enumerate(rules.temperature) if temperature > 0]


def _likeliest(logits_NV: torch.Tensor) -> torch.Tensor:
    """The first of the largest [N]; any where there is a NaN."""
    return logits_NV.max(-1).indices  # argmax takes three times as long


def _kept(logits_nV: torch.Tensor, rules: Rules) -> torch.Tensor:
    """float32 weights [n, V], at most 1, of what may be drawn; 0 for the rest."""
    vocab, device = logits_nV.shape[1], logits_nV.device
    scale_n1 = torch.tensor(inverse_temperatures(rules), dtype=torch.float32, device=device)[:, None]
    logits_nV = torch.nan_to_num(logits_nV, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    shifted_nV = (logits_nV - logits_nV.amax(-1, keepdim=True)).mul_(scale_n1)
    weights_nV = shifted_nV.nan_to_num_(nan=0.0, neginf=-torch.inf).exp_()
    limited = [row for row, k in enumerate(rules.top_k) if k < vocab]
    nuclei = [row for row, p in enumerate(rules.top_p) if p < 1 and rules.top_k[row] >= vocab]
    for rows in (limited, nuclei):
        if rows:
            some_nV = _narrowed(select_rows(weights_nV, rows), rules.some(rows))
            weights_nV = weights_nV.index_copy(0, torch.tensor(rows, device=device), some_nV)
    if any(rules.min_p):
        least_n1 = torch.tensor(rules.min_p, dtype=torch.float32, device=device)[:, None]
        weights_nV = torch.where(weights_nV >= least_n1, weights_nV, 0.0)
    return weights_nV


def _narrowed(weights_nV: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Top-k, then top-p, in rows that all have a top-k below the vocabulary, or all none."""
    vocab, device = weights_nV.shape[1], weights_nV.device
    counts_n1 = torch.tensor([min(k, vocab) for k in rules.top_k], device=device)[:, None]
    share_n1 = torch.tensor(rules.top_p, dtype=torch.float64, device=device)[:, None]
    whole_n1 = block_sums(weights_nV).cumsum(-1)[:, -1:] * share_n1
    ids_nk = _ranked(weights_nV, min(max(rules.top_k), vocab), whole_n1)
    sorted_nk = weights_nV.gather(1, ids_nk)
    cumulative_nk = sorted_nk.cumsum(-1, dtype=torch.float64)
    if max(rules.top_k) < vocab:
        whole_n1 = cumulative_nk.gather(1, counts_n1 - 1) * share_n1
    reach_n1 = torch.where(share_n1 < 1, whole_n1, torch.inf)
    inside_nk = torch.arange(ids_nk.shape[1], device=device) < counts_n1
    inside_nk &= cumulative_nk - sorted_nk.double() < reach_n1
    return torch.zeros_like(weights_nV).scatter(1, ids_nk, torch.where(inside_nk, sorted_nk, 0.0))


def _ranked(weights_nV: torch.Tensor, count: int, reach_n1: torch.Tensor) -> torch.Tensor:
    """Ids [n, k] of the likeliest, in order; all that `count` asks for, or enough of them to reach so much weight."""
    keys_nV = _order_keys(weights_nV)
    if count < keys_nV.shape[1]:
        return keys_nV.topk(count).indices
    if keys_nV.device.type == "cpu" and keys_nV.shape[1] > NUCLEUS:  # a look costs nothing where there is no queue
        ids_nk = keys_nV.topk(NUCLEUS).indices
        if bool((weights_nV.gather(1, ids_nk).cumsum(-1, dtype=torch.float64)[:, -1:] >= reach_n1).all()):
            return ids_nk
    return keys_nV.sort(descending=True).indices


def _order_keys(values_NV: torch.Tensor) -> torch.Tensor:
    """int64 numbers, all different, in the order of float32 values and then of falling ids; NaN counts as −∞."""
    # −0 becomes 0; then the bits of negative numbers run backwards
    bits_NV = (torch.nan_to_num(values_NV, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(torch.int32)
    bits_NV = torch.where(bits_NV < 0, bits_NV ^ 0x7FFFFFFF, bits_NV).long()
    vocab = values_NV.shape[1]
    return (bits_NV << 32) + torch.arange(vocab - 1, -1, -1, device=values_NV.device)


def _pick(probs_NV: torch.Tensor, u_N: torch.Tensor) -> torch.Tensor:
    """First the block of 64 columns, then the column in it: a cumulative sum over all takes ten times as long."""
    vocab = probs_NV.shape[1]
    cumulative_Nb = block_sums(probs_NV).cumsum(-1)
    point_N1 = u_N[:, None] * cumulative_Nb[:, -1:]
    block_N1 = torch.searchsorted(cumulative_Nb, point_N1, right=True)
    before_N1 = torch.where(block_N1 > 0, cumulative_Nb.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    columns_Nc = block_N1 * BLOCK + torch.arange(BLOCK, device=probs_NV.device)
    inside_Nc = probs_NV.gather(1, columns_Nc.clamp(max=vocab - 1))
    inside_Nc = torch.where(columns_Nc < vocab, inside_Nc, 0.0).cumsum(-1, dtype=torch.float64)
    # the two sums of a block may differ by a rounding: the point stays below the end
    end_N1 = torch.nextafter(inside_Nc[:, -1:], torch.zeros_like(point_N1))
    within_N1 = torch.searchsorted(inside_Nc, torch.minimum(point_N1 - before_N1, end_N1), right=True)
    return (block_N1 * BLOCK + within_N1)[:, 0]
