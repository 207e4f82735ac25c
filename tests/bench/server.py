"""A server of `/v1/completions` whose delays are known, and whose faults are chosen."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """Each request takes `first` seconds to its first piece and `gap` seconds to each further one."""

    first: float = 0.05
    gap: float = 0.02
    width: int = 1  # tokens in a piece
    refuse_every: int | None = None  # HTTP 503 to every so-many-th request
    status: int = 503
    body: str = '{"error": {"message": "queue\\n is full", "code": 503}}'
    dies_after: int | None = None  # pieces of the stream after which the server closes it, and its port
    cut_after: int | None = None  # pieces after which a stream is cut, while the server lives
    error_after: int | None = None  # pieces after which an error is streamed
    usage: bool = True
    closing_event: bool = True  # an event with a finish reason and no text
    halves: bool = False  # events are sent in two writes
    models: Any = field(default_factory=lambda: [{"id": "tiny", "max_model_len": 64}, {"id": "other"}])
    asked: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    behaviour: Behaviour

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.behaviour.authorizations.append(self.headers.get("Authorization"))
        self._plain(200, json.dumps({"object": "list", "data": self.behaviour.models}))

    def do_POST(self) -> None:
        behaviour = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behaviour.asked.append(body)
        if behaviour.refuse_every and len(behaviour.asked) % behaviour.refuse_every == 0:
            self._plain(behaviour.status, behaviour.body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._stream(body["max_tokens"])

    def _stream(self, tokens: int) -> None:
        behaviour, sent, pieces = self.behaviour, 0, 0
        while sent < tokens:
            time.sleep(behaviour.gap if pieces else behaviour.first)
            if pieces == behaviour.error_after:
                self._event({"error": {"message": "the engine failed", "type": "server_error"}})
                break
            if pieces in (behaviour.dies_after, behaviour.cut_after):
                if behaviour.dies_after is not None:
                    self.server.server_close()
                self.close_connection = True
                self.connection.close()
                return
            sent, pieces = min(tokens, sent + behaviour.width), pieces + 1
            self._event({"choices": [{"index": 0, "text": "ab", "finish_reason": None}]})
        if behaviour.closing_event:
            time.sleep(behaviour.gap)
            self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if behaviour.usage:
            self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": sent}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        if self.behaviour.halves:
            self._chunk(data[:20])
            self._chunk(data[20:])
        else:
            self._chunk(data)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _plain(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away, or a stream that a fault closed."""


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The address of a server on a free port, in a thread of its own."""
    handler = type("ChosenHandler", (Handler,), {"behaviour": behaviour})
    server = Server(("127.0.0.1", 0), handler)
    # shutdown() is not called: a server that died has closed its own socket, which ends the loop by an error
    thread = threading.Thread(target=_serve, args=(server,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        if behaviour.dies_after is None:
            server.shutdown()
            server.server_close()


def _serve(server: Server) -> None:
    with contextlib.suppress(OSError, ValueError):  # its socket was closed under it: it died
        server.serve_forever(poll_interval=0.05)
