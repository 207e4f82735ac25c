"""Options: what they mean, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.bench.options import Options, levels, limits, requests_of, rounds_of, server_url, span, warmup_of
from compress.bench.timing import Limits
from compress.bench.workload import Arrivals, Clients, Span
from compress.errors import UserError

MODEL = Path("model")


def test_what_is_given_is_read() -> None:
    assert span("64", "-") == Span(64, 64)
    assert span("64-256", "-") == Span(64, 256)
    assert levels(Options(MODEL, concurrency="2, 8")) == [Clients(2), Clients(8)]
    assert levels(Options(MODEL, rate="0.5,2")) == [Arrivals(0.5), Arrivals(2.0)]
    assert limits("ttft=500,tpot=50.5") == Limits(ttft=500, tpot=50.5)
    assert limits(None) is None
    assert server_url("http://localhost:8000/v1/", "--url") == "http://localhost:8000"
    assert server_url("https://host/llm", "--url") == "https://host/llm"


def test_defaults_keep_every_client_busy() -> None:
    options = Options(MODEL)
    assert levels(options) == [Clients(1), Clients(4), Clients(16)]
    assert [requests_of(options, level) for level in levels(options)] == [8, 8, 32]
    assert [warmup_of(options, level) for level in levels(options)] == [1, 4, 16]
    assert warmup_of(Options(MODEL, warmup=0), Clients(4)) == 0
    assert rounds_of(options) == 1
    assert requests_of(Options(MODEL, concurrency="100", requests=100), Clients(100)) == 100
    assert requests_of(Options(MODEL, rate="100", requests=4), Arrivals(100)) == 4
    assert Options(MODEL, plot=Path("z.PNG")).plot == Path("z.PNG")
    assert rounds_of(Options(MODEL, baseline=MODEL)) == 3
    assert rounds_of(Options(MODEL, baseline=MODEL, rounds=7)) == 7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint": None}, "give a CHECKPOINT to load, or --url"),
        ({"baseline": MODEL, "baseline_url": "http://a"}, "--baseline and --baseline-url: give one"),
        ({"url": "http://a", "baseline": MODEL}, "--baseline: with --url"),
        ({"baseline_url": "http://a"}, "--baseline-url: needs --url"),
        ({"url": "http://a", "exact": True}, "--exact: with --url, that is the server's to decide"),
        ({"url": "http://a", "draft_tokens": 3}, "--draft-tokens: with --url"),
        ({"draft": MODEL, "speculate": "ngram"}, "--draft and --speculate: give one"),
        ({"draft_tokens": 3}, "--draft-tokens needs --draft or --speculate"),
        ({"url": "localhost:8000"}, "--url localhost:8000: must be the address"),
        ({"url": "http://a:b"}, "--url http://a:b: must be the address"),
        ({"model": "m"}, "--model: names a model of a server"),
        ({"concurrency": "1,x"}, "--concurrency 1,x: must be positive whole numbers"),
        ({"concurrency": "1.5"}, "--concurrency 1.5: must be positive whole numbers"),
        ({"concurrency": "4,4"}, "each once"),
        ({"concurrency": "0"}, "positive"),
        ({"rate": "inf"}, "--rate inf: must be positive numbers"),
        ({"rate": "2", "concurrency": "2"}, "give --rate or --concurrency"),
        ({"prompt_tokens": "64-"}, "--prompt-tokens 64-: must be a number of tokens"),
        ({"output_tokens": "9-3"}, "--output-tokens 9-3: must be at least 1, and a range must ascend"),
        ({"output_tokens": "0"}, "must be at least 1"),
        ({"shared_prefix": 128}, "--shared-prefix 128: must be below --prompt-tokens 128"),
        ({"goodput": "tftt=3"}, "unknown limit 'tftt'; known: ttft, tpot, e2e; did you mean 'ttft'?"),
        ({"goodput": "ttft"}, "--goodput ttft: ttft must be milliseconds above 0, as ttft=500"),
        (
            {"plot": Path("x.png"), "output_tokens": "1-3"},
            "--plot: draws TPOT, which needs --output-tokens of at least 2",
        ),
        (
            {"concurrency": "1,100", "requests": 4},
            "--requests 4: below the 100 clients of --concurrency; give 100 or more, or fewer",
        ),
        ({"requests": 15}, "--requests 15: below the 16 clients"),
        ({"plot": Path("x.txt")}, "--plot x.txt: must end in .png, .svg, .pdf"),
        ({"json": Path("nowhere/x.json")}, "--json nowhere/x.json: no such directory"),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"checkpoint": MODEL} | given
    with pytest.raises(UserError) as caught:
        Options(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
