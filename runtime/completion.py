"""What a finished request came to."""

from __future__ import annotations

from dataclasses import dataclass

from compress.runtime.request import FinishReason, Request, TokenLogprobs


@dataclass(frozen=True)
class Completion:
    prompt_ids: list[int]
    token_ids: list[int]  # with the token that ended it
    text: str  # without it or the string that did, and without special tokens; empty without a tokenizer
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @classmethod
    def of(cls, request: Request) -> Completion:
        """Of a finished request whose text nobody has taken."""
        assert request.finish_reason is not None
        return cls(
            prompt_ids=request.token_ids[: request.prompt_length],
            token_ids=request.generated,
            text=request.text.take() if request.text is not None else "",
            finish_reason=request.finish_reason,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
        )
