"""A real server in a thread, on a free port of the loopback, and what clients do to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.runtime.engine import Engine
from compress.runtime.server.options import Options
from compress.runtime.server.prompts import Prompts
from compress.runtime.server.serve import Server, address, bind, context_length
from compress.runtime.server.service import Service

WAIT = 60.0  # seconds that anything may take on a busy machine


class Live:
    """The server, its engine, and a plain HTTP client."""

    def __init__(self, engine: Engine, path: Path, options: dict[str, Any]) -> None:
        self.engine = engine
        stated = {"names": ("tiny",), "max_model_len": context_length(engine, None)} | options
        self.service = Service(engine, Prompts.of(path), Options(**stated), engine.scheduler.max_running)
        self._sock = bind("127.0.0.1", 0)
        self.url = address(self._sock)
        self.port: int = self._sock.getsockname()[1]
        ready = threading.Event()
        self.said: list[str] = []  # to the operator
        self.server = Server(self.service, ready.set, self.said.append)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._sock]}, daemon=True)
        self.thread.start()
        assert ready.wait(WAIT)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status, and the body as strict JSON; as text where it is something else."""
        status, raw, kind = self.raw(method, path, None if body is None else json.dumps(body).encode(), headers)
        return status, strict(raw) if kind.startswith("application/json") else raw.decode()

    def raw(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return response.status, response.read(), response.headers.get("Content-Type", "")
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.call("POST", path, body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        status, told = self.post("/v1/completions", prompt=prompt, **body)
        assert status == 200, told
        return told

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, each strict JSON; the last is the string [DONE]."""
        status, raw, kind = self.raw("POST", path, json.dumps(body | {"stream": True}).encode())
        assert status == 200, raw
        assert kind.startswith("text/event-stream")
        lines = [line for line in raw.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [strict(item) if item != "[DONE]" else item for item in data]

    def begin(self, path: str, **body: Any) -> http.client.HTTPConnection:
        """Send a request and leave the answer on the wire."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    @property
    def used_pages(self) -> int:
        return self.engine.stats.pages_used

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        _, text = self.call("GET", "/metrics")
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise AssertionError(f"no metric {name} {labels}")

    def stop(self) -> None:
        if self.thread.is_alive():
            self.server.begin_drain()
            self.thread.join(WAIT)
        assert not self.thread.is_alive()


def strict(raw: bytes | str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(raw, parse_constant=refuse)


@contextmanager
def live(path: Path, options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Live]:
    settings = {"max_tokens_in_cache": 4096} | settings
    server = Live(Engine.load(path, **settings), path, {"drain_seconds": 5.0} | (options or {}))
    try:
        yield server
    finally:
        server.stop()


def until(holds: Callable[[], bool], seconds: float = WAIT) -> float:
    """Wait for a condition; the seconds that took."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds, "it never came true"
        time.sleep(0.005)
    return time.monotonic() - start
