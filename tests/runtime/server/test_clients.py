"""OpenAI's own client, and what it finds in answers and streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.runtime.server.live import WAIT, Live, live
from tests.runtime.server.successor import byte_id, successor_model

USER: Any = [{"role": "user", "content": "hello"}]
WORDS = "a汉🙂éz"  # one, three, four and two bytes: no byte occurs twice


def client_of(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """After "a", the model says the rest of WORDS, and ends."""
    directory = successor_model(tmp_path_factory.mktemp("said"), WORDS.encode())
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with live(directory) as running:
        yield running


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 24, "temperature": 0.9, "seed": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == len("[user]hello[me]")
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": ["one", "two"], "max_tokens": 12, "n": 2, "seed": 1, "logprobs": 2, "echo": True
    }  # fmt: skip
    whole = client.completions.create(**asked)
    parts: dict[int, str] = dict.fromkeys(range(4), "")
    tokens: dict[int, list[str]] = {index: [] for index in range(4)}
    scores: dict[int, list[float]] = {index: [] for index in range(4)}
    ends: dict[int, str] = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
                scores[choice.index] += choice.logprobs.token_logprobs or []
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        assert parts[choice.index] == choice.text
        assert choice.text.startswith("one" if choice.index < 2 else "two")
        assert choice.logprobs is not None
        assert tokens[choice.index] == choice.logprobs.tokens
        assert scores[choice.index] == choice.logprobs.token_logprobs
        assert ends[choice.index] == choice.finish_reason
    assert len({choice.text for choice in whole.choices}) == 4


def test_chat_logprobs_have_bytes_and_the_likeliest(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.logprob == entry.top_logprobs[0].logprob
    joined = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert joined.decode("utf-8", "replace") == answer.choices[0].message.content


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p must be above 0"):
        client.completions.create(model="tiny", prompt="x", top_p=0)
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize("chat", [False, True])
def test_characters_of_several_bytes_come_whole(said: Live, chat: bool) -> None:
    """Row 25."""
    client = client_of(said)
    if chat:
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
        whole = client.chat.completions.create(**asked).choices[0]
        told = whole.message.content
        deltas = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
    else:
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 50, "temperature": 0}
        whole = client.completions.create(**asked).choices[0]
        told = whole.text
        deltas = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert told == "汉🙂éz"
    assert [delta for delta in deltas if delta] == ["汉", "🙂", "é", "z"]
    assert whole.finish_reason == "stop"


def test_a_character_cut_by_the_limit_is_flushed(said: Live) -> None:
    told = said.complete("a", max_tokens=5, temperature=0)["choices"][0]
    assert (told["text"], told["finish_reason"]) == ("汉\ufffd", "length")
    events = said.stream("/v1/completions", prompt="a", max_tokens=5, temperature=0)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "汉\ufffd"


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tmp_path_factory.mktemp("stopping")
    with live(successor_model(directory, b"_abXYZcd", eos=[7, 5], then=5)) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "XYZ"}, "ab", "stop"),
        ({"stop": ["XYZ"], "include_stop_str_in_output": True}, "abXYZ", "stop"),
        ({"stop": ["XYQ"]}, "abXYZcd", "stop"),
        ({"stop": ["dQ"]}, "abXYZcd", "stop"),  # held back, then the end
        ({"stop": ["XYZ"], "max_tokens": 4}, "abXY", "length"),
        ({"stop": ["XYZ"], "min_tokens": 6}, "abXYZcd", "stop"),
    ],
)
def test_stop_strings_and_ends(stopping: Live, fields: dict[str, Any], text: str, reason: str) -> None:
    """Row 26: nothing of a stop string is shown, nothing held back is lost, and any of the model's ends ends."""
    asked = {"max_tokens": 50, "temperature": 0} | fields
    told = stopping.complete("_", **asked)["choices"][0]
    assert (told["text"], told["finish_reason"]) == (text, reason)
    events = [event["choices"][0] for event in stopping.stream("/v1/completions", prompt="_", **asked)[:-1]]
    assert "".join(event["text"] for event in events) == text
    assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + [reason]


def test_stop_token_ids_and_ignored_ends(stopping: Live) -> None:
    stop = byte_id(stopping.engine.path, ord("Z"))
    told = stopping.complete("_", max_tokens=50, temperature=0, stop_token_ids=[stop])["choices"][0]
    assert (told["text"], told["finish_reason"]) == ("abXY", "stop")
    told = stopping.complete("_", max_tokens=9, temperature=0, ignore_eos=True)
    assert told["usage"]["completion_tokens"] == 9
    assert told["choices"][0]["finish_reason"] == "length"


def test_a_checkpoint_without_template_or_tokenizer(stopping: Live, tmp_path: Path) -> None:
    status, told = stopping.post("/v1/chat/completions", messages=USER)
    assert status == 400
    assert "no chat template" in told["error"]["message"]
    bare = successor_model(tmp_path, b"_abXYZcd")
    ids = [byte_id(bare, byte) for byte in b"_abXYZcd"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with live(bare) as server:
        status, told = server.post("/v1/completions", prompt="_")
        assert status == 400
        assert "token ids" in told["error"]["message"]
        told = server.complete(ids[:1], max_tokens=3, temperature=0, logprobs=1)["choices"][0]
        assert told["text"] == ""
        assert told["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids[1:4]]
