"""What the server refuses, and how it says so: field, limit, nearest right name; and nobody else notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.runtime.server.live import Live, live

LENGTH = 512  # positions of the tiny model
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
LONG = "x" * ((1 << 18) + 1)

BAD: list[tuple[str, dict[str, Any], str, str | None]] = [
    (COMPLETIONS, {"prompt": ""}, "prompt must have at least 1 token", "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt must have at least 1 token", "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt must be a text", "prompt"),
    (COMPLETIONS, {"prompt": [1, 256]}, "256 is out of range; ids go from 0 to 255", "prompt"),
    (COMPLETIONS, {"prompt": [1, -1]}, "-1 is out of range", "prompt"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt must be", "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "lists of token ids, all of one kind", "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt: Input should be a string or a list, not 5", "prompt"),
    (COMPLETIONS, {"prompt": "x", "stop": 5}, "stop: Input should be a string or a list, not 5", "stop"),
    (COMPLETIONS, {"prompt": ["x"] * 4, "n": 100}, "n: 400 choices in one request; at most 320", "n"),
    (CHATS, {"messages": [{"role": "user", "content": "x" * LENGTH}]}, "messages have ", "messages"),
    (CHATS, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "messages cannot", "chat_template_kwargs"),
    (COMPLETIONS, {}, "prompt: Field required", "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens must be at least 1, not -1", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens: ", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": LENGTH}, "the limit of both is 512", "max_tokens"),
    (COMPLETIONS, {"prompt": "x" * LENGTH, "max_tokens": 1}, "prompt has 512 tokens", "prompt"),
    (COMPLETIONS, {"prompt": "x" * 400_000}, "400000 characters are more than the context of 512", "prompt"),
    (CHATS, {"messages": [{"role": "user", "content": "x" * 400_000}]}, "characters are more than", "messages"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"256": 1}}, "between 0 and 255, not 256", "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "keys must be token ids", "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 101}}, "between -100 and 100", "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, "temperature must be", "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "1"}, "temperature: ", "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p must be above 0", "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, "top_k must be", "top_k"),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, "min_p must be between 0 and 1", "min_p"),
    (COMPLETIONS, {"prompt": "x", "presence_penalty": 3}, "between -2 and 2", "presence_penalty"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "between 0.01 and 10", "repetition_penalty"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 1e-45}, "between 0.01 and 10", "repetition_penalty"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n must be between 1 and 128", "n"),
    (COMPLETIONS, {"prompt": "x", "n": 129}, "n must be between 1 and 128", "n"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of", "best_of"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs must be between 0 and 20", "logprobs"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop", "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["y"] * 65}, "at most 64", "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [999]}, "between 0 and 255, not 999", "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 99, "max_tokens": 9}, "max_tokens, 9", "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed must be", "seed"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix is not supported", "suffix"),
    (COMPLETIONS, {"prompt": "x", "guided_regex": "a+"}, "guided_regex is not supported", "guided_regex"),
    (COMPLETIONS, {"prompt": "x", "max_token": 1}, "did you mean 'max_tokens'?", "max_token"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "needs stream", "stream_options"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"a": 1}}, "stream_options.a", "stream_options"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "do not go together", "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, "greater than or equal to 1", "truncate_prompt_tokens"),
    (CHATS, {}, "messages: Field required", "messages"),
    (CHATS, {"messages": []}, "messages: ", "messages"),
    (CHATS, {"messages": [{"content": "x"}]}, "messages[0].role: Field required", "messages"),
    (CHATS, {"messages": [{"role": "user", "contents": "x"}]}, "did you mean 'content'?", "messages"),
    (
        CHATS,
        {"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
        "messages[1].content[1].type: this server takes parts of type 'text' alone, not 'image_url'",
        "messages",
    ),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text: Field req", "messages"),
    (CHATS, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content: Input should be", "messages"),
    (CHATS, {"messages": USER, "tools": [{"type": "function"}]}, "knows no tools", "tools"),
    (
        CHATS,
        {"messages": USER, "chat_template_kwargs": {"chat_template": "x"}},
        "cannot be set",
        "chat_template_kwargs",
    ),
    (CHATS, {"messages": USER, "top_logprobs": 3}, "needs logprobs: true", "top_logprobs"),
    (CHATS, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "between 0 and 20", "top_logprobs"),
    (CHATS, {"messages": USER, "max_completion_tokens": 600}, "max_completion_tokens 600", "max_completion_tokens"),
    (CHATS, {"messages": USER, "max_completion_tokens": 6, "max_tokens": 7}, "differ; give one", "max_tokens"),
    (CHATS, {"messages": USER, "response_format": {"type": "json_object"}}, "is not supported", "response_format"),
    (CHATS, {"messages": USER, "functions": [{}]}, "functions is not supported", "functions"),
    (
        CHATS,
        {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
        "do not go together",
        "continue_final_message",
    ),
    ("/tokenize", {}, "one of the two", "prompt"),
    ("/tokenize", {"prompt": "x", "tokens": []}, "tokens: unknown field", "tokens"),
    ("/tokenize", {"prompt": LONG}, "262145 characters are more than 262144, the limit", "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "characters are more than 262144", "messages"),
    (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 5}, "characters are more than 262144", "prompt"),
    ("/detokenize", {"tokens": [5] * ((1 << 18) + 1)}, "262145 ids; at most 262144 are decoded", "tokens"),
    ("/detokenize", {"tokens": [256]}, "ids go from 0 to 255", "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens: ", "tokens"),
]


@pytest.mark.parametrize(("path", "body", "message", "param"), BAD, ids=lambda part: str(part)[:60])
def test_a_bad_request_names_field_and_limit(
    server: Live, path: str, body: dict[str, Any], message: str, param: str | None
) -> None:
    """Row 28."""
    status, told = server.post(path, **body)
    assert status == 400, told
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert message in told["error"]["message"]
    assert "\n" not in told["error"]["message"]
    if param is not None:
        assert told["error"]["param"] == param
    assert told["error"]["type"] == "invalid_request_error"
    assert server.used_pages == 0


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"[" * 100_000, b'{"prompt": "x", "temperature": NaN}', b"\xff\xfe",
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": 1e999}',
    ],
    ids=lambda body: body[:12],
)  # fmt: skip
def test_what_is_no_body_is_a_400(server: Live, body: bytes) -> None:
    status, raw, _ = server.raw("POST", COMPLETIONS, body)
    assert status == 400, raw
    assert server.call("GET", "/health")[0] == 200


def test_a_body_that_is_no_object_is_told_what_to_send(server: Live) -> None:
    body, form = b'{"prompt": "x"}', {"Content-Type": "application/x-www-form-urlencoded"}
    status, raw, _ = server.raw("POST", COMPLETIONS, body, form)
    assert status == 400
    assert b'"the body must be a JSON object; send Content-Type: application/json"' in raw
    assert b'"the body must be a JSON object"' in server.raw("POST", COMPLETIONS, b"[]")[1]


def test_half_a_surrogate_pair_neither_fails_nor_leaks_into_the_answer(server: Live) -> None:
    status, raw, _ = server.raw("POST", COMPLETIONS, b'{"prompt": "a\\ud83d", "echo": true, "max_tokens": 1}')
    assert status == 200
    raw.decode()
    status, raw, _ = server.raw("POST", COMPLETIONS, b'{"prompt": "a", "model": "\\ud83d"}')
    assert status == 400
    raw.decode()


@pytest.mark.parametrize(("length", "status"), [(LENGTH - 2, 200), (LENGTH - 1, 200), (LENGTH, 400), (LENGTH + 1, 400)])
def test_the_limit_of_the_context_is_exact(server: Live, length: int, status: int) -> None:
    """Row 28: a prompt of so many tokens, and one new token."""
    got, told = server.post(COMPLETIONS, prompt=[5] * length, max_tokens=1)
    assert got == status, told
    got, told = server.post(COMPLETIONS, prompt=[5] * length, max_tokens=0, echo=True, logprobs=1)
    assert got == (200 if length <= LENGTH else 400), told


def test_a_default_is_cut_to_what_fits_and_a_wish_is_not(server: Live) -> None:
    told = server.complete([5] * (LENGTH - 3), ignore_eos=True)
    assert told["usage"]["completion_tokens"] == 3
    assert server.post(COMPLETIONS, prompt=[5] * (LENGTH - 3), max_tokens=16)[0] == 400
    status, told = server.post(CHATS, messages=USER, ignore_eos=True)
    assert status == 200
    assert told["usage"]["total_tokens"] == LENGTH


def test_fields_that_change_nothing_are_accepted(server: Live) -> None:
    completion = {"user": "me", "best_of": 1, "n": 1, "suffix": None, "use_beam_search": False, "model": "tiny"}
    assert server.post(COMPLETIONS, prompt="x", max_tokens=1, **completion)[0] == 200
    chat = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "functions": None,
        "response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none", "tools": [{}],
        "parallel_tool_calls": True, "logprobs": False, "stop": None, "seed": None, "temperature": None, "n": None,
    }  # fmt: skip
    assert server.post(CHATS, messages=USER, max_tokens=1, **chat)[0] == 200


def test_bad_requests_among_good_streams_change_nothing(server: Live) -> None:
    """Row 28: twelve bad requests between four good streams."""
    asked = [{"prompt": f"stream {i}", "max_tokens": 120, "temperature": 0.8, "seed": i} for i in range(4)]
    alone = [server.complete(**body)["choices"][0]["text"] for body in asked]
    texts: dict[int, str] = {}

    def stream(number: int) -> None:
        events = server.stream(COMPLETIONS, **asked[number])
        texts[number] = "".join(event["choices"][0]["text"] for event in events[:-1])

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    statuses = [server.post(path, **body)[0] for path, body, _, _ in BAD[:12]]
    assert server.call("GET", "/health") == (200, {"status": "ok"})
    for thread in threads:
        thread.join()
    assert statuses == [400] * 12
    assert [texts[number] for number in range(4)] == alone
    assert server.used_pages == 0


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/v1/models", "/v1/models/tiny", "/openapi.json"])
def test_head_is_get_without_a_body(server: Live, path: str) -> None:
    status, raw, kind = server.raw("HEAD", path)
    assert (status, raw) == (200, b"")
    assert kind == server.raw("GET", path)[2]


def test_unknown_routes_models_and_methods(server: Live) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("POST", "/health", 405)):
        got, told = server.call(method, path, {} if method == "POST" else None)
        assert got == status
        assert path in told["error"]["message"]
    status, told = server.post(COMPLETIONS, prompt="x", model="other")
    assert status == 404
    assert told["error"]["code"] == "model_not_found"


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Live]:
    options = {"api_key": "s3cret", "max_body_bytes": 2000, "max_n": 4, "max_queue": 2, "max_model_len": 100}
    with live(tiny, options, max_running=2) as running:
        yield running


KEY = {"Authorization": "Bearer s3cret"}


def test_the_key(narrow: Live) -> None:
    for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}, {"Authorization": "Bearer é"}):
        status, told = narrow.call("GET", "/v1/models", headers={k: v.encode("latin-1") for k, v in headers.items()})  # type: ignore[misc]
        assert status == 401
        assert told["error"]["code"] == "invalid_api_key"
    assert narrow.call("GET", "/v1/models", headers=KEY)[0] == 200
    assert narrow.call("GET", "/v1/models", headers={"authorization": "bearer s3cret"})[0] == 200
    assert narrow.call("GET", "/health")[0] == 200


def test_a_401_names_the_scheme(narrow: Live) -> None:
    with pytest.raises(HTTPError) as refused:
        urlopen(f"{narrow.url}/v1/models", timeout=60)
    assert refused.value.code == 401
    assert refused.value.headers["WWW-Authenticate"] == "Bearer"


def test_a_large_body(narrow: Live) -> None:
    body = b'{"prompt": "' + b"x" * 2000 + b'"}'
    contents: list[Any] = [body, iter([body[:1000], body[1000:]])]  # an iterator is sent in chunks
    for content in contents:
        status, raw, _ = narrow.raw("POST", COMPLETIONS, content, KEY)
        assert status == 413
        assert b"larger than 2000 bytes" in raw
    status, raw, _ = narrow.raw("POST", COMPLETIONS, b"x" * 1_000_000, KEY)
    assert status == 413


def test_options_are_the_limits(narrow: Live) -> None:
    for body, message in (({"n": 5}, "between 1 and 4"), ({"max_tokens": 100}, "limit of both is 100")):
        status, told = narrow.call("POST", COMPLETIONS, {"prompt": "x"} | body, KEY)
        assert status == 400
        assert message in told["error"]["message"]
    status, told = narrow.call("POST", COMPLETIONS, {"prompt": ["x"] * 5}, KEY)
    assert status == 400
    assert "at most 4 can wait" in told["error"]["message"]


def test_a_full_queue_says_when_to_come_again(narrow: Live) -> None:
    import http.client
    import json

    body = {"prompt": "x", "n": 4, "max_tokens": 90, "ignore_eos": True, "stream": True}
    streaming = http.client.HTTPConnection("127.0.0.1", narrow.port, timeout=60)
    streaming.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"} | KEY)
    response = streaming.getresponse()
    response.readline()
    second = http.client.HTTPConnection("127.0.0.1", narrow.port, timeout=60)
    second.request("POST", COMPLETIONS, json.dumps({"prompt": "y"}), {"Content-Type": "application/json"} | KEY)
    refused = second.getresponse()
    told = json.loads(refused.read())
    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert told["error"]["code"] == "queue_full"
    assert response.read().endswith(b"data: [DONE]\n\n")
    assert narrow.call("POST", COMPLETIONS, {"prompt": "y", "max_tokens": 1}, KEY)[0] == 200
