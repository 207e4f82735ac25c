"""One request: what is asked, how far it is computed, and what came of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compress.errors import UserError
from compress.runtime.text import TextStream

FinishReason = Literal["stop", "length", "abort"]
BIAS_LIMIT = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """Penalties and biases change the distribution before temperature; logprobs are of the model's own."""

    max_tokens: int = 64  # 0 with prompt_logprobs: score the prompt, generate nothing
    temperature: float = 0.0  # 0 picks the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens; None or 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens up to this much probability
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest
    repetition_penalty: float = 1.0  # divides the positive logits of tokens of prompt and output, multiplies negative
    presence_penalty: float = 0.0  # taken from the logits of tokens of the output
    frequency_penalty: float = 0.0  # taken from them as often as they occur
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # strings that end the text
    include_stop: bool = False  # whether the text has the string that ended it
    skip_special_tokens: bool = True  # special tokens are no text
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # nothing stops the request before it has so many
    logprobs: int | None = None  # log-probability of each token, and of so many of the likeliest beside it
    prompt_logprobs: int | None = None  # the same for the prompt
    cache_salt: str = ""  # requests share the cache of equal prompts only under equal salts

    def check(self, vocab: int) -> None:
        """Raises UserError naming the field and its limit."""
        self._check_kinds()
        least = 0 if self.prompt_logprobs is not None else 1
        scoring = "" if least == 0 else " (0 needs prompt_logprobs)"
        _check(
            _is_int(self.max_tokens) and self.max_tokens >= least,
            self,
            "max_tokens",
            f"an integer of at least {least}{scoring}",
        )
        _check(_is_number(self.temperature) and self.temperature >= 0, self, "temperature", "a number of at least 0")
        _check(
            self.top_k is None or (_is_int(self.top_k) and self.top_k >= 0),
            self,
            "top_k",
            "an integer of at least 0 (0 keeps all)",
        )
        _check(_is_number(self.top_p) and 0 < self.top_p <= 1, self, "top_p", "above 0 and at most 1")
        _check(_is_number(self.min_p) and 0 <= self.min_p <= 1, self, "min_p", "between 0 and 1")
        _check(
            # a much smaller divisor makes infinite logits, and then no distribution
            _is_number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 10,
            self,
            "repetition_penalty",
            "between 0.01 and 10",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value) and -2 <= value <= 2, self, name, "between -2 and 2")
        _check(_is_int(self.seed) and abs(self.seed) < 2**63, self, "seed", "an integer of 64 bits")
        _check(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            self,
            "min_tokens",
            f"between 0 and max_tokens, {self.max_tokens}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            limit = f"between 0 and {vocab}, the vocabulary"
            _check(value is None or (_is_int(value) and 0 <= value <= vocab), self, name, limit)
        for text in self.stop:
            _check(isinstance(text, str) and bool(text), self, "stop", "strings of at least 1 character")
        for token in self.stop_token_ids:
            if not _is_int(token) or not 0 <= token < vocab:
                raise UserError(f"stop_token_ids must be between 0 and {vocab - 1}, not {token!r}")
        self._check_bias(vocab)

    def _check_kinds(self) -> None:
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            _check(isinstance(getattr(self, name), bool), self, name, "True or False")
        for name, kind in (("stop", "strings"), ("stop_token_ids", "token ids")):
            _check(isinstance(getattr(self, name), (tuple, list)), self, name, f"a tuple of {kind}")
        _check(isinstance(self.logit_bias, Mapping), self, "logit_bias", "a mapping of token ids to numbers")
        _check(isinstance(self.cache_salt, str), self, "cache_salt", "a string")

    def _check_bias(self, vocab: int) -> None:
        for token, bias in self.logit_bias.items():
            if not _is_int(token) or not 0 <= token < vocab:
                raise UserError(f"logit_bias: token ids must be between 0 and {vocab - 1}, not {token!r}")
            if not _is_number(bias) or abs(bias) > BIAS_LIMIT:
                raise UserError(f"logit_bias of token {token} must be between -100 and 100, not {bias!r}")


def _check(holds: bool, params: SamplingParams, name: str, limit: str) -> None:
    if not holds:
        raise UserError(f"{name} must be {limit}, not {getattr(params, name)!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms under the model's own distribution, before temperature and filters."""

    chosen: float
    top: dict[int, float]  # the likeliest tokens, likeliest first


@dataclass(frozen=True)
class Drafts:
    """Tokens that may come next, for the model to verify.

    `distributions` are those they were drawn from, as the proposer gave them; None where they were not drawn.
    """

    tokens: tuple[int, ...]
    distributions: Any = None


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
    pages: list[int] = field(default_factory=list)  # of every token up to the last that is planned; the first
    dropped: int = 0  # `dropped` of them are behind every window: given back, the entries mean nothing
    hashes: list[bytes] = field(default_factory=list)  # of full pages, as far as they were needed
    siblings: tuple[Request, ...] = ()  # other samples of the same prompt
    drafts: Drafts | None = None  # None: not asked for yet
    status: Literal["waiting", "running", "finished"] = "waiting"
    finish_reason: FinishReason | None = None
    passed: int = 0  # later requests that were let in while this one did not fit
    cached_tokens: int | None = None  # of the prompt, found in the cache when it was first admitted
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # None for the first token
    text: TextStream | None = None  # of what was generated; None where the checkpoint has no tokenizer

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.drafts.tokens if self.drafts else ()

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended it; None where that was an EOS or something else."""
        if self.finish_reason != "stop":
            return None
        if self.text is not None and self.text.stopped_by is not None:
            return self.text.stopped_by
        return self.token_ids[-1] if self.token_ids[-1] in self.params.stop_token_ids else None

    @property
    def scored(self) -> bool:
        """Whether no log-probability of the prompt is missing."""
        return self.params.prompt_logprobs is None or len(self.prompt_logprobs) >= self.prompt_length

    def append(self, token: int) -> None:
        """Take the next token; the request finishes where that is the last."""
        self.token_ids.append(token)
        count = len(self.token_ids) - self.prompt_length
        if token in self.stop_ids and count >= self.params.min_tokens:
            self.finish_reason = "stop"
            if self.text is not None:
                self.text.end(token, show=self.params.include_stop and token in self.params.stop_token_ids)
        elif self.text is not None and self.text.append(token):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"


def request_key(prompt_ids: list[int], sample: int) -> bytes:
    """Equal prompts draw alike, whatever company they keep; `sample` tells apart several answers to one prompt."""
    digest = hashlib.blake2b(f"{sample}:".encode(), digest_size=16)
    digest.update(",".join(map(str, prompt_ids)).encode())
    return digest.digest()
