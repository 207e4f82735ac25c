"""`compress bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compress.commands.console import show
from compress.commands.options import DEVICE, DRAFT, DRAFT_TOKENS, SPECULATE, check_device


@click.command(short_help="Measure latencies and throughput, alone or against a baseline.")
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option(
    "--baseline", type=click.Path(path_type=Path), metavar="CHECKPOINT", help="Measure it in turns with this."
)
@click.option(
    "--url", metavar="URL", help="Measure this OpenAI-compatible server; CHECKPOINT then only tells the vocabulary."
)
@click.option("--baseline-url", metavar="URL", help="The baseline's server, with --url.")
@click.option("--model", metavar="NAME", help="Which model of the server at --url. Default: the first.")
@click.option("--api-key", envvar="COMPRESS_API_KEY", metavar="KEY", help="Of the servers; or set COMPRESS_API_KEY.")
@click.option(
    "--vocab", type=click.IntRange(2), metavar="N", help="Prompts hold random ids below this. Default: the vocabulary."
)
@click.option("--concurrency", metavar="LIST", help="Clients in a closed loop, one level each. Default: 1,4,16.")
@click.option("--rate", metavar="LIST", help="Instead: Poisson arrivals, so many requests per second, as 0.5,2.")
@click.option("--prompt-tokens", default="128", show_default=True, metavar="N|LOW-HIGH", help="Fixed, or drawn.")
@click.option("--output-tokens", default="64", show_default=True, metavar="N|LOW-HIGH", help="Fixed, or drawn.")
@click.option(
    "--shared-prefix",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    help="Every prompt begins with the same N tokens.",
)
@click.option(
    "--requests", type=click.IntRange(1), metavar="N", help="In one run. Default: 2 a client, at least 8; 32 arrivals."
)
@click.option(
    "--warmup", type=click.IntRange(0), metavar="N", help="Before each level, not measured. Default: 1 a client; 4."
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    metavar="N",
    help="Runs of a level; with a baseline 2 of each arm. Default: 1; 3.",
)
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", default=0, show_default=True, help="Decides ids, lengths, arrivals."
)
@click.option(
    "--goodput", metavar="LIMITS", help="Count requests within these milliseconds: ttft=500,tpot=50,e2e=9000."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    default=300.0,
    show_default=True,
    help="Seconds without a byte.",
)
@click.option("--exact", is_flag=True, help="CHECKPOINT without rounded activations, as the checkpoint means.")
@DRAFT
@SPECULATE
@DRAFT_TOKENS
@click.option("--json", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the record here.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the sweep: FILE.png."
)
@DEVICE
def bench(**options: Any) -> None:
    """Measure how fast CHECKPOINT answers: TTFT, TPOT, ITL and tokens per second at several loads.

    With --baseline (or --baseline-url) both are measured in turns, and every ratio has an interval.
    """
    from compress.bench.options import Options

    chosen = Options(**options)
    check_device(chosen.device)
    from compress.bench.command import bench as measure
    from compress.progress import Reporter

    show(measure(chosen, Reporter()))
