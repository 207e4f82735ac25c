"""A server as an arm: an asynchronous client of `/v1/completions`, streaming, with prompts as token ids."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from compress.bench.timing import Run, Timing
from compress.bench.workload import Ask, Clients, Level
from compress.errors import RunError

CONTACT = 10.0  # seconds in which a server answers that it is there
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SHOWN = 160  # characters of a server's own error that are shown


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
        self._client = httpx2.AsyncClient(
            base_url=url,
            # identity: a compressed stream would come in other pieces
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx2.Timeout(timeout),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=httpx2.URL(url).host not in LOOPBACK,  # a proxy of the environment would be measured too
        )
        self._model = model

    @property
    def name(self) -> str:
        """Known once connected."""
        return f"{self._model} at {self.url}"

    def connect(self) -> dict[str, Any]:
        """The entry of `/v1/models` that is measured: the first, or the named one. Raises RunError without one."""
        listed = self._loop.run_until_complete(self._models())
        found = [entry for entry in listed if self._model in (None, entry.get("id"))]
        if not found:
            names = ", ".join(str(entry.get("id")) for entry in listed) or "none"
            raise RunError(f"{self.url}: no model {self._model!r}; it serves: {names}")
        self._model = str(found[0].get("id"))
        return found[0]

    async def _models(self) -> list[dict[str, Any]]:
        try:
            response = await self._client.get("/v1/models", timeout=CONTACT)
            if response.status_code != 200:
                raise RunError(f"{self.url}/v1/models: {http_error(response.status_code, response.text)}")
            return list(response.json()["data"])
        except httpx2.TransportError as error:
            raise RunError(f"{self.url}: no server answers: {reason_of(error)}") from None
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f"{self.url}/v1/models: not a list of models, as an OpenAI-compatible server gives"
            ) from None

    def run(self, asks: Sequence[Ask], level: Level) -> Run:
        """Make all requests as the level says. Raises RunError where the server goes away or answers none."""
        run = self._loop.run_until_complete(self._run(asks, level))
        if not run.answered:
            raise RunError(f"{self.url}: all {len(asks)} requests failed; the first: {run.timings[0].error}")
        return run

    async def _run(self, asks: Sequence[Ask], level: Level) -> Run:
        began = time.perf_counter()
        timings: list[Timing] = []
        pending = iter(asks)

        async def client() -> None:
            for ask in pending:
                timings.append(await self._ask(ask, time.perf_counter()))

        async def arrival(ask: Ask) -> None:
            await asyncio.sleep(began + ask.due - time.perf_counter())
            timings.append(await self._ask(ask, began + ask.due))

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
            async with self._client.stream("POST", "/v1/completions", json=self._body(ask)) as response:
                if response.status_code != 200:
                    raise Refused(http_error(response.status_code, (await response.aread()).decode(errors="replace")))
                async for event, now in events(response.aiter_bytes()):
                    answer.take(event, now)
            if not answer.pieces or not answer.tokens:
                raise Refused("the stream ended without output" if answer.tokens else "the stream ended without usage")
        except Refused as refusal:
            error = str(refusal)
        except httpx2.TimeoutException as late:
            error = f"no answer in time ({type(late).__name__})"
        except httpx2.TransportError as lost:
            await self._models()  # raises where the server is gone: what is left would fail alike
            error = reason_of(lost)
        return Timing(start, tuple(answer.pieces), len(ask.prompt), answer.tokens or 0, ask.output, error)

    def _body(self, ask: Ask) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()


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


def http_error(status: int, body: str) -> str:
    """`HTTP 400: prompt has 600 tokens; …` from the error bodies of OpenAI-compatible servers, or any other."""
    try:
        told = message_of(json.loads(body))
    except ValueError:
        told = body
    line = " ".join(told.split())
    return f"HTTP {status}: {line[:SHOWN]}".rstrip(": ")


def message_of(body: Any) -> str:
    """The `message` of {"error": {"message": …}}, of {"error": …} or of the body itself."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error.get("detail", error)) if isinstance(error, dict) else error)


def reason_of(error: Exception) -> str:
    return str(error) or type(error).__name__
