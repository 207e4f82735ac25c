"""What an operator sees: metrics, failures of the engine, and a server that stops in order."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from compress.errors import UserError
from compress.runtime.request import Request
from compress.runtime.server.job import Job, Track
from compress.runtime.server.serve import bind
from compress.runtime.text import TextStream
from tests.product import run_cli
from tests.runtime.server.live import WAIT, Live, live, until
from tests.tiny import tiny_model

VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
num_preemptions prompt_tokens generation_tokens request_success time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds spec_decode_num_drafts
spec_decode_num_draft_tokens spec_decode_num_accepted_tokens"""


def test_metrics_are_vllms_under_our_prefix(tiny: Path) -> None:
    with live(tiny) as server:
        server.complete("abc", max_tokens=5, n=2, ignore_eos=True)
        server.complete("abcd", max_tokens=0, echo=True)
        families = {f.name: f for f in text_string_to_metric_families(server.call("GET", "/metrics")[1])}
        assert {f"compress:{suffix}" for suffix in VLLM.split()} <= set(families)
        expected = {
            "compress:generation_tokens_total": 10,
            "compress:prompt_tokens_total": 3 + 3 + 4,
            "compress:request_success_total": 3,
            "compress:time_to_first_token_seconds_count": 2,
            "compress:inter_token_latency_seconds_count": 8,
            "compress:request_time_per_output_token_seconds_count": 2,
            "compress:e2e_request_latency_seconds_count": 3,
            "compress:num_requests_running": 0,
            "compress:kv_cache_usage_perc": 0,
        }
        for name, value in expected.items():
            labels = {"finished_reason": "length"} if "success" in name else {}
            assert server.metric(name, model_name="tiny", **labels) == value, name
        for sample in families["compress:e2e_request_latency_seconds"].samples:
            assert sample.value >= 0
        assert server.post("/v1/completions", prompt="")[0] == 400
        assert server.metric("compress:requests_refused_total", status="400") == 1


def test_speculation_is_invisible_but_for_its_counters(tiny: Path) -> None:
    asked: dict[str, Any] = {"prompt": "abcabcabcabc", "max_tokens": 60, "temperature": 0, "logprobs": 1}
    with live(tiny) as plain:
        expected = plain.complete(**asked)["choices"]
    with live(tiny, speculate=4) as server:
        assert server.complete(**asked)["choices"] == expected
        events = server.stream("/v1/completions", **asked)[:-1]
        assert "".join(event["choices"][0]["text"] for event in events) == expected[0]["text"]
        assert server.metric("compress:spec_decode_num_draft_tokens_total") > 0


def test_a_draft_model_changes_no_answer(tiny: Path) -> None:
    asked: dict[str, Any] = {"prompt": "once upon", "max_tokens": 30, "temperature": 0}
    with live(tiny) as plain, live(tiny, draft=tiny, speculate=3) as server:
        assert server.complete(**asked)["choices"] == plain.complete(**asked)["choices"]
        drafted = server.metric("compress:spec_decode_num_draft_tokens_total")
        assert server.metric("compress:spec_decode_num_accepted_tokens_total") == drafted > 0, "its own draft"
    plainly = run_cli("generate", tiny, "--prompt", "once upon", "--max-tokens", 9)
    assert run_cli("generate", tiny, "--prompt", "once upon", "--max-tokens", 9, "--draft", tiny) == plainly
    assert plainly[0] == 0


class Broken:
    """An engine whose steps and aborts fail when told to."""

    def __init__(self, server: Live) -> None:
        self.step, self.abort = server.engine.step, server.engine.abort
        self.fail_step = self.fail_abort = False
        server.engine.step = self._step  # type: ignore[method-assign]
        server.engine.abort = self._abort  # type: ignore[method-assign]

    def _step(self) -> Any:
        if self.fail_step:
            raise RuntimeError("no memory")
        return self.step()

    def _abort(self, request: Any) -> None:
        if self.fail_abort:
            raise RuntimeError("no pages")
        self.abort(request)


def test_a_failed_step_ends_its_requests_and_nothing_else(tiny: Path) -> None:
    with live(tiny) as server:
        engine = Broken(server)
        streaming = server.begin("/v1/completions", prompt="x", max_tokens=400, ignore_eos=True, stream=True)
        response = streaming.getresponse()
        response.readline()
        engine.fail_step = True
        status, told = server.post("/v1/completions", prompt="y")
        assert (status, told["error"]["type"]) == (500, "server_error")
        assert "no memory" in told["error"]["message"]
        last = response.read().decode().strip().split("\n\n")[-1]
        assert "no memory" in json.loads(last.removeprefix("data: "))["error"]["message"], "no [DONE] after an error"
        streaming.close()
        engine.fail_step = False
        assert server.call("GET", "/health")[0] == 200
        assert server.used_pages == 0
        assert server.complete("z", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_choice_whose_text_fails_takes_no_thread_with_it(tiny: Path) -> None:
    class Mute:
        offsets: tuple[int, ...] = ()
        stopped_by: str | None = None

        def append(self, token: int) -> bool:
            return False

        def take(self) -> str:
            raise ValueError("mute")

        def finish(self) -> None: ...

    with live(tiny) as server:
        add = server.engine.add

        def mute(*arguments: Any) -> Request:
            request = add(*arguments)
            request.text = Mute()  # type: ignore[assignment]
            return request

        server.engine.add = mute  # type: ignore[method-assign]
        status, told = server.post("/v1/completions", prompt="x", max_tokens=2)
        assert (status, told["error"]["message"]) == (500, "the engine failed: ValueError: mute")
        server.engine.add = add  # type: ignore[method-assign]
        assert server.complete("x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
        until(lambda: server.used_pages == server.service.loop.open == 0)


def test_an_engine_that_cannot_recover_is_dead_and_says_so(tiny: Path) -> None:
    with live(tiny) as server:
        engine = Broken(server)
        engine.fail_step = engine.fail_abort = True
        assert server.post("/v1/completions", prompt="y")[0] == 500
        until(lambda: server.call("GET", "/health")[0] == 503)
        status, told = server.post("/v1/completions", prompt="y")
        assert status == 503
        assert "no pages" in told["error"]["message"]
        engine.fail_abort = False


def test_draining_finishes_what_runs_and_takes_no_more(tiny: Path) -> None:
    with live(tiny) as server:
        told: list[Any] = []
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        asking = threading.Thread(target=lambda: told.append(server.post("/v1/completions", **body)))
        asking.start()
        until(lambda: server.engine.stats.running == 1)
        server.service.draining = True
        status, refused = server.post("/v1/completions", prompt="y")
        assert status == 503
        assert "shutting down" in refused["error"]["message"]
        assert server.call("GET", "/health")[0] == 503
        server.service.draining = False
        server.server.begin_drain()
        asking.join(WAIT)
        assert told[0][0] == 200
        assert told[0][1]["usage"]["completion_tokens"] == 400
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


def test_draining_ends_what_takes_too_long(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, max_position_embeddings=65536)
    with live(directory, {"drain_seconds": 0.2}, max_tokens_in_cache=65536) as server:
        connection = server.begin("/v1/completions", prompt="x", max_tokens=60000, ignore_eos=True, stream=True)
        response = connection.getresponse()
        response.readline()
        server.server.begin_drain()
        rest = response.read().decode()
        assert "the server is shutting down" in rest
        assert not rest.rstrip().endswith("[DONE]")
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


def test_a_port_in_use_and_wrong_options_are_one_line(tiny: Path, server: Live) -> None:
    for arguments, message in (
        (("--port", server.port), "--port"),
        (("--max-model-len", 513, "--port", 0), "--max-model-len 513: the model has 512 positions"),
        (("--max-model-len", 161, "--kv-pages", 10, "--port", 0), "--max-model-len 161: the cache holds 160 tokens"),
        (("--draft-tokens", 3), "--draft-tokens needs --draft or --speculate"),
        (("--host", "256.0.0.1"), "--host 256.0.0.1"),
        (("--api-key", ""), "--api-key: the key is empty"),
        (("--api-key", "k "), "--api-key: the key begins or ends with white space"),
        (("--served-model-name", ""), "--served-model-name: a name must have at least 1 character"),
    ):
        code, _, err = run_cli("serve", tiny, *arguments)
        assert code == 2
        assert message in err.strip().splitlines()[-1]
        assert "Traceback" not in err


def test_an_idle_server_rests(tiny: Path) -> None:
    """No polling: no thread takes time while nothing is asked for."""
    with live(tiny) as server:
        server.complete("x", max_tokens=2)
        before = server.engine.stats.steps
        # its own time, not the process's: other tests may have left threads that end while this one looks
        thread = [thread for thread in threading.enumerate() if thread.name == "engine"][-1]  # the youngest
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        start = time.clock_gettime(clock)
        time.sleep(0.5)
        assert server.engine.stats.steps == before
        assert time.clock_gettime(clock) - start < 0.1


def test_nothing_of_a_finished_request_is_kept(tiny: Path) -> None:
    """Memory stays flat: whole answers, streams, refusals, several choices, and clients that went."""
    kept = (Request, Job, Track, TextStream)

    def alive() -> dict[str, int]:
        gc.collect()
        return {kind.__name__: sum(type(thing) is kind for thing in gc.get_objects()) for kind in kept}

    with live(tiny) as server:
        server.complete("warm", max_tokens=2)
        before = alive()
        for number in range(10):
            server.complete("whole", max_tokens=3, n=2, logprobs=1, echo=True)
            server.stream("/v1/completions", prompt="streamed", max_tokens=3, seed=number)
            server.post("/v1/completions", prompt=[[1], [999]])
            connection = server.begin("/v1/completions", prompt="gone", max_tokens=400, ignore_eos=True)
            until(lambda: server.engine.stats.running > 0)
            connection.close()
            until(lambda: server.service.loop.open == 0)
        server.complete("cold", max_tokens=2)
        until(lambda: alive() == before, 10.0)


def test_accepted_connections_send_at_once() -> None:
    """asyncio sets TCP_NODELAY only where a socket states its protocol."""
    sock = bind("127.0.0.1", 0)
    try:
        assert sock.proto == socket.IPPROTO_TCP
        with socket.create_connection(sock.getsockname()[:2]):
            accepted, _ = sock.accept()
            with accepted:
                assert accepted.proto == socket.IPPROTO_TCP
    finally:
        sock.close()


def test_a_second_server_on_a_port_is_told_before_it_loads() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    try:
        with pytest.raises(UserError, match=f"--host 127.0.0.1 --port {port}: .*in use"):
            bind("127.0.0.1", port)
    finally:
        first.close()
