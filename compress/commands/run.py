"""`compress run` and `compress plan`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from compress.commands.options import DEVICE, check_device


@click.command(short_help="Compress a model by a recipe, and report what that cost.")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", help="Where the result goes; replaces the recipe's `output`.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting: calibration.samples=128."
)
@click.option("--fresh", is_flag=True, help="Start over: drop unfinished work, and replace a finished result.")
@click.option("--dry-run", is_flag=True, help="Only forecast, as `compress plan` does.")
@DEVICE
def run(recipe: Path, out: str | None, overrides: tuple[str, ...], fresh: bool, dry_run: bool, device: str) -> None:
    """Compress a model by RECIPE, and report what that cost and gained.

    A rerun resumes by itself after the last finished block. The result appears in the output directory whole or not
    at all; work in progress lives beside it, in DIR.work.
    """
    from compress.recipe import load_recipe

    loaded = load_recipe(recipe, overrides, out)
    if dry_run:
        _print_plan(loaded)
        return
    check_device(device)
    from compress.evaluate.summary import summary
    from compress.pipeline import run as run_pipeline
    from compress.progress import Reporter

    outcome = run_pipeline(
        loaded, Reporter(), device=device, fresh=fresh, command=shlex.join(["compress", *sys.argv[1:]])
    )
    if not outcome.fresh:
        click.echo(f"{outcome.directory}: finished before, by the same recipe; --fresh does it again")
    for line in summary(outcome.report):
        click.echo(line)
    click.echo(f"checkpoint  {outcome.directory}")
    click.echo(f"report      {outcome.directory / 'report.html'}")


@click.command(short_help="Forecast a run: schemes, size, memory, disk, time.")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting: calibration.samples=128."
)
@click.option("--out", metavar="DIR", help="Replaces the recipe's `output`.")
def plan(recipe: Path, overrides: tuple[str, ...], out: str | None) -> None:
    """Forecast a run of RECIPE: each layer's scheme, size, peak memory, disk and time. Reads the config alone."""
    from compress.recipe import load_recipe

    _print_plan(load_recipe(recipe, overrides, out))


def _print_plan(recipe: object) -> None:
    from compress.forecast_table import print_forecast
    from compress.pipeline import plan as make_plan

    print_forecast(make_plan(recipe))  # type: ignore[arg-type]
