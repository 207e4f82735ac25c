"""Before any route: the key, the size of the body, and whether the server still takes requests. Plain ASGI.

HEAD is GET here; uvicorn sends no body to who asks for none.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException

from compress.runtime.server.errors import ApiError
from compress.runtime.server.sse import json_response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
OPEN = ("/health",)  # without a key
STOPPING = "the server is shutting down"
DISCARD = 16  # times the limit of a body that are read of one that is refused
LAST = 0.5  # seconds
CLOSE = {"Connection": "close"}


class Bodies:
    """The requests whose bodies have not come whole. Once the server stops, nobody waits for the rest."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def next(self, receive: Receive) -> MutableMapping[str, Any]:
        """The next message of a body. Raises HTTPException 503 when the server stops meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            # one that is refused while the server stops may still be read to its end, if that is near
            return await (asyncio.wait_for(receive(), LAST) if self._closed else receive())
        except (asyncio.CancelledError, asyncio.TimeoutError):
            if not self._closed:
                raise
            raise HTTPException(503, STOPPING, CLOSE) from None
        finally:
            self._waiting.discard(task)

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._closed = True
        for task in self._waiting:
            task.cancel()


class Gate:
    def __init__(
        self,
        app: App,
        api_key: str | None,
        max_body_bytes: int,
        bodies: Bodies,
        draining: Callable[[], bool],
        refused: Callable[[int], None],
    ) -> None:
        self.app, self.max_body_bytes, self.draining, self.refused = app, max_body_bytes, draining, refused
        self.bodies = bodies
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        error = self._check(scope, headers)
        if error is None:
            await self.app(scope, self._limited(receive), send)
        else:
            self.refused(error.status)
            await self._discard(receive)
            await json_response(error)(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._expected is not None and scope["path"] not in OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            # a scheme is the same in any case (RFC 9110, 11.1)
            if not hmac.compare_digest(given, self._expected) or scheme.lower() != b"bearer":
                told = "wrong or missing API key; send it as Authorization: Bearer KEY"
                return ApiError(401, told, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and self.draining():
            return ApiError(503, STOPPING, headers=CLOSE)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            return self._too_large()
        return None

    async def _discard(self, receive: Receive) -> None:
        """Read a refused body to its end, within reason: many clients read no answer before they have sent all."""
        seen = 0
        with suppress(HTTPException):
            while seen < DISCARD * self.max_body_bytes:
                message = await self.bodies.next(receive)
                seen += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return

    def _too_large(self) -> ApiError:
        told = f"the body is larger than {self.max_body_bytes} bytes, the limit"
        return ApiError(413, told, headers=CLOSE)

    def _limited(self, receive: Receive) -> Receive:
        """Counts what comes: a chunked body states no length."""
        seen, whole = 0, False

        async def count() -> MutableMapping[str, Any]:
            nonlocal seen, whole
            if whole:  # what comes now is that the client goes
                return await receive()
            message = await self.bodies.next(receive)
            whole = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self.max_body_bytes:
                if message.get("more_body", False):
                    await self._discard(receive)
                # an HTTPException passes through the framework's reading of the body as it is
                raise HTTPException(413, self._too_large().message, CLOSE)
            return message

        return count
