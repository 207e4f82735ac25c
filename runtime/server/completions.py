"""Answers of /v1/completions, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from compress.runtime.server.answer import Answer
from compress.runtime.server.job import Job, News
from compress.runtime.server.logprobs import Scored, completion_logprobs, prompt_logprobs
from compress.runtime.server.protocol import CompletionBody
from compress.runtime.server.sse import DONE, event

Shown = Callable[[list[int]], tuple[str, list[int]]]  # prompt ids to text, and where in it each begins


class Completions:
    """`shown` turns the ids of an echoed prompt into text."""

    def __init__(self, body: CompletionBody, answer: Answer, shown: Shown) -> None:
        self.body, self.answer, self.shown = body, answer, shown
        self._begun: set[int] = set()  # choices of which something is told
        self._prompts: dict[int, tuple[str, list[int]]] = {}  # echoed

    async def whole(self, job: Job) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        async for batch in job.news():
            choices += [self._choice(news, first=True) for news in batch]
        return self.answer.frame(sorted(choices, key=lambda choice: choice["index"])) | {
            "usage": self.answer.usage.told()
        }

    async def chunks(self, job: Job) -> AsyncIterator[bytes]:
        usage = {"usage": None} if self.body.include_usage else {}
        async for batch in job.news():
            sent = b""
            for news in batch:
                choice = self._choice(news, first=news.index not in self._begun)
                if choice["text"] or choice["logprobs"] or news.finish_reason is not None:
                    sent += event(self.answer.frame([choice]) | usage)
            if sent:
                yield sent
        if self.body.include_usage:
            yield event(self.answer.frame([]) | {"usage": self.answer.usage.told()})
        yield DONE

    def _choice(self, news: News, first: bool) -> dict[str, Any]:
        self.answer.usage.count(news)
        self._begun.add(news.index)
        told: dict[str, Any] = {"index": news.index, "text": news.text, "logprobs": None}
        scored: list[Any] = list(zip(news.token_ids, news.logprobs, strict=False))
        offsets = list(news.offsets)
        if self.body.echo:
            text, starts = self._echoed(news)
            offsets = [len(text) + offset for offset in offsets]
            if first:
                told["text"] = text + news.text
                scored = [*self._prompt(news), *scored]
                offsets = starts + offsets
        if self.body.logprobs is not None and (scored or news.finish_reason is not None):
            told["logprobs"] = completion_logprobs(scored, self.answer.pieces, self.body.logprobs, offsets)
        if self.body.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(self._prompt(news), self.answer.pieces, self.body.prompt_logprobs)
        return told | {"finish_reason": news.finish_reason, "stop_reason": news.stop_reason}

    def _echoed(self, news: News) -> tuple[str, list[int]]:
        number = news.index // self.answer.n
        if number not in self._prompts:
            prompt = self.answer.prompts[number]
            text, offsets = self.shown(prompt.ids)
            whole = prompt.text is not None and not prompt.truncated
            self._prompts[number] = (prompt.text if whole else text, offsets)  # type: ignore[assignment]
        return self._prompts[number]

    def _prompt(self, news: News) -> Scored:
        return list(zip(self.answer.prompt_of(news).ids, news.prompt_logprobs or [], strict=False))
