"""Row 31 over HTTP: exactly one BOS where the model wants one; chats, tools, truncation, tokenizing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.runtime.server.live import Live, live
from tests.tiny import byte_tokenizer, tiny_model

USER = [{"role": "user", "content": "Hi"}]
PRINTING = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SILENT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def checkpoint(directory: Path, adds: bool, template: str) -> Path:
    """`<s>` is BOS; `adds` has the tokenizer put it first by itself."""
    tiny_model(directory, vocab_size=260)
    byte_tokenizer(directory, bos_token="<s>", eos_token="</s>")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("adds", "template", "text_bos", "chat_bos"),
    [(True, PRINTING, 1, 1), (True, SILENT, 1, 1), (False, PRINTING, 0, 1), (False, SILENT, 0, 0)],
)
def test_exactly_one_bos(tmp_path: Path, adds: bool, template: str, text_bos: int, chat_bos: int) -> None:
    with live(checkpoint(tmp_path, adds, template)) as server:
        bos = PreTrainedTokenizerFast.from_pretrained(tmp_path).bos_token_id
        for body, expected in (
            ({"prompt": "Hi"}, text_bos),
            ({"prompt": "<s>Hi"}, 1),
            ({"messages": USER}, chat_bos),
            ({"prompt": "Hi", "add_special_tokens": False}, 0),
        ):
            ids = server.post("/tokenize", **body)[1]["tokens"]
            assert ids.count(bos) == expected, body
            assert ids[:expected] == [bos] * expected
        # what is tokenized is what is computed
        told = server.complete("Hi", max_tokens=0, echo=True, logprobs=0)
        assert told["usage"]["prompt_tokens"] == text_bos + 2
        chat = server.post("/v1/chat/completions", messages=USER, max_tokens=1)[1]
        assert chat["usage"]["prompt_tokens"] == chat_bos + len("[user]Hi")


def test_a_chat_is_the_text_that_its_template_prints(server: Live) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    begun = [*USER, {"role": "assistant", "content": "Once"}]
    for fields, text in (
        ({}, "[user]Hi[me]"),
        ({"add_generation_prompt": False}, "[user]Hi"),
        ({"messages": [{"role": "user", "content": parts}]}, "[user]Hi[me]"),
        ({"messages": begun, "continue_final_message": True}, "[user]Hi[assistant]Once"),
    ):
        status, chat = server.post("/v1/chat/completions", **({"messages": USER} | asked | fields))
        assert status == 200, chat
        plain = server.complete(text, **asked)["choices"][0]["text"]
        assert chat["choices"][0]["message"]["content"] == plain
        assert (
            server.post("/tokenize", prompt=text)[1]["tokens"]
            == (server.post("/tokenize", **({"messages": USER} | fields))[1]["tokens"])
        )


@pytest.fixture(scope="module")
def particular(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Its template knows tools, and refuses what is no user's message."""
    template = (
        "{% if tools %}<{{ tools[0].function.name }}>{% endif %}{% for m in messages %}"
        "{% if m.role != 'user' %}{{ raise_exception('users alone') }}{% endif %}{{ m.content }}{% endfor %}"
        "{{ mood }}"
    )
    with live(checkpoint(tmp_path_factory.mktemp("particular"), False, template)) as running:
        yield running


def test_tools_reach_a_template_that_knows_them(particular: Live) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for fields, text in (
        ({"tools": tools}, "<look>Hi"),
        ({}, "Hi"),
        ({"chat_template_kwargs": {"mood": "!"}}, "Hi!"),
    ):
        ids = particular.post("/tokenize", messages=USER, **fields)[1]["tokens"]
        assert particular.post("/detokenize", tokens=ids)[1]["prompt"] == text
    told = particular.post("/v1/chat/completions", messages=USER, tools=tools, max_tokens=1)[1]
    assert told["usage"]["prompt_tokens"] == len("<look>Hi")
    told = particular.post("/v1/chat/completions", messages=USER, tools=tools, tool_choice="none", max_tokens=1)[1]
    assert told["usage"]["prompt_tokens"] == len("Hi")


def test_a_template_that_refuses_is_a_400(particular: Live) -> None:
    status, told = particular.post("/v1/chat/completions", messages=[{"role": "system", "content": "x"}])
    assert status == 400
    assert "users alone" in told["error"]["message"]
    assert told["error"]["param"] == "messages"


def test_truncation_is_asked_for_and_counted(server: Live) -> None:
    """Row 35: never silent."""
    long = "y" * 600 + "abcdef"
    status, told = server.post("/v1/completions", prompt=long, max_tokens=4)
    assert status == 400
    assert "606 tokens" in told["error"]["message"]
    before = server.metric("compress:prompts_truncated_total")
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    cut = server.complete(long, truncate_prompt_tokens=6, echo=True, **asked)
    assert cut["choices"][0]["text"] == server.complete("abcdef", echo=True, **asked)["choices"][0]["text"]
    assert cut["usage"]["prompt_tokens"] == 6
    assert cut["usage"]["prompt_tokens_details"]["truncated_tokens"] == 600
    assert server.metric("compress:prompts_truncated_total") == before + 1
    assert server.metric("compress:prompt_tokens_truncated_total") >= 600
    uncut = server.complete("abc", truncate_prompt_tokens=6, **asked)
    assert uncut["usage"]["prompt_tokens_details"]["truncated_tokens"] == 0
    assert server.metric("compress:prompts_truncated_total") == before + 1


def test_tokenize_and_back(server: Live) -> None:
    text = "汉🙂é and so on"
    told = server.post("/tokenize", prompt=text, return_token_strs=True)[1]
    assert told["count"] == len(told["tokens"]) == len(text.encode())
    assert told["token_strs"][0] == "bytes:\\xe6"
    assert told["token_strs"][-1] == "n"
    assert told["max_model_len"] == 512
    assert server.post("/detokenize", tokens=told["tokens"])[1] == {"prompt": text}


def test_long_texts_hold_up_neither_health_nor_short_texts_nor_streams(server: Live) -> None:
    """Four of the longest, one after the other; what is quick is served between them."""
    long, told = "汉 " * (1 << 17), []
    threads = [threading.Thread(target=lambda: told.append(server.post("/tokenize", prompt=long))) for _ in range(4)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    quick = 0
    while len(told) == 0:
        assert server.call("GET", "/health")[0] == 200
        assert server.post("/tokenize", prompt="short")[1]["count"] == 5
        assert server.stream("/v1/completions", prompt="short", max_tokens=4)[-1] == "[DONE]"
        quick += 1
    first = time.monotonic() - start
    for thread in threads:
        thread.join()
    assert [(status, answer["count"]) for status, answer in told] == [(200, 4 << 17)] * 4
    assert quick >= 2, f"{quick} rounds in {first:.2f} s"


def test_special_tokens_are_shown_where_that_is_asked_for(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, False, SILENT)
    bos = PreTrainedTokenizerFast.from_pretrained(directory).bos_token_id
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(bos): 100}}
    with live(directory) as server:
        assert server.complete("Hi", **asked)["choices"][0]["text"] == ""
        assert server.complete("Hi", skip_special_tokens=False, **asked)["choices"][0]["text"] == "<s><s><s>"


def test_the_tokenizer_of_long_texts_is_copied_before_requests_come(server: Live) -> None:
    prompts = server.service.prompts
    assert vars(prompts)["_spare"] is not prompts._tokenizer
