"""The `compress` command: each subcommand only parses, calls and prints. Heavy imports wait until they are needed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from compress import __version__
from compress.errors import RunError, UserError, nearest

DEVICE = click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu or cuda.")
EXACT = click.option(
    "--exact", is_flag=True, help="On a CPU, no 8-bit activations: slower, and what the checkpoint means."
)
DRAFT = click.option(
    "--draft", type=click.Path(path_type=Path), metavar="CHECKPOINT", help="A small model that guesses ahead."
)
SPECULATE = click.option(
    "--speculate", type=click.Choice(["ngram"]), help="Guess from the text itself: what followed before."
)
DRAFT_TOKENS = click.option(
    "--draft-tokens", type=click.IntRange(1), metavar="N", help="Most tokens to guess at a time."
)


class Commands(click.Group):
    """Answers an unknown command with the nearest known one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            raise UserError(f"compress: no command {args[0]!r}; commands: {', '.join(known)}{nearest(args[0], known)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="compress")
def cli() -> None:
    """Make language models smaller and faster, with proof."""


@cli.command()
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
    _check_device(device)
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


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting: calibration.samples=128."
)
@click.option("--out", metavar="DIR", help="Replaces the recipe's `output`.")
def plan(recipe: Path, overrides: tuple[str, ...], out: str | None) -> None:
    """Forecast a run of RECIPE: each layer's scheme, size, peak memory, disk and time. Reads the config alone."""
    from compress.recipe import load_recipe

    _print_plan(load_recipe(recipe, overrides, out))


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def inspect(checkpoint: Path, as_json: bool) -> None:
    """Show what CHECKPOINT stores: scheme, bits and bytes of each layer, and totals."""
    from compress.inspection import inspect_checkpoint, render

    found = inspect_checkpoint(checkpoint)
    if as_json:
        click.echo(found.to_json())
    else:
        _print(render(found))


@cli.command(name="eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="CHECKPOINT",
    help="Compare with this one, token by token; or with the --json FILE of an earlier eval.",
)
@click.option("--text", required=True, metavar="SOURCE", help="What to score: a file, hub dataset:split or wheel://.")
@click.option("--window", type=click.IntRange(2), help="Tokens of a window. Default: 2048, or the model's limit.")
@click.option("--tokens", type=click.IntRange(2), default=32768, show_default=True, help="Score at most so many.")
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
    _check_device(device)
    from compress.evaluate.paired import evaluate_command
    from compress.progress import Reporter

    for line in evaluate_command(checkpoint, baseline, text, window, tokens, json_file, device, Reporter()):
        click.echo(line)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--prompt", "prompts", multiple=True, required=True, metavar="TEXT", help="Repeat it for several at once."
)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 takes the likeliest token."
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--chat", is_flag=True, help="Put each prompt through the model's chat template, as a user's message.")
@DRAFT
@EXACT
@DEVICE
def generate(
    checkpoint: Path,
    prompts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    chat: bool,
    draft: Path | None,
    exact: bool,
    device: str,
) -> None:
    """Continue one or more prompts with CHECKPOINT, in the bundled runtime."""
    _check_device(device)
    from compress.encoding import encode_prompt, load_tokenizer
    from compress.runtime.engine import Engine, SamplingParams

    engine = Engine.load(checkpoint, device=device, draft=draft, exact=exact)
    tokenizer = load_tokenizer(checkpoint)
    asked = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
    ids = [encode_prompt(tokenizer, prompt, add_generation_prompt=chat) for prompt in asked]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    for prompt, completion in zip(prompts, engine.generate(ids, params), strict=True):
        click.echo(completion.text if chat else prompt + completion.text)


@cli.command()
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
@click.option("--vocab", type=click.IntRange(2), help="Prompts hold random ids below this. Default: the vocabulary.")
@click.option("--concurrency", metavar="LIST", help="Clients in a closed loop, one level each. Default: 1,4,16.")
@click.option("--rate", metavar="LIST", help="Instead: Poisson arrivals, so many requests per second, as 0.5,2.")
@click.option("--prompt-tokens", default="128", show_default=True, metavar="N|LOW-HIGH", help="Fixed, or drawn.")
@click.option("--output-tokens", default="64", show_default=True, metavar="N|LOW-HIGH", help="Fixed, or drawn.")
@click.option("--shared-prefix", type=click.IntRange(0), default=0, help="Every prompt begins with the same N tokens.")
@click.option("--requests", type=click.IntRange(1), help="In one run. Default: 2 a client, at least 8; 32 arrivals.")
@click.option("--warmup", type=click.IntRange(0), help="Before each level, not measured. Default: 1 a client; 4.")
@click.option("--rounds", type=click.IntRange(1), help="Runs of a level; with a baseline 2 of each arm. Default: 1; 3.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides ids, lengths, arrivals.")
@click.option(
    "--goodput", metavar="LIMITS", help="Count requests within these milliseconds: ttft=500,tpot=50,e2e=9000."
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True, help="In seconds."
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
    _check_device(chosen.device)
    from compress.bench.command import bench as measure
    from compress.progress import Reporter

    _print(measure(chosen, Reporter()))


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; loopback by default.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key", envvar="COMPRESS_API_KEY", help="Clients must send it. Better in COMPRESS_API_KEY.")
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="What clients call the model; repeat it for more names. Default: the directory's name.",
)
@click.option("--max-model-len", type=click.IntRange(1), metavar="N", help="Tokens of a prompt and its answer.")
@click.option("--kv-pages", type=click.IntRange(1), metavar="N", help="Pages of the cache, 16 tokens each.")
@click.option("--kv-dtype", metavar="FORMAT", help="How the cache is stored; default: as the model computes.")
@click.option("--max-running", type=click.IntRange(1), default=64, show_default=True, help="Answers computed together.")
@click.option("--max-queue", type=click.IntRange(0), default=256, show_default=True, help="Answers that may wait.")
@click.option("--max-n", type=click.IntRange(1), default=128, show_default=True, help="Answers to one prompt.")
@click.option("--max-body", type=click.IntRange(1), default=4 << 20, show_default=True, help="Bytes of a request.")
@click.option(
    "--drain", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to finish in when stopped."
)
@DRAFT
@SPECULATE
@DRAFT_TOKENS
@EXACT
@DEVICE
def serve(
    checkpoint: Path,
    host: str,
    port: int,
    api_key: str | None,
    names: tuple[str, ...],
    max_model_len: int | None,
    kv_pages: int | None,
    kv_dtype: str | None,
    max_running: int,
    max_queue: int,
    max_n: int,
    max_body: int,
    drain: float,
    draft: Path | None,
    speculate: str | None,
    draft_tokens: int | None,
    exact: bool,
    device: str,
) -> None:
    """Serve CHECKPOINT over HTTP, as OpenAI's clients expect it: /v1/completions, /v1/chat/completions and more.

    SIGTERM or Ctrl-C lets running requests finish; a second one ends at once.
    """
    _check_device(device)
    try:
        from compress.runtime.server.serve import address, bind, context_length
        from compress.runtime.server.serve import serve as run_server
    except ModuleNotFoundError as error:
        raise UserError(f"compress serve needs {error.name}: pip install 'compress-llm[serve]'") from error
    if draft is not None and speculate is not None:
        raise UserError("--draft and --speculate: give one of the two")
    if draft_tokens is not None and draft is None and speculate is None:
        raise UserError("--draft-tokens needs --draft or --speculate")
    from compress.runtime.drafting import DEFAULT_DRAFTS
    from compress.runtime.engine import Engine
    from compress.runtime.server.options import Options, check_key
    from compress.runtime.server.prompts import Prompts
    from compress.runtime.server.service import Service

    key = check_key(api_key)
    if "" in names:
        raise UserError("--served-model-name: a name must have at least 1 character")
    sock = bind(host, port)
    engine = Engine.load(
        checkpoint,
        device=device,
        max_tokens_in_cache=kv_pages and kv_pages * 16,
        max_running=max_running,
        kv_dtype=kv_dtype,
        exact=exact,
        draft=draft,
        speculate=draft_tokens or (DEFAULT_DRAFTS if speculate else None),
    )
    options = Options(
        names=names or (checkpoint.resolve().name,),
        max_model_len=context_length(engine, max_model_len),
        api_key=key,
        max_body_bytes=max_body,
        max_n=max_n,
        max_queue=max_queue,
        drain_seconds=drain,
    )
    service = Service(engine, Prompts.of(checkpoint), options, max_running)
    run_server(service, sock, lambda: click.echo(f"serving {options.names[0]} on {address(sock)}"))


def _print_plan(recipe: object) -> None:
    from compress.forecast_table import print_forecast
    from compress.pipeline import plan as make_plan

    print_forecast(make_plan(recipe))  # type: ignore[arg-type]


def _print(renderable: object) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)  # piped: no folding at 80 columns
    console.print(renderable)


def _check_device(device: str) -> None:
    name = device.partition(":")[0]
    if name not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: not a device; devices: cpu, cuda{nearest(name, ['cpu', 'cuda'])}")
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(f"--device {device}: torch sees no CUDA device here; use --device cpu")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit 2 for a user's mistake, 1 for a failure of work or disk, 130 for Ctrl-C: one line each, no traceback."""
    try:
        yield
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except RunError as error:
        click.echo(f"failed: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # no space, no permission, a folder that went away
        told = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        click.echo(f"failed: {told}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        resumes = "; the same command, without --fresh, resumes where it stopped" if "run" in sys.argv[1:2] else ""
        click.echo(f"interrupted{resumes}", err=True)
        sys.exit(130)


def main() -> None:
    # Spinning threads stall each other on a shared machine; torch reads this once, when it is imported.
    # Threads that wait do not spin on a core that others need, but for the microseconds until the next layer: without
    # those, a layer of a small model waits longer for its threads than it computes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with one_line_errors():
        _invoke()


def _invoke() -> None:
    try:
        code = cli.main(standalone_mode=False, prog_name="compress")
    except click.UsageError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
