"""HTTP/1.1 over asyncio's streams, as much as a load generator needs: one request at a time on a kept connection.

A general client costs several times as much for each streamed piece, processor time that a server on the same machine
then lacks, and beyond some thousands of pieces per second the client itself is what is measured (docs/bench.md).
Framing by RFC 9112: chunks, a content length, or the end of the connection. No redirects, proxies or compression.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

CONNECT = 10.0  # seconds
STALE = 0.05  # seconds within which a kept connection shows that it was closed before; later, a request was lost


class Lost(Exception):
    """The connection was refused, cut or silent for too long, or what came is not HTTP."""


class Late(Lost):
    """Nothing came for the time that a request may take."""


class Connection:
    """A connection and the response that is being read from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> None:
        self._reader, self._writer, self._timeout = reader, writer, timeout
        self._loop = asyncio.get_running_loop()
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._late = False
        self.status = 0
        self._headers: dict[bytes, bytes] = {}
        self.complete = False  # whether the body was read to its end, so that another request may follow

    @property
    def alive(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def send(self, message: bytes) -> None:
        """Send a request; read the status and the headers of its response. Raises Lost."""
        self.complete, self._heard = False, self._loop.time()
        self._watch()
        try:
            self._writer.write(message)
            await self._writer.drain()
            self.status = 100
            while self.status < 200:  # 1xx only announces the response
                self.status = int((await self._line()).split(b" ", 2)[1])
                self._headers = {}
                while line := await self._line():
                    name, _, value = line.partition(b":")
                    self._headers[name.lower()] = value.strip().lower()
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise self._lost(error) from None

    async def body(self) -> AsyncIterator[bytes]:
        """The body in the pieces that the server sent. Raises Lost."""
        try:
            if self._headers.get(b"transfer-encoding") == b"chunked":
                while size := int((await self._line()).partition(b";")[0], 16):
                    yield (await self._exactly(size + 2))[:size]
                while await self._line():  # trailers
                    pass
            elif b"content-length" in self._headers:
                yield await self._exactly(int(self._headers[b"content-length"]))
            else:
                while piece := await self._reader.read(1 << 16):
                    self._heard = self._loop.time()
                    yield piece
                return
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(error) from None
        self.complete = self._headers.get(b"connection") != b"close"

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        self._heard = self._loop.time()
        if not line.endswith(b"\n"):
            raise EOFError
        return line.rstrip(b"\r\n")

    async def _exactly(self, size: int) -> bytes:
        data = await self._reader.readexactly(size)
        self._heard = self._loop.time()
        return data

    def _watch(self) -> None:
        """One timer for a response, not one for a read: it looks when something came last."""
        left = self._heard + self._timeout - self._loop.time()
        if left <= 0:
            self._late = True
            self._writer.transport.abort()
        else:
            self._timer = self._loop.call_later(left, self._watch)

    def _lost(self, error: Exception) -> Lost:
        if self._late:
            return Late(f"no answer within {self._timeout:g} s")
        if isinstance(error, (ValueError, IndexError)):
            return Lost("the response is not HTTP/1.1")
        return Lost("the server closed the connection" if isinstance(error, EOFError) else reason_of(error))

    def rest(self) -> None:
        """Stop watching: the response is read, or nobody waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        self.rest()
        self._writer.close()


class Connections:
    """Connections to one server, kept from request to request. `url` is the server's root."""

    def __init__(self, url: str, headers: dict[str, str], timeout: float) -> None:
        parts = urlsplit(url)
        self._host, self._tls, self._root = parts.hostname or "", parts.scheme == "https", parts.path
        self._port = parts.port or (443 if self._tls else 80)
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity"} | headers
        self._timeout = timeout
        self._idle: list[Connection] = []

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Connection]:
        """Send one request and read its response from what is given. Raises Lost."""
        headers = self._headers | {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self._root}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        connection = await self._sent("\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body)
        try:
            yield connection
        finally:
            connection.rest()
            if connection.complete:
                self._idle.append(connection)
            else:
                connection.close()

    async def _sent(self, message: bytes) -> Connection:
        """On a kept connection where one is left; a server may close that at any time, so a new one follows it."""
        loop = asyncio.get_running_loop()
        while self._idle:
            kept, began = self._idle.pop(), loop.time()
            if not kept.alive:
                kept.close()
                continue
            try:
                return await sent_on(kept, message)
            except Lost:
                if loop.time() - began > STALE:
                    raise
        return await sent_on(await self._open(), message)

    async def _open(self) -> Connection:
        try:
            opening = asyncio.open_connection(self._host, self._port, ssl=True if self._tls else None)
            return Connection(*await asyncio.wait_for(opening, CONNECT), self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            raise Lost(f"no connection within {CONNECT:g} s") from None
        except OSError as error:
            raise Lost(reason_of(error)) from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


async def sent_on(connection: Connection, message: bytes) -> Connection:
    """The connection with its response begun; closed where that fails or is cancelled."""
    try:
        await connection.send(message)
    except BaseException:
        connection.close()
        raise
    return connection


def reason_of(error: Exception) -> str:
    """`Connection refused`, without the addresses that asyncio puts around it."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (told or type(error).__name__).partition("\n")[0]
