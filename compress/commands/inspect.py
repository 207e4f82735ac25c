"""`compress inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from compress.commands.console import show


@click.command(short_help="What a checkpoint stores, layer by layer.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def inspect(checkpoint: Path, as_json: bool) -> None:
    """Show what CHECKPOINT stores: scheme, bits and bytes of each layer, and totals."""
    from compress.inspection import inspect_checkpoint, render

    found = inspect_checkpoint(checkpoint)
    if as_json:
        click.echo(found.to_json())
    else:
        show(render(found))
