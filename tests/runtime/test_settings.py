"""Wrong types where an engine is loaded and asked: one clear line each, and never a bare TypeError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UserError
from compress.runtime.engine import Engine, SamplingParams
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.int8}, "dtype must be one of torch.float32, torch.bfloat16, torch.float16, not torch.int8"),
    ({"dtype": "float16"}, "dtype must be one of .*, not 'float16'"),
    ({"page_size": "16"}, "page_size must be an integer, not '16'"),
    ({"page_size": True}, "page_size must be an integer, not True"),
    ({"page_size": 10**12}, "a cache of 1000000000000 tokens needs"),
    ({"max_batched_tokens": 1.5}, "max_batched_tokens must be an integer, not 1.5"),
    ({"max_running": 0}, "max_running must be at least 1, not 0"),
    ({"max_tokens_in_cache": float("nan")}, "max_tokens_in_cache must be an integer, not nan"),
    ({"kv_dtype": torch.int8}, "kv_dtype must be a text, not torch.int8"),
    ({"kv_dtype": "int3"}, "kv_dtype: 'int3' is not a format; accepted: float32, .* did you mean 'int8'"),
    ({"device": 0}, "device must be a text, not 0"),
    ({"exact": 1}, "exact must be True or False, not 1"),
    ({"prefix_caching": None}, "prefix_caching must be True or False, not None"),
    ({"draft": 5}, "draft must be the directory of a checkpoint, not 5"),
    ({"draft": "nowhere"}, "nowhere: no such directory"),
    ({"speculate": 1.5}, "speculate must be an integer, not 1.5"),
    ({"speculate": 0}, "speculate must be at least 1, not 0"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS, ids=lambda part: str(part)[:40])
def test_a_wrong_setting_is_told_by_name(directory: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Engine.load(directory, **settings)


def test_what_is_no_directory_is_told(directory: Path) -> None:
    for path, message in (
        (directory / "config.json", "config.json: a file; a checkpoint is a directory"),
        (5, "path must be the directory of a checkpoint, not 5"),
        (None, "path must be the directory of a checkpoint, not None"),
    ):
        with pytest.raises(UserError, match=message):
            Engine.load(path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"config\.json: a file; a checkpoint is a directory"):
        Engine.load(directory, draft=directory / "config.json")


ASKED: list[tuple[Any, dict[str, Any], str]] = [
    ([True], {}, "prompt token id True is out of range"),
    ([1.0], {}, "prompt token id 1.0 is out of range"),
    (5, {}, "prompt must be a text or a list of token ids, not 5"),
    (b"ab", {}, "prompt must be a text or a list of token ids, not b'ab'"),
    ([1], {"stop": 5}, "stop must be a tuple of strings, not 5"),
    ([1], {"stop_token_ids": 5}, "stop_token_ids must be a tuple of token ids, not 5"),
    ([1], {"logit_bias": [1]}, "logit_bias must be a mapping of token ids to numbers"),
    ([1], {"cache_salt": 5}, "cache_salt must be a string, not 5"),
    ([1], {"ignore_eos": "x"}, "ignore_eos must be True or False, not 'x'"),
    ([1], {"skip_special_tokens": None}, "skip_special_tokens must be True or False, not None"),
]


def test_a_wrong_request_is_told_by_name(directory: Path) -> None:
    engine = Engine.load(directory)
    for prompt, fields, message in ASKED:
        with pytest.raises(UserError, match=message):
            engine.add(prompt, SamplingParams(**fields))
    for n in (True, 1.5, "2"):
        with pytest.raises(UserError, match="n must be an integer"):
            engine.fork([1], SamplingParams(), n)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="params must be SamplingParams, not None"):
        engine.add([1], None)  # type: ignore[arg-type]
    assert not engine.scheduler.busy


def test_what_is_no_request_or_no_list_is_told(directory: Path) -> None:
    engine, other = Engine.load(directory), Engine.load(directory)
    foreign = other.add([1], SamplingParams())
    for wrong, message in (
        (None, "must be a Request that `add` gave, not None"),
        (foreign, "not one of this engine's"),
    ):
        with pytest.raises(UserError, match=message):
            engine.abort(wrong)  # type: ignore[arg-type]
    other.abort(foreign)
    other.abort(foreign)
    assert foreign.finish_reason == "abort"
    for prompts in (None, 5, b"ab"):
        with pytest.raises(UserError, match="prompts must be a list of texts or of token ids, not"):
            engine.generate(prompts, SamplingParams())  # type: ignore[arg-type]
    for token in (256, -1):
        with pytest.raises(UserError, match="ids must be between 0 and 255"):
            engine.hidden_states(torch.tensor([1, token]))
