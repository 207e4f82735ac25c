"""Responses: strict JSON, and server-sent events that end when the client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from compress.runtime.server.errors import ApiError, ClientGone, error_body
from compress.runtime.server.job import Job

DONE = b"data: [DONE]\n\n"


def encode(value: Any) -> bytes:
    """Strict JSON in UTF-8: no NaN; half a surrogate pair, which has no UTF-8, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """A value, or an error with its status."""
    if isinstance(value, ApiError):
        return Response(encode(error_body(value)), value.status, value.headers, "application/json")
    return Response(encode(value), 200, headers, "application/json")


@asynccontextmanager
async def listening(receive: Receive, job: Job, cancel: Callable[[Job], None]) -> AsyncIterator[None]:
    """While inside, a client that goes interrupts the job; on the way out, what is left of the job is aborted."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.interrupt(ClientGone())
        cancel(job)

    listener = asyncio.create_task(listen())
    try:
        yield
    finally:
        listener.cancel()
        cancel(job)


class EventStream(Response):
    """Sends chunks of events as they come, several in one write where several have come."""

    media_type = "text/event-stream"

    def __init__(
        self, job: Job, chunks: AsyncIterator[bytes], cancel: Callable[[Job], None], headers: dict[str, str]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self.job, self.chunks, self.cancel = job, chunks, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with listening(receive, self.job, self.cancel):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self.chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except ClientGone:
                return
            except ApiError as error:  # the status is sent: clients read the error from the stream
                await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
