"""The bodies of requests, strictly: an unknown field, a wrong type or a value past its limit is told by name.

None stands for the default everywhere, as clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from compress.errors import UserError
from compress.runtime.server.accepted import CHAT, COMPLETION, without_accepted

STOPS = 64  # stop strings of one request
Name = Annotated[str, Field(max_length=200)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: loopback needs none


class Sampling(Body):
    """What completions and chats have in common; the ranges are checked by SamplingParams."""

    model: Name | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Stop | list[Stop] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)

    @field_validator("stop")
    @classmethod
    def _few(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > STOPS:
            raise ValueError(f"at most {STOPS} strings; there are {len(stop)}")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs and stream do not go together")
        return self


class CompletionBody(Sampling):
    prompt: str | list[Any]  # a text, texts, token ids, or lists of token ids
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_accepted(cls, body: Any) -> Any:
        return without_accepted(body, COMPLETION) if isinstance(body, dict) else body

    @field_validator("best_of")
    @classmethod
    def _one(cls, best_of: int | None, info: Any) -> int | None:
        if best_of is not None and best_of != (info.data.get("n") or 1):
            raise ValueError("not supported, except equal to n")
        return best_of

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt. Raises UserError for what is neither text nor token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if kinds == {str}:
            return list(self.prompt)
        if kinds == {int}:
            return [list(self.prompt)]
        if kinds == {list} and all(type(token) is int for ids in self.prompt for token in ids):
            return [list(ids) for ids in self.prompt]
        raise UserError(
            "prompt must be a text, a list of texts, token ids, or a list of lists of token ids"
            + (", not empty" if not self.prompt else ", all of one kind")
        )


class Part(Body):
    type: str
    text: str

    @field_validator("type")
    @classmethod
    def _text(cls, kind: str) -> str:
        if kind != "text":
            raise ValueError("this server takes parts of type 'text' alone")
        return kind


class ChatMessage(Body):
    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)

    @property
    def plain(self) -> dict[str, Any]:
        """As templates read it: content is one string, and absent fields are absent."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        said = {"role": self.role, "content": content}
        optional = ("name", "tool_calls", "tool_call_id", "reasoning_content")
        return said | {key: getattr(self, key) for key in optional if getattr(self, key) is not None}


class ChatPrompt(Body):
    """The part of a chat that makes the prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_end(self) -> ChatPrompt:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt do not go together")
        return self


class ChatBody(Sampling, ChatPrompt):
    max_completion_tokens: int | None = None  # OpenAI's newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_accepted(cls, body: Any) -> Any:
        return without_accepted(body, CHAT) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        return self


class TokenizeBody(Body):
    """Either a text, or a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, one of the two")
        return self


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: list[int]
