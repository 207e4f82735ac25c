"""uvicorn around the application: bound before the model is loaded, and drained before it stops."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from compress.errors import UserError
from compress.runtime.server.app import build_app
from compress.runtime.server.service import Service

BACKLOG = 2048  # connections that wait to be accepted
FLUSH_SECONDS = 5  # for responses that are written, once nothing runs any more


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is told before a model is loaded. Port 0 takes a free one.

    Connections that come before anything is answered wait in its backlog.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is stated: 40 ms of each request otherwise
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)  # two sockets may be bound to one port, but only one of them listens
    except OSError as error:
        sock.close()
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}") from error
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def context_length(engine: Any, asked: int | None) -> int:
    """Tokens of a prompt and its answer: as asked, or as many as model and cache take. Raises UserError if too many."""
    positions = engine.spec.max_positions
    held = engine.scheduler.pool.total * engine.scheduler.pool.page_size
    if asked is None:
        return min(positions, held)
    if asked > positions:
        raise UserError(f"--max-model-len {asked}: the model has {positions} positions")
    if asked > held and engine.scheduler.window is None:  # behind a window, pages become free on the way
        raise UserError(f"--max-model-len {asked}: the cache holds {held} tokens (--kv-pages)")
    return asked


class Server(uvicorn.Server):
    """The first SIGTERM or Ctrl-C drains and ends with exit code 0; the second ends at once, as an unhandled one would.

    `say` tells the operator, a line at a time.
    """

    def __init__(self, service: Service, ready: Callable[[], None], say: Callable[[str], None]) -> None:
        config = uvicorn.Config(
            build_app(service),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=FLUSH_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._service = service
        self._ready, self._say = ready, say
        self._events: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._events = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining or self._events is None:
            # at once: neither a step of the engine nor a client that reads slowly is waited for
            os.write(2, b"terminated\n" if sig == signal.SIGTERM else b"interrupted\n")
            os._exit(128 + sig)
        self.begin_drain()

    def begin_drain(self) -> None:
        """From any thread, or a signal's handler."""
        assert self._events is not None
        self._service.draining = True
        self._events.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        # whatever is cancelled from here on was told to end; uvicorn would print a traceback for each
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        seconds, running = self._service.options.drain_seconds, self._service.loop.open
        have = "1 answer has" if running == 1 else f"{running} answers have"
        wait = f"; {have} {seconds:g} s to finish; another signal ends at once" if running else ""
        self._say(f"stopping{wait}")
        cut = await self._service.drain()
        if cut:
            self._say(f"{'1 answer was' if cut == 1 else f'{cut} answers were'} cut after {seconds:g} s")
        self.should_exit = True


def serve(service: Service, sock: socket.socket, ready: Callable[[], None], say: Callable[[str], None]) -> None:
    """Serve until told to stop; `ready` is called once requests are answered."""
    Server(service, ready, say).run(sockets=[sock])
