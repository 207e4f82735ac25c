"""Row 27: a client that goes frees its pages within a second, whatever it had asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.server.live import Live, live, until
from tests.tiny import tiny_model

LONG: dict[str, Any] = {"prompt": "hello there", "max_tokens": 3900, "ignore_eos": True}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Long answers, so that a request never ends by itself while a test looks; few run at once, so others queue."""
    directory = tiny_model(tmp_path_factory.mktemp("roomy"), max_position_embeddings=4096)
    with live(directory, max_tokens_in_cache=65536, max_running=6) as running:
        yield running


def free(server: Live) -> bool:
    stats = server.engine.stats
    return stats.pages_used == stats.running == stats.waiting == server.service.loop.open == 0


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"n": 2}, {"n": 2, "stream": True}, {"prompt": ["a", "b"]}])
def test_a_client_that_goes_frees_its_pages(roomy: Live, fields: dict[str, Any]) -> None:
    connection = roomy.begin("/v1/completions", **(LONG | fields))
    until(lambda: roomy.engine.stats.generated_tokens > 0 and roomy.used_pages > 0)
    connection.close()
    assert until(lambda: free(roomy)) < 1.0


def test_twenty_clients_go_at_once(roomy: Live) -> None:
    kinds: list[dict[str, Any]] = [{"stream": True}, {}, {"n": 2}, {"stream": True, "n": 2}]
    connections = [roomy.begin("/v1/completions", **(LONG | kinds[i % 4])) for i in range(20)]
    until(lambda: roomy.engine.stats.running == 6 and roomy.engine.stats.waiting == 24)
    aborted = roomy.metric("compress:request_success_total", finished_reason="abort")
    for connection in connections:
        connection.close()
    assert until(lambda: free(roomy)) < 1.0
    roomy.engine.scheduler.check()
    assert roomy.metric("compress:request_success_total", finished_reason="abort") == aborted + 30
    assert roomy.complete("next", max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4


def test_one_that_waits_goes_without_a_trace(roomy: Live) -> None:
    running = [roomy.begin("/v1/completions", **LONG) for _ in range(6)]
    until(lambda: roomy.engine.stats.running == 6)
    waiting = roomy.begin("/v1/completions", **(LONG | {"stream": True}))
    until(lambda: roomy.engine.stats.waiting == 1)
    waiting.close()
    assert until(lambda: roomy.engine.stats.waiting == 0) < 1.0
    assert roomy.engine.stats.running == 6
    for connection in running:
        connection.close()
    until(lambda: free(roomy))


def test_a_chat_stream_is_left_in_the_middle(server: Live) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "stream": True}
    connection = server.begin("/v1/chat/completions", **body)
    response = connection.getresponse()
    response.readline()
    response.close()
    connection.close()
    until(lambda: free(server))


def test_a_slow_reader_holds_up_nobody(roomy: Live) -> None:
    slow = roomy.begin("/v1/completions", **(LONG | {"stream": True, "max_tokens": 1000}))
    start = time.monotonic()
    until(lambda: roomy.engine.stats.running == 1)
    assert roomy.complete("quick", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    until(lambda: free(roomy))  # its tokens are computed though nobody has read them
    told = slow.getresponse().read()
    assert told.endswith(b"data: [DONE]\n\n"), time.monotonic() - start
    slow.close()
