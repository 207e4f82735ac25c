"""SIGTERM and Ctrl-C, as an operator sends them: while the model is loaded, while requests run, and again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from compress.runtime.server.serve import FLUSH_SECONDS
from tests.runtime.server.live import WAIT, live, until

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: "
SIGNALS = pytest.mark.parametrize(("sent", "word"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])


def start(tiny: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "compress.cli", "serve", str(tiny), "--port", "0", "--kv-pages", "64", *options]
    environment = os.environ | {"COMPRESS_API_KEY": "k", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def process(tiny: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`compress serve` as a user starts it, on a link that gives the model its name, and its address."""
    link = tmp_path / "linked"
    link.symlink_to(tiny)
    running = start(link)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("serving linked on http://127.0.0.1:"), line + (running.communicate()[1] or "")
        yield running, line.split()[-1]
    finally:
        running.kill()
        running.communicate()


def ended(running: subprocess.Popen[str], within: float = WAIT) -> tuple[int, str]:
    """Exit code and stderr."""
    code = running.wait(within)
    assert running.stderr is not None
    return code, running.stderr.read()


@SIGNALS
def test_a_signal_drains_with_exit_code_0(
    process: tuple[subprocess.Popen[str], str], sent: signal.Signals, word: str
) -> None:
    running, url = process
    with urlopen(f"{url}/health", timeout=WAIT) as response:
        assert json.loads(response.read()) == {"status": "ok"}
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt="x", max_tokens=450, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    running.send_signal(sent)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length", "it is allowed to finish"
    told = "stopping; 1 answer has 30 s to finish; another signal ends at once\n"
    assert ended(running) == (0, told)


@SIGNALS
def test_a_second_signal_ends_at_once(
    process: tuple[subprocess.Popen[str], str], sent: signal.Signals, word: str
) -> None:
    running, url = process
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 450, "ignore_eos": True, "n": 128, "stream": True}).encode()
    with socket.create_connection((host, int(port))) as whole:
        whole.sendall(f"{HEAD}{len(body)}\r\n\r\n".encode() + body)
        assert whole.recv(15) == b"HTTP/1.1 200 OK"
        running.send_signal(sent)
        time.sleep(0.2)  # two signals at once would be one
        running.send_signal(sent)
        code, err = ended(running)
    assert code == 128 + sent
    assert err.splitlines()[1:] == [word]


@SIGNALS
@pytest.mark.skipif(sys.platform != "linux", reason="looks at what the process has loaded")
def test_a_signal_while_loading_is_one_line(tiny: Path, sent: signal.Signals, word: str) -> None:
    running = start(tiny)
    try:
        maps = Path(f"/proc/{running.pid}/maps")
        until(lambda: "libtorch" in maps.read_text())
        running.send_signal(sent)
        code, err = ended(running)
        assert (code, err) == (128 + sent, f"{word}\n")
        assert running.stdout is not None
        assert running.stdout.read() == ""
    finally:
        running.kill()
        running.communicate()


def test_a_request_half_sent_holds_up_nothing(tiny: Path) -> None:
    """Half a body is refused with 503; half a head, and connections without a request, are closed."""
    parts = [f"{HEAD}100\r\n\r\n{{", HEAD, "", HEAD.replace("Bearer k", "wrong") + "100\r\n\r\n{"]
    with live(tiny, {"api_key": "k"}) as server:
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) for _ in parts]
        try:
            for connection, part in zip(connections, parts, strict=True):
                connection.sendall(part.encode())
            until(lambda: len(server.service.bodies) == 2)
            start = time.monotonic()
            server.server.begin_drain()
            answers = [b"".join(iter(lambda c=connection: c.recv(4096), b"")) for connection in connections]
            server.thread.join(WAIT)
            assert time.monotonic() - start < FLUSH_SECONDS, "what a response has for its way"
        finally:
            for connection in connections:
                connection.close()
    assert [answer[9:12] for answer in answers] == [b"503", b"", b"", b"401"]
    assert b"shutting down" in answers[0]
    assert server.said == ["stopping"]
