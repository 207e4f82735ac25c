"""One request: what is asked, how far it is computed, and what came of it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal

from compress.errors import UserError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int = 64
    temperature: float = 0.0  # 0 picks the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens; None or 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens up to this much probability
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # log-probability of each token, and of so many of the likeliest beside it

    def check(self, vocab: int) -> None:
        """Raises UserError naming the field and its limit."""
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise UserError(f"max_tokens must be an integer of at least 1, not {self.max_tokens!r}")
        if not _is_number(self.temperature) or self.temperature < 0:
            raise UserError(f"temperature must be a number of at least 0, not {self.temperature!r}")
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 0):
            raise UserError(f"top_k must be an integer of at least 0 (0 keeps all), not {self.top_k!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be between 0 and 1, not {self.min_p!r}")
        if not _is_int(self.seed):
            raise UserError(f"seed must be an integer, not {self.seed!r}")
        if self.logprobs is not None and (not _is_int(self.logprobs) or not 0 <= self.logprobs <= vocab):
            raise UserError(f"logprobs must be between 0 and {vocab}, the vocabulary, not {self.logprobs!r}")
        for token in self.stop_token_ids:
            if not _is_int(token) or not 0 <= token < vocab:
                raise UserError(f"stop_token_ids must be between 0 and {vocab - 1}, not {token!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms under the model's own distribution, before temperature and filters."""

    chosen: float
    top: dict[int, float]  # the likeliest tokens, likeliest first


@dataclass(eq=False)
class Request:
    """Its tokens are the prompt, then what was generated; the first `num_computed` are in the cache.

    The last generated token is not in the cache until the next one is asked for. Preemption sets `num_computed` to 0
    and takes the pages; nothing else changes.
    """

    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    key: bytes  # with the seed and the position, decides every random draw
    stop_ids: frozenset[int]
    max_length: int  # tokens at which it ends for length
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    status: Literal["waiting", "running", "finished"] = "waiting"
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    def append(self, token: int) -> None:
        """Take the next token; the request finishes where that is the last."""
        self.token_ids.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"


def request_key(prompt_ids: list[int], sample: int) -> bytes:
    """Equal prompts draw alike, whatever company they keep; `sample` tells apart several answers to one prompt."""
    digest = hashlib.blake2b(f"{sample}:".encode(), digest_size=16)
    digest.update(",".join(map(str, prompt_ids)).encode())
    return digest.digest()
