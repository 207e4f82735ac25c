"""Numbers in answers: log-probabilities against Hugging Face, penalties, seeds, and independence of company."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.runtime.request import TokenLogprobs
from compress.runtime.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from compress.runtime.server.sampling import finite
from compress.runtime.server.sse import encode
from tests.runtime.server.live import Live, strict

PROMPTS = [[72, 101, 108, 108, 111], [5, 6, 7], list(range(40, 90)), [200]]


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def scores(reference: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [S, V] of what follows each token."""
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), -1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_tells_the_models_logprobs(server: Live, reference: Any, max_tokens: int) -> None:
    """Row 35: as lm-eval asks. Aligned, the first null, the chosen among the likeliest as the very same number."""
    told = server.complete(PROMPTS, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1234)
    assert [choice["index"] for choice in told["choices"]] == list(range(len(PROMPTS)))
    for choice, prompt in zip(told["choices"], PROMPTS, strict=True):
        given = choice["logprobs"]
        lengths = {len(given[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert lengths == {len(prompt) + max_tokens}
        assert given["token_logprobs"][0] is given["top_logprobs"][0] is None
        expected = scores(reference, prompt)
        for position in range(1, len(prompt)):
            mine = given["token_logprobs"][position]
            assert abs(mine - float(expected[position - 1, prompt[position]])) < 1e-3
            likeliest = max(given["top_logprobs"][position].values())
            assert abs(likeliest - float(expected[position - 1].max())) < 1e-3
            assert mine in given["top_logprobs"][position].values()
            assert (mine == likeliest) == (int(expected[position - 1].argmax()) == prompt[position])
        if max_tokens:
            assert given["token_logprobs"][-1] == max(given["top_logprobs"][-1].values()), "greedy"


def test_offsets_cut_the_text_into_its_tokens(server: Live) -> None:
    told = server.complete("héllo 汉 ", max_tokens=0, logprobs=0, echo=True)["choices"][0]
    offsets = told["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[:4] == [0, 1, 1, 2], "é is two tokens, and both begin where it begins"
    for token, start in zip(told["logprobs"]["tokens"], offsets, strict=True):
        if not token.startswith("bytes:"):
            assert told["text"][start : start + len(token)] == token


def test_prompt_logprobs_of_vllm(server: Live, reference: Any) -> None:
    prompt = PROMPTS[0]
    expected = scores(reference, prompt)
    told = server.complete([prompt], max_tokens=2, prompt_logprobs=3)["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    for position in range(1, len(prompt)):
        entry = told[position][str(prompt[position])]
        assert abs(entry["logprob"] - float(expected[position - 1, prompt[position]])) < 1e-3
        assert sorted(item["rank"] for item in told[position].values() if item["rank"]) == [1, 2, 3]
    chat = server.post(
        "/v1/chat/completions", messages=[{"role": "u", "content": "x"}], max_tokens=1, prompt_logprobs=0
    )
    assert len(chat[1]["prompt_logprobs"]) == chat[1]["usage"]["prompt_tokens"]


def test_impossible_tokens_are_strict_json(server: Live) -> None:
    """Row 30: infinities become −9999 in every form, and banned tokens do no harm."""
    none = TokenLogprobs(float("-inf"), {1: -0.5, 2: float("-inf")})
    pairs = [(0, None), (2, none)]
    for told in (
        completion_logprobs(pairs, None, 2, [0, 0]),
        chat_logprobs(pairs[1:], None, 2),
        prompt_logprobs(pairs, None, 2),
    ):
        assert "-9999.0" in encode(strict(encode(told))).decode()
    assert finite(float("nan")) == finite(float("-inf")) == -9999.0
    bias = {str(token): -100 for token in range(0, 200)}
    for path, fields in (
        ("/v1/completions", {"prompt": "x", "logprobs": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": "x"}], "logprobs": True, "top_logprobs": 5}),
    ):
        body = fields | {"max_tokens": 8, "top_k": 1, "logit_bias": bias}
        assert server.post(path, **body)[0] == 200
        events = server.stream(path, **body, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == 8
        reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert all(event["usage"] is None for event in events[:-2])


def test_company_and_order_change_nothing(server: Live) -> None:
    """Rows 29 and 32: eight mixed requests, alone and in five orders at once; logprobs too, to the bit."""
    asked: list[dict[str, Any]] = [
        {"prompt": "alpha", "temperature": 0},
        {"prompt": "beta" * 20, "temperature": 0, "repetition_penalty": 1.3},
        {"prompt": "gamma", "seed": 1, "presence_penalty": 1.5},
        {"prompt": "delta" * 9, "seed": 2, "frequency_penalty": 1.5, "top_k": 20},
        {"prompt": "alpha", "seed": 3, "top_p": 0.8, "n": 3},
        {"prompt": "zeta", "seed": 4, "min_p": 0.05, "logit_bias": {"70": 5}},
        {"prompt": ["eta", "theta" * 12], "seed": 5},
        {"prompt": "iota", "seed": 6, "temperature": 1.7, "max_tokens": 40},
    ]
    asked = [{"max_tokens": 24, "logprobs": 3, "echo": True} | body for body in asked]
    alone = [server.complete(**body)["choices"] for body in asked]
    orders = list(itertools.islice(itertools.permutations(range(8)), 0, 40320, 8064))
    for order in orders:
        with ThreadPoolExecutor(8) as pool:
            together = dict(zip(order, pool.map(lambda i: server.complete(**asked[i])["choices"], order), strict=True))
        for number, choices in enumerate(alone):
            assert together[number] == choices, asked[number]


def test_several_answers_differ_and_come_again(server: Live) -> None:
    """Row 29."""
    asked: dict[str, Any] = {"prompt": "once", "max_tokens": 12, "n": 4}
    first = [choice["text"] for choice in server.complete(**asked, seed=1)["choices"]]
    assert len(set(first)) == 4
    assert [choice["text"] for choice in server.complete(**asked, seed=1)["choices"]] == first
    assert [choice["text"] for choice in server.complete(**asked, seed=2)["choices"]] != first
    assert server.complete("once", max_tokens=12, seed=1)["choices"][0]["text"] == first[0]
    assert server.complete(**asked) != server.complete(**asked), "without a seed every answer is new"


def test_penalties_count_what_they_should(server: Live) -> None:
    """Row 29: repetition sees prompt and output, presence and frequency the output alone."""
    prompt = [70] * 30
    plain = server.complete(prompt, max_tokens=20, temperature=0, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    biased = {"logit_bias": {"70": 100}, "max_tokens": 6, "temperature": 0}
    for fields, same in (({"presence_penalty": 2.0}, True), ({"frequency_penalty": 2.0}, True)):
        told = server.complete(prompt, **biased, **fields)["choices"][0]["text"]
        assert (told == server.complete(prompt, **biased)["choices"][0]["text"]) == same, fields
    strong = server.complete(prompt, max_tokens=20, temperature=0, logprobs=0, repetition_penalty=10.0)["choices"][0]
    assert len(set(strong["logprobs"]["tokens"])) > len(set(plain)), "nothing comes twice"


def test_a_shared_prompt_is_computed_once(server: Live) -> None:
    prompt = list(range(100, 196))
    first = server.complete(prompt, max_tokens=1, temperature=0)["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = server.complete(prompt, max_tokens=1, temperature=0)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first == 0
    assert again >= 80
    salted = server.complete(prompt, max_tokens=1, cache_salt="mine")["usage"]["prompt_tokens_details"]
    assert salted["cached_tokens"] == 0


def test_the_reason_of_a_stop_and_the_place_of_its_token(server: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    body |= {"skip_special_tokens": False}
    free = server.complete(**body)
    assert free["choices"][0]["stop_reason"] is None
    every = list(range(256))  # whichever comes first ends it
    told = server.complete(**body, stop_token_ids=every)["choices"][0]
    assert told["finish_reason"] == "stop"
    assert told["stop_reason"] in every
    assert [len(column) for column in told["logprobs"].values()] == [1, 1, 1, 1]
    events = server.stream(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=4, stop_token_ids=every
    )
    assert events[-2]["choices"][0]["stop_reason"] in every
