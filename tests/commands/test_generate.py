"""`compress generate` where the answer ends before it was asked to."""

from __future__ import annotations

from pathlib import Path

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
