"""Answers of /v1/chat/completions, whole or as a stream of chunks: the role first, then text, then why it ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from compress.runtime.server.answer import Answer
from compress.runtime.server.job import Job, News
from compress.runtime.server.logprobs import chat_logprobs, prompt_logprobs
from compress.runtime.server.protocol import ChatBody
from compress.runtime.server.sse import DONE, event

CHUNK = "chat.completion.chunk"


class Chats:
    def __init__(self, body: ChatBody, answer: Answer) -> None:
        self.body, self.answer = body, answer

    async def whole(self, job: Job) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        scored: dict[str, Any] = {}
        async for batch in job.news():
            choices += [self._choice(news) for news in batch]
            if self.body.prompt_logprobs is not None:
                pairs = zip(self.answer.prompts[0].ids, batch[0].prompt_logprobs or [], strict=True)
                told = prompt_logprobs(list(pairs), self.answer.pieces, self.body.prompt_logprobs)
                scored = {"prompt_logprobs": told}
        ordered = sorted(choices, key=lambda choice: choice["index"])
        return self.answer.frame(ordered) | {"usage": self.answer.usage.told()} | scored

    def _choice(self, news: News) -> dict[str, Any]:
        self.answer.usage.count(news)
        return {
            "index": news.index,
            "message": {"role": "assistant", "content": news.text, "refusal": None},
            "logprobs": self._logprobs(news),
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }

    async def chunks(self, job: Job) -> AsyncIterator[bytes]:
        yield b"".join(self._chunk(i, {"role": "assistant", "content": ""}) for i in range(job.count))
        async for batch in job.news():
            sent = b"".join(self._events(news) for news in batch)
            if sent:
                yield sent
        if self.body.include_usage:
            yield event(self.answer.frame([], CHUNK) | {"usage": self.answer.usage.told()})
        yield DONE

    def _events(self, news: News) -> bytes:
        self.answer.usage.count(news)
        logprobs = self._logprobs(news) if news.token_ids else None
        sent = b""
        if news.text or logprobs:
            sent += self._chunk(news.index, {"content": news.text}, logprobs)
        if news.finish_reason is not None:
            sent += self._chunk(news.index, {}, None, news.finish_reason, news.stop_reason)
        return sent

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        choice |= {"stop_reason": stop_reason}
        return event(self.answer.frame([choice], CHUNK) | ({"usage": None} if self.body.include_usage else {}))

    def _logprobs(self, news: News) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        pairs = list(zip(news.token_ids, news.logprobs, strict=False))
        return chat_logprobs(pairs, self.answer.pieces, self.body.top_logprobs or 0)
