"""From a body's fields to SamplingParams: OpenAI's defaults, and the room that the context leaves."""

from __future__ import annotations

import math
import secrets
from typing import Any

from compress.errors import UserError
from compress.runtime.request import SamplingParams
from compress.runtime.server.options import Options
from compress.runtime.server.protocol import ChatBody, CompletionBody, Sampling

COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context


def answers(body: Sampling, options: Options) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= options.max_n:
        raise UserError(f"n must be between 1 and {options.max_n}, not {n}")
    return n


def completion_params(body: CompletionBody, prompt_length: int, options: Options) -> SamplingParams:
    """Raises UserError naming the field and its limit."""
    prompt_logprobs = body.prompt_logprobs
    if body.echo:
        scored = [count for count in (prompt_logprobs, body.logprobs) if count is not None]
        prompt_logprobs = max(scored) if scored else 0 if body.max_tokens == 0 else None
    asked = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if asked == 0 and prompt_logprobs is None:
        raise UserError("max_tokens must be at least 1, not 0 (0 needs echo or prompt_logprobs)")
    explicit = body.max_tokens is not None
    max_tokens = _room("prompt has", prompt_length, asked, explicit, "max_tokens", options.max_model_len)
    _check_logprobs("logprobs", body.logprobs, options)
    return _params(body, max_tokens, body.logprobs, prompt_logprobs, options)


def chat_params(body: ChatBody, prompt_length: int, options: Options) -> SamplingParams:
    """Raises UserError naming the field and its limit."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(body, name)
    rest = options.max_model_len - prompt_length
    if asked == 0 and body.prompt_logprobs is None:
        raise UserError(f"{name} must be at least 1, not 0 (0 needs prompt_logprobs)")
    wanted = max(1, rest) if asked is None else asked
    max_tokens = _room("messages have", prompt_length, wanted, True, name, options.max_model_len)
    _check_logprobs("top_logprobs", body.top_logprobs, options)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, max_tokens, logprobs, body.prompt_logprobs, options)


def _room(subject: str, prompt_length: int, asked: int, explicit: bool, name: str, limit: int) -> int:
    """Tokens that may be generated. What was asked for is granted or refused, never cut; a default is cut to fit."""
    least = 1 if asked > 0 else 0
    if prompt_length + least > limit:
        raise UserError(
            f"{subject} {prompt_length} tokens, and {name} is at least {least}; the limit of both is {limit} tokens"
        )
    if not explicit:
        return min(asked, limit - prompt_length)
    if asked < 0:
        raise UserError(f"{name} must be at least 1, not {asked}")
    if prompt_length + asked > limit:
        raise UserError(
            f"{name} {asked} and a prompt of {prompt_length} tokens make {prompt_length + asked}; "
            f"the limit of both is {limit} tokens"
        )
    return asked


def _check_logprobs(name: str, count: int | None, options: Options) -> None:
    if count is not None and not 0 <= count <= options.max_logprobs:
        raise UserError(f"{name} must be between 0 and {options.max_logprobs}, not {count}")


def _params(
    body: Sampling, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, options: Options
) -> SamplingParams:
    _check_logprobs("prompt_logprobs", prompt_logprobs, options)
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_k": None if body.top_k == -1 else body.top_k,  # vLLM's way to keep all
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "ignore_eos": body.ignore_eos,
        "min_tokens": body.min_tokens,
        "include_stop": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "cache_salt": body.cache_salt,
    }
    stated: dict[str, Any] = {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        # without a seed, answers differ from one time to the next
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_bias(body.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **stated,
    )


def _bias(stated: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    bias: dict[int, float] = {}
    for key, value in stated.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 9:
            raise UserError(f"logit_bias: keys must be token ids, not {key[:40]!r}")
        bias[int(key)] = value
    return bias


def finite(logprob: float) -> float:
    """JSON knows no infinity, and OpenAI's typed clients no null here: −9999 stands for a token that cannot come."""
    return max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0
