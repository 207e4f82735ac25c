"""HTTP/1.1 against a socket that sends what the test writes down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from compress.bench.connection import Connections, Late, Lost

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def message(reader: asyncio.StreamReader) -> bytes:
    """One request, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    return head + await reader.readexactly(length)


def exchange(answer: Answer, times: int = 1, timeout: float = 5.0, pause: float = 0.0) -> list[list[bytes]]:
    """The pieces of the body of each of `times` requests, one after the other."""

    async def run() -> list[list[bytes]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections, bodies = Connections(f"http://127.0.0.1:{port}/root", {"X-Key": "k"}, timeout), []
        try:
            for _ in range(times):
                async with connections.request("POST", "/path", b"body") as response:
                    bodies.append([piece async for piece in response.body()])
                await asyncio.sleep(pause)
        finally:
            connections.close()
            server.close()
        return bodies

    return asyncio.run(run())


def sending(*parts: bytes, close: bool = True, seen: list[bytes] | None = None) -> Answer:
    """One connection, one answer; each part is written alone."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await message(reader)
        if seen is not None:
            seen.append(asked)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.close()

    return answer


def test_the_request_as_it_is_sent() -> None:
    seen: list[bytes] = []
    exchange(sending(WHOLE, seen=seen))
    head, body = seen[0].split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /root/path HTTP/1.1"
    assert {b"X-Key: k", b"Content-Length: 4", b"Accept-Encoding: identity"} <= set(lines)
    assert any(line.startswith(b"Host: 127.0.0.1:") for line in lines)
    assert body == b"body"


@pytest.mark.parametrize(
    ("parts", "body"),
    [
        ((WHOLE,), [b"ok"]),
        ((b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE), [b"ok"]),
        ((CHUNKED, b"3\r\nabc\r\n", b"1;note=x\r\nd\r\n", b"0\r\nTrailer: x\r\n\r\n"), [b"abc", b"d"]),
        ((CHUNKED + b"3\r\nab", b"c\r\n1\r", b"\nd\r\n0\r\n\r\n"), [b"abc", b"d"]),
        ((CHUNKED, b"A\r\n0123\r\n6789\r\n0\r\n\r\n"), [b"0123\r\n6789"]),
        ((b"HTTP/1.1 200 OK\n\n", b"until ", b"the end"), [b"until ", b"the end"]),
    ],
)
def test_every_framing(parts: tuple[bytes, ...], body: list[bytes]) -> None:
    assert exchange(sending(*parts)) == [body]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((CHUNKED, b"5\r\nab"), "the server closed the connection"),
        ((CHUNKED, b"2\r\nab\r\n"), "the server closed the connection"),
        ((), "the server closed the connection"),
        ((b"SSH-2.0-OpenSSH\r\n",), "the response is not HTTP/1.1"),
        ((CHUNKED, b"zz\r\n"), "the response is not HTTP/1.1"),
    ],
)
def test_what_is_cut_or_not_http_is_lost(parts: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(Lost, match=reason):
        exchange(sending(*parts))


def test_silence_is_late_before_and_inside_a_body() -> None:
    for parts in ((), (CHUNKED, b"2\r\nab\r\n")):
        with pytest.raises(Late, match=r"no answer within 0\.2 s"):
            exchange(sending(*parts, close=False), timeout=0.2)


def test_a_slow_stream_is_not_late() -> None:
    """0.3 s in all, with something every 0.01 s."""
    chunks = [b"1\r\nx\r\n"] * 30
    assert exchange(sending(CHUNKED, *chunks, b"0\r\n\r\n"), timeout=0.15) == [[b"x"] * 30]


def test_a_connection_is_kept() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(3):
            await message(reader)
            writer.write(WHOLE)

    assert exchange(answer, times=3) == [[b"ok"]] * 3
    assert connections == 1


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_kept_connection_that_was_closed_is_replaced(pause: float) -> None:
    """Whether its end is known before the next request is sent, or shows only then."""
    assert exchange(sending(WHOLE), times=3, pause=pause) == [[b"ok"]] * 3


def test_a_request_lost_on_a_kept_connection_is_not_sent_again() -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        for body in (WHOLE, b""):
            await message(reader)
            asked += 1
            await asyncio.sleep(0 if body else 0.2)
            writer.write(body)
        writer.close()

    with pytest.raises(Lost, match="the server closed the connection"):
        exchange(answer, times=2)
    assert asked == 2
