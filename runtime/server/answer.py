"""What answers to completions and chats share: identity, usage, and the prompt of each choice."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compress.runtime.server.job import News
from compress.runtime.server.prompts import Prompt
from compress.runtime.text import Pieces


@dataclass
class Usage:
    """Tokens of one HTTP request, counted as news come; each prompt counts once, however many its answers."""

    prompts: Sequence[Prompt]
    n: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def count(self, news: News) -> None:
        self.completion_tokens += len(news.token_ids)
        if news.finish_reason is not None and news.index % self.n == 0:
            self.cached_tokens += news.cached_tokens

    def told(self) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "truncated_tokens": self.truncated},
        }

    @property
    def truncated(self) -> int:
        return sum(prompt.truncated for prompt in self.prompts)


@dataclass
class Answer:
    """One response in the making."""

    kind: str  # the `object` of a whole response
    prefix: str  # of the id
    model: str
    prompts: Sequence[Prompt]
    n: int
    pieces: Pieces | None
    id: str = field(init=False)
    created: int = field(init=False)
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.usage = Usage(self.prompts, self.n)

    def prompt_of(self, news: News) -> Prompt:
        return self.prompts[news.index // self.n]

    def frame(self, choices: list[dict[str, Any]], kind: str | None = None) -> dict[str, Any]:
        head = {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}

    @property
    def headers(self) -> dict[str, str]:
        """A prompt that was cut says so even where no usage is asked for."""
        cut = self.usage.truncated
        return {"X-Truncated-Prompt-Tokens": str(cut)} if cut else {}
