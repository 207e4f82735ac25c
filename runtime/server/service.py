"""One engine behind HTTP: from a parsed body to its answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from compress.errors import UserError
from compress.runtime.server.answer import Answer
from compress.runtime.server.chats import Chats
from compress.runtime.server.completions import Completions
from compress.runtime.server.errors import ApiError
from compress.runtime.server.gate import Bodies
from compress.runtime.server.job import Ask
from compress.runtime.server.loop import Engine, EngineLoop
from compress.runtime.server.metrics import Metrics
from compress.runtime.server.options import Options
from compress.runtime.server.prompts import Prompt, Prompts, truncate
from compress.runtime.server.protocol import ChatBody, ChatPrompt, CompletionBody, Sampling, TokenizeBody
from compress.runtime.server.sampling import answers, chat_params, completion_params
from compress.runtime.server.sse import EventStream, json_response, listening


class Service:
    """One engine behind HTTP."""

    def __init__(self, engine: Engine, prompts: Prompts, options: Options, max_running: int) -> None:
        self.engine, self.prompts, self.options = engine, prompts, options
        self.capacity = max_running + options.max_queue
        self.metrics = Metrics(lambda: engine.stats, options.names[0])
        self.started = int(time.time())
        self.draining = False
        self.bodies = Bodies()
        self._loop: EngineLoop | None = None

    @property
    def loop(self) -> EngineLoop:
        assert self._loop is not None, "the application has not started"
        return self._loop

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._loop = EngineLoop(self.engine, self.metrics, self.capacity)
        self._loop.start()
        try:
            yield
        finally:
            await self._loop.stop()
            self.prompts.close()

    async def drain(self) -> int:
        """Refuse new requests, also those half sent; let running ones finish, and after `drain_seconds` abort them.

        How many were aborted.
        """
        self.draining = True
        self.bodies.close()
        if await self.loop.idle(self.options.drain_seconds):
            return 0
        aborted = self.loop.open
        self.loop.cancel_all()
        await self.loop.idle(5)
        return aborted

    def check_model(self, name: str | None) -> str:
        names = self.options.names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(
                404, f"model {name!r} is not served here; models: {', '.join(names)}", "model", "model_not_found"
            )
        return name

    async def complete(self, request: Request, body: CompletionBody) -> Response:
        model = self.check_model(body.model)
        n = answers(body, self.options)
        prompts = await self._texts(body)
        asks = [Ask(prompt.ids, completion_params(body, len(prompt.ids), self.options), n) for prompt in prompts]
        answer = Answer("text_completion", "cmpl", model, prompts, n, self.prompts.pieces)
        return await self._answer(request, body, asks, Completions(body, answer, self.prompts.shown))

    async def chat(self, request: Request, body: ChatBody) -> Response:
        model = self.check_model(body.model)
        n = answers(body, self.options)
        prompt = await self._chat(body)
        ask = Ask(prompt.ids, chat_params(body, len(prompt.ids), self.options), n)
        answer = Answer("chat.completion", "chatcmpl", model, [prompt], n, self.prompts.pieces)
        return await self._answer(request, body, [ask], Chats(body, answer))

    async def _answer(
        self, request: Request, body: Sampling, asks: Sequence[Ask], writer: Completions | Chats
    ) -> Response:
        job = await self.loop.submit(asks, bool(body.stream))
        for prompt in writer.answer.prompts:
            if prompt.truncated:
                self.metrics.truncated(prompt.truncated)
        if body.stream:
            return EventStream(job, writer.chunks(job), self.loop.cancel, writer.answer.headers)
        async with listening(request.receive, job, self.loop.cancel):
            return json_response(await writer.whole(job), writer.answer.headers)

    async def _texts(self, body: CompletionBody) -> list[Prompt]:
        special = body.add_special_tokens is not False
        prompts = body.prompts
        if len(prompts) > self.capacity:
            raise UserError(f"prompt: {len(prompts)} prompts in one request; at most {self.capacity} can wait")
        made = []
        context, fits = self.options.max_model_len, body.truncate_prompt_tokens is None
        for prompt in prompts:
            ids = await self.prompts.text(prompt, special, context, fits) if isinstance(prompt, str) else prompt
            ids, cut = truncate(ids, body.truncate_prompt_tokens)
            made.append(Prompt(ids, cut, prompt if isinstance(prompt, str) else None))
        return made

    async def _chat(self, body: ChatBody) -> Prompt:
        if body.add_special_tokens:
            raise UserError("add_special_tokens: the chat template prints all that is special; leave it out")
        if body.tool_choice == "none":
            body = body.model_copy(update={"tools": None})
        keep = body.truncate_prompt_tokens
        return Prompt(*truncate(await self.prompts.chat(body, self.options.max_model_len, keep is None), keep))

    def model_card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "compress"}
        return card | {"root": self.options.names[0], "parent": None, "max_model_len": self.options.max_model_len}

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        context = self.options.max_model_len
        if body.prompt is not None:
            ids = await self.prompts.text(body.prompt, body.add_special_tokens is not False, context, fits=False)
        else:
            fields = {name: getattr(body, name) for name in ChatPrompt.model_fields}
            ids = await self.prompts.chat(ChatPrompt.model_construct(**fields), context, fits=False)
        strings = await self.prompts.names(ids) if body.return_token_strs else None
        told = {"count": len(ids), "max_model_len": self.options.max_model_len, "tokens": ids}
        return told | {"token_strs": strings}
