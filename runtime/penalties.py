"""What changes a model's logits before temperature: penalties for repetition, biases, and bans.

Shapes: N rows, V vocabulary, E entries (row, token) that some rule names, e of one row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from compress.runtime.request import Request, SamplingParams

BAN = -100.0  # a bias of this or less makes a token impossible


@dataclass(frozen=True)
class Draw:
    """One token to choose: by what rules, after which tokens, and as which draw."""

    params: SamplingParams
    key: bytes
    position: int  # of the token to come
    tokens: Sequence[int] = ()  # the request's, prompt first; not copied
    drafted: Sequence[int] = ()  # draft tokens between those and the one to come
    prompt_length: int = 0
    stop_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, request: Request, drafted: Sequence[int] = ()) -> Draw:
        """The token of a request that follows its known ones and `drafted`."""
        known = request.token_ids
        position = len(known) + len(drafted)
        return cls(request.params, request.key, position, known, drafted, request.prompt_length, request.stop_ids)

    @property
    def output(self) -> list[int]:
        return [*self.tokens[self.prompt_length :], *self.drafted]

    def uniform(self, stream: int = 0) -> float:
        """A number in [0, 1) with 48 bits: a hash, so that nothing else can move it.

        Streams: 0 chooses a token of the model, 1 one of a draft model, 2 decides whether a draft token is accepted.
        """
        text = f"{self.params.seed},{self.position},{stream}".encode()
        return int.from_bytes(hashlib.blake2b(text, key=self.key, digest_size=6).digest(), "big") / 2**48


def adjust(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Logits after repetition, frequency and presence penalties, then biases, then bans; a row each for `draws`.

    A repetition penalty (prompt and output) divides positive logits and multiplies others (arXiv 1909.05858, as
    Hugging Face does it); frequency and presence penalties (output alone) are subtracted, the first as often as the
    token occurs. A bias of −100 or less bans its token, and so does `min_tokens` all that would end the request. A ban
    that would leave no token is not applied: first biases, then `min_tokens`.

    The same tensor where no row asks for anything; otherwise a copy in which only entries that a rule names differ.
    """
    repetitions, outputs, biases = _repetitions(draws), _outputs(draws), _biases(draws)
    bans = [_biased_bans(draws), _early_stops(draws)]
    if not any((repetitions, outputs, biases, *bans)):
        return logits_NV
    adjusted_NV = logits_NV.clone()
    vocab = logits_NV.shape[1]
    if repetitions:
        rows_E, tokens_E, factors_E = _entries(repetitions, vocab, logits_NV.device)
        old_E = adjusted_NV[rows_E, tokens_E]
        adjusted_NV[rows_E, tokens_E] = torch.where(old_E > 0, old_E / factors_E, old_E * factors_E)
    for additions in (outputs, biases):
        if additions:
            rows_E, tokens_E, amounts_E = _entries(additions, vocab, logits_NV.device)
            adjusted_NV[rows_E, tokens_E] += amounts_E
    for banned in bans:
        if banned:
            _ban(adjusted_NV, *_entries(banned, vocab, logits_NV.device))
    return adjusted_NV


def _ban(logits_NV: torch.Tensor, rows_E: torch.Tensor, tokens_E: torch.Tensor, ban_E: torch.Tensor) -> None:
    """Write `ban_E`, −∞, over the entries, in place; not in rows that would have nothing left."""
    before_E = logits_NV[rows_E, tokens_E]
    logits_NV[rows_E, tokens_E] = ban_E
    alive_N = logits_NV.amax(-1) > -math.inf
    logits_NV[rows_E, tokens_E] = torch.where(alive_N[rows_E], ban_E, before_E)


# A row of the batch, tokens [e] of it and a number for each. A token may occur twice only where the numbers are equal
# and are not added. Arrays: a history of thousands of tokens is too long for Python loops in every step.
_Rule = tuple[int, np.ndarray, np.ndarray]


def _rule(row: int, tokens: Iterable[int], number: float) -> _Rule:
    tokens_e = np.fromiter(tokens, dtype=np.int64)
    return row, tokens_e, np.full(len(tokens_e), number, dtype=np.float32)


def _repetitions(draws: Sequence[Draw]) -> list[_Rule]:
    return [
        _rule(row, chain(draw.tokens, draw.drafted), draw.params.repetition_penalty)
        for row, draw in enumerate(draws)
        if draw.params.repetition_penalty != 1
    ]


def _outputs(draws: Sequence[Draw]) -> list[_Rule]:
    rules: list[_Rule] = []
    for row, draw in enumerate(draws):
        frequency, presence = draw.params.frequency_penalty, draw.params.presence_penalty
        if (frequency or presence) and (output := draw.output):
            tokens_e, counts_e = np.unique(np.array(output, dtype=np.int64), return_counts=True)
            rules.append((row, tokens_e, -(counts_e * frequency + presence).astype(np.float32)))
    return rules


def _biases(draws: Sequence[Draw]) -> list[_Rule]:
    rules: list[_Rule] = []
    for row, draw in enumerate(draws):
        biases = {token: bias for token, bias in draw.params.logit_bias.items() if bias > BAN}
        if biases:
            rules.append((row, np.array([*biases], dtype=np.int64), np.array([*biases.values()], dtype=np.float32)))
    return rules


def _biased_bans(draws: Sequence[Draw]) -> list[_Rule]:
    return [
        _rule(row, banned, -math.inf)
        for row, draw in enumerate(draws)
        if (banned := [token for token, bias in draw.params.logit_bias.items() if bias <= BAN])
    ]


def _early_stops(draws: Sequence[Draw]) -> list[_Rule]:
    return [
        _rule(row, draw.stop_ids, -math.inf)
        for row, draw in enumerate(draws)
        if draw.stop_ids and draw.position - draw.prompt_length < draw.params.min_tokens
    ]


def _entries(
    rules: Sequence[_Rule], vocab: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, tokens and numbers as tensors [E]. Ids that the model lacks are left out: a draft model may have fewer."""
    rows_E = np.repeat([row for row, _, _ in rules], [len(tokens_e) for _, tokens_e, _ in rules])
    tokens_E = np.concatenate([tokens_e for _, tokens_e, _ in rules])
    numbers_E = np.concatenate([numbers_e for _, _, numbers_e in rules])
    known_E = tokens_E < vocab
    found = (rows_E[known_E], tokens_E[known_E], numbers_E[known_E])
    rows, tokens, numbers = (torch.from_numpy(array).to(device) for array in found)
    return rows, tokens, numbers
