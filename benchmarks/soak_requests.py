"""What the soak sends, and what must come back: good requests, bad ones, and clients that go."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 120.0  # seconds that one answer may take
GREEDY: dict[str, Any] = {"prompt": "the same again", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
BAD: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": ""}, 400),
    ("/v1/completions", {"prompt": [[1], [99999999]]}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}, 400),
    ("/v1/completions", {"prompt": "x", "n": 100000}, 400),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"99999999": 1}}, 400),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400),
    ("/v1/completions", {"prompt": "x", "no_such_field": 1}, 400),
    ("/v1/completions", {"prompt": "x", "model": "another"}, 404),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400),
    ("/v1/chat/completions", {"messages": "x"}, 400),
    ("/no/such/route", {}, 404),
]


class Failure(Exception):
    """The server did what it must not."""


@dataclass
class Tally:
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)  # requests done, MB
    greedy: set[str] = field(default_factory=set)
    done: int = 0


def strict(raw: bytes) -> Any:
    def refuse(name: str) -> None:
        raise Failure(f"{name} in JSON")

    return json.loads(raw, parse_constant=refuse)


class Connection:
    """One HTTP/1.1 request on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    async def send(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body; chunks are joined."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        rest = await self.reader.read()
        if "transfer-encoding: chunked" not in head:
            return int(head.split()[1]), rest
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return int(head.split()[1]), body


def random_body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A good request, and its path."""
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "ignore_eos": True, "n": draw.choice([1, 1, 1, 1, 2, 3])}
    options: dict[str, Callable[[], Any]] = {
        "temperature": lambda: draw.choice([0, 0.5, 1.0, 2.0]),
        "top_p": lambda: draw.uniform(0.1, 1),
        "top_k": lambda: draw.randint(0, 50),
        "min_p": lambda: draw.uniform(0, 0.5),
        "seed": lambda: draw.randint(0, 2**40),
        "repetition_penalty": lambda: draw.uniform(0.8, 1.5),
        "presence_penalty": lambda: draw.uniform(-2, 2),
        "frequency_penalty": lambda: draw.uniform(-2, 2),
        "logit_bias": lambda: {str(draw.randint(0, 200)): draw.uniform(-100, 100)},
        "stop": lambda: [draw.choice(["a", "zz", "é"])],
        "min_tokens": lambda: 1,
    }
    for name in draw.sample(list(options), draw.randint(0, 4)):
        body[name] = options[name]()
    length = draw.randint(1, 120)
    if draw.random() < 0.3:
        content = "".join(draw.choice("abc xyz.汉é🙂") for _ in range(length // 2 + 1))
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": content}]}
    shared = [7] * draw.choice([0, 0, 40, 64])
    ids = shared + [draw.randint(0, 200) for _ in range(length)]
    if draw.random() < 0.3:
        body |= {"logprobs": draw.randint(0, 5), "echo": draw.random() < 0.5}
    return "/v1/completions", body | {"prompt": draw.choice([ids, [ids, ids[:5]], "text " * draw.randint(1, 20)])}


async def good(port: int, draw: random.Random, tally: Tally) -> None:
    path, body = random_body(draw)
    body["stream"] = stream = draw.random() < 0.5
    if stream and draw.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    async with Connection(port) as connection:
        await connection.send(path, json.dumps(body).encode())
        status, raw = await connection.answer()
    tally.statuses[status] += 1
    if status != 200:
        raise Failure(f"{status} for {json.dumps(body)[:300]}: {raw[:300]!r}")
    prompts = 2 if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], list) else 1
    expected = sorted(range(prompts * body["n"]))
    if stream:
        events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
        if events.pop() != b"[DONE]":
            raise Failure(f"a stream without an end: {raw[-300:]!r}")
        choices = [choice for event in events for choice in strict(event)["choices"]]
    else:
        choices = strict(raw)["choices"]
    ended = sorted(choice["index"] for choice in choices if choice["finish_reason"] in ("stop", "length"))
    if ended != expected:
        raise Failure(f"choices {expected} asked for, {ended} ended")


async def greedy(port: int, draw: random.Random, tally: Tally) -> None:
    async with Connection(port) as connection:
        await connection.send("/v1/completions", json.dumps(GREEDY).encode())
        status, raw = await connection.answer()
    tally.statuses[status] += 1
    tally.greedy.add(strict(raw)["choices"][0]["text"])


async def bad(port: int, draw: random.Random, tally: Tally) -> None:
    path, body, expected = draw.choice(BAD)
    garbage = draw.random() < 0.2
    content = draw.randbytes(draw.randint(1, 200)) if garbage else json.dumps(body).encode()
    async with Connection(port) as connection:
        await connection.send("/v1/completions" if garbage else path, content)
        status, raw = await connection.answer()
    tally.statuses[status] += 1
    if status != (400 if garbage else expected) or set(strict(raw)) != {"error"}:
        raise Failure(f"{status} for {content[:200]!r}: {raw[:300]!r}")


async def gone(port: int, draw: random.Random, tally: Tally) -> None:
    """A client that goes: with half a request sent, before an answer, or in the middle of a stream."""
    path, body = random_body(draw)
    body |= {"max_tokens": 200, "stream": draw.random() < 0.6}
    content = json.dumps(body).encode()
    async with Connection(port) as connection:
        if draw.random() < 0.15:
            half = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            connection.writer.write(half + content[: len(content) // 2])
            await connection.writer.drain()
        else:
            await connection.send(path, content)
            if body["stream"] and draw.random() < 0.7:
                await connection.reader.read(draw.randint(1, 3000))
        await asyncio.sleep(draw.random() * 0.05)
        connection.writer.transport.abort()


KINDS: list[tuple[float, Callable[[int, random.Random, Tally], Awaitable[None]]]] = [
    (0.55, good), (0.05, greedy), (0.2, bad), (0.2, gone),
]  # fmt: skip
