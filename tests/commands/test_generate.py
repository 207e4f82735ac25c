"""`compress generate` where the answer ends before it was asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.product import run_cli
from tests.tiny import tiny_model


def test_an_answer_that_fills_the_context_says_so(tmp_path: Path) -> None:
    """One line for each such answer, on stderr; what ends by itself, or as asked, says nothing."""
    model = tiny_model(tmp_path / "model", eos_token_id=None)
    code, out, err = run_cli("generate", model, "--prompt", "a" * 500, "--prompt", "b", "--max-tokens", 20)
    assert code == 0
    assert err == "13 tokens after 500 of the prompt, not 20: the context of 512 is full\n"
    assert out.startswith("a" * 500)
    assert run_cli("generate", model, "--prompt", "a" * 500, "--max-tokens", 13)[2] == ""


def test_a_chat_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    code, _, err = run_cli("generate", model, "--prompt", "a", "--chat")
    assert code == 2
    assert err == (
        f"error: --chat: {model} has no chat template: put its chat_template.jinja there, or leave out --chat and "
        "write the prompt as the model expects it\n"
    )


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("serve", "--port", "0")])
def test_a_draft_model_that_is_missing_is_told_with_its_option(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    if name == "serve":
        pytest.importorskip("uvicorn")
    code, _, err = run_cli(name, tiny_model(tmp_path / "model"), *options, "--draft", "/nope")
    assert code == 2
    assert err == "error: --draft /nope: no such directory\n"
