"""A server as an arm: an asynchronous client of `/v1/completions`, streaming, with prompts as token ids."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compress.bench.connection import Connections, Late, Lost
from compress.bench.timing import Run, Timing
from compress.bench.workload import Ask, Clients, Level
from compress.errors import RunError, UserError, nearest

SHOWN = 160  # characters of a server's own error that are shown

# as the bundled server, vLLM and llama.cpp put it
FOREIGN_ID = re.compile(r"\btoken[ _]ids?\b.{0,60}out of range|out of vocab|invalid token", re.IGNORECASE)


class Refused(Exception):
    """The server answered one request with an error, or not as the protocol says."""


@dataclass
class Answer:
    """What has come of one stream."""

    pieces: list[float] = field(default_factory=list)
    tokens: int | None = None  # from the usage, which comes last

    def take(self, event: dict[str, Any], now: float) -> None:
        """Note one event. The closing one of some servers has no text and is no piece of output."""
        if "error" in event:
            raise Refused(message_of(event))
        for choice in (event.get("choices") or [])[:1]:
            if choice.get("text") or not choice.get("finish_reason"):
                self.pieces.append(now)
        if event.get("usage"):
            self.tokens = event["usage"].get("completion_tokens")


class HttpArm:
    """Keeps its connections from run to run. `close` ends them."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout: float = 300) -> None:
        """`timeout`: seconds without a byte after which a request has failed."""
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._connections = Connections(url, {"Authorization": f"Bearer {key}"} if key else {}, timeout)
        self._model = model

    @property
    def name(self) -> str:
        """Known once connected."""
        return f"{self._model} at {self.url}"

    def connect(self) -> dict[str, Any]:
        """The entry of `/v1/models` that is measured: the first, or the named one.

        Raises RunError where nothing is served, UserError where the named one is not.
        """
        listed = self._loop.run_until_complete(self._models())
        found = [entry for entry in listed if self._model in (None, entry.get("id"))]
        if not found:
            names = [str(entry.get("id")) for entry in listed]
            if self._model is None or not names:
                raise RunError(f"{self.url}: it serves no model")
            close = nearest(self._model, names)
            raise UserError(f"--model {self._model}: {self.url} serves {', '.join(names)}{close}")
        self._model = str(found[0].get("id"))
        return found[0]

    async def _models(self) -> list[dict[str, Any]]:
        try:
            async with self._connections.request("GET", "/v1/models") as response:
                body = b"".join([piece async for piece in response.body()])
                if response.status != 200:
                    raise RunError(f"{self.url}/v1/models: {http_error(response.status, body)}")
            return list(json.loads(body)["data"])
        except Lost as lost:
            raise RunError(f"{self.url}: no server answers: {lost}") from None
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f"{self.url}/v1/models: not a list of models, as an OpenAI-compatible server gives"
            ) from None

    def run(self, asks: Sequence[Ask], level: Level, tick: Callable[[], None] = lambda: None) -> Run:
        """Make all requests as the level says; `tick` is called after each.

        Raises RunError where the server goes away or answers none.
        """
        run = self._loop.run_until_complete(self._run(asks, level, tick))
        if not run.answered:
            failed = "the request failed" if len(asks) == 1 else f"all {len(asks)} requests failed; the first"
            raise RunError(f"{self.url}: {failed}: {run.timings[0].error}")
        return run

    async def _run(self, asks: Sequence[Ask], level: Level, tick: Callable[[], None]) -> Run:
        began = time.perf_counter()
        timings: list[Timing] = []
        pending = iter(asks)

        async def make(ask: Ask, start: float) -> None:
            timings.append(await self._ask(ask, start))
            tick()

        async def client() -> None:
            for ask in pending:
                await make(ask, time.perf_counter())

        async def arrival(ask: Ask) -> None:
            await asyncio.sleep(began + ask.due - time.perf_counter())
            await make(ask, began + ask.due)

        if isinstance(level, Clients):
            work = [asyncio.ensure_future(client()) for _ in range(min(level.count, len(asks)))]
        else:
            work = [asyncio.ensure_future(arrival(ask)) for ask in asks]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        return Run(timings, time.perf_counter() - began)

    async def _ask(self, ask: Ask, start: float) -> Timing:
        """One request, timed; what goes wrong with it alone becomes its error."""
        answer, error = Answer(), None
        try:
            async with self._connections.request("POST", "/v1/completions", self._body(ask)) as response:
                if response.status != 200:
                    refusal = b"".join([piece async for piece in response.body()])
                    raise Refused(http_error(response.status, refusal))
                async for event, now in events(response.body()):
                    answer.take(event, now)
            if not answer.pieces or not answer.tokens:
                raise Refused("the stream ended without output" if answer.tokens else "the stream ended without usage")
        except Refused as refusal:
            error = advised(str(refusal))
        except Late as late:
            error = str(late)
        except Lost as lost:
            await self._models()  # raises where the server is gone: what is left would fail alike
            error = str(lost)
        return Timing(start, tuple(answer.pieces), len(ask.prompt), answer.tokens or 0, ask.output, error)

    def _body(self, ask: Ask) -> bytes:
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    def close(self) -> None:
        """Drop what is under way (after Ctrl-C there is), and end all connections."""
        self._loop.run_until_complete(self._drop())
        self._loop.close()

    async def _drop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connections.close()
        await asyncio.sleep(0)  # asyncio closes sockets in its next turn


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[dict[str, Any], float]]:
    """The JSON of each `data:` line of an event stream with the time its last byte came; `[DONE]` is left out."""
    rest = b""
    async for chunk in chunks:
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                try:
                    yield json.loads(data), now
                except ValueError:
                    raise Refused(f"not JSON in the stream: {data[:SHOWN].decode(errors='replace')}") from None


def http_error(status: int, body: bytes) -> str:
    """`HTTP 400: prompt has 600 tokens; …` from the error bodies of OpenAI-compatible servers, or any other."""
    try:
        told = message_of(json.loads(body))
    except ValueError:
        told = body.decode(errors="replace")
    line = " ".join(told.split())
    return f"HTTP {status}: {line[:SHOWN]}".rstrip(": ")


def advised(error: str) -> str:
    """A refusal of random ids that the model does not have, with the option that keeps them below its vocabulary."""
    beyond = FOREIGN_ID.search(error) is not None
    return f"{error}; --vocab N keeps the ids below N, the size of the model's vocabulary" if beyond else error


def message_of(body: Any) -> str:
    """The `message` of {"error": {"message": …}}, of {"error": …} or of the body itself."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error.get("detail", error)) if isinstance(error, dict) else error)
