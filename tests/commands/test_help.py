"""Help as a user reads it: every command in one whole line, every option with its explanation."""

from __future__ import annotations

import re

import click
import pytest

from compress.cli import cli
from tests.product import run_cli


def test_each_command_has_one_whole_line() -> None:
    _, out, _ = run_cli("--help")
    listed = dict(re.findall(r"^  (\w+) +(.+)$", out.partition("Commands:")[2], re.MULTILINE))
    assert set(listed) == set(cli.commands)
    assert all(line.endswith(".") and not line.endswith("..") for line in listed.values()), listed


def test_no_command_is_help() -> None:
    assert run_cli() == (0, run_cli("--help")[1], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "error: compress run: missing argument 'RECIPE' (`compress run --help` explains)"),
        (("run", "."), "error: .: a directory, not a recipe; give a *.yaml file"),
        (("serve", "x", "--prot", "3"), "error: compress serve: no such option '--prot'. (Did you mean"),
        (
            ("generate", "x", "--prompt", "y", "--max-tokens", "0"),
            "error: compress generate: invalid value for '--max-t",
        ),
        (("--verison",), "error: compress: no such option '--verison'"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_each_option_is_explained_in_short_words(name: str) -> None:
    code, out, _ = run_cli(name, "--help")
    assert code == 0
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.opts[0] in out
            assert parameter.help, f"{name} {parameter.opts[0]}"
    assert "RANGE" not in out
    assert "TEXT " not in out.replace("--prompt TEXT", "")
