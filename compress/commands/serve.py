"""`compress serve`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from compress.commands.options import DEVICE, DRAFT, DRAFT_TOKENS, EXACT, SPECULATE, check_device
from compress.errors import UserError


@click.command(short_help="Answer HTTP as OpenAI's clients expect it.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N", default=8000, show_default=True, help="0 takes a free one."
)
@click.option(
    "--api-key", envvar="COMPRESS_API_KEY", metavar="KEY", help="Clients must send it. Better in COMPRESS_API_KEY."
)
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
@click.option(
    "--max-running",
    type=click.IntRange(1),
    metavar="N",
    default=64,
    show_default=True,
    help="Answers computed together.",
)
@click.option(
    "--max-queue", type=click.IntRange(0), metavar="N", default=256, show_default=True, help="Answers that may wait."
)
@click.option(
    "--max-n", type=click.IntRange(1), metavar="N", default=128, show_default=True, help="Answers to one prompt."
)
@click.option(
    "--max-body", type=click.IntRange(1), metavar="N", default=4 << 20, show_default=True, help="Bytes of a request."
)
@click.option(
    "--drain",
    type=click.FloatRange(0),
    metavar="X",
    default=30.0,
    show_default=True,
    help="Seconds to finish in when stopped.",
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
    check_device(device)
    if draft is not None and speculate is not None:
        raise UserError("--draft and --speculate: give one of the two")
    if draft_tokens is not None and draft is None and speculate is None:
        raise UserError("--draft-tokens needs --draft or --speculate")
    if "" in names:
        raise UserError("--served-model-name: a name must have at least 1 character")
    with _told_of_an_early_end():
        try:
            from compress.runtime.server.serve import address, bind, context_length
            from compress.runtime.server.serve import serve as run_server
        except ModuleNotFoundError as error:
            raise UserError(f"compress serve needs {error.name}: pip install 'compress-llm[serve]'") from error
        from compress.runtime.drafting import DEFAULT_DRAFTS
        from compress.runtime.engine import Engine
        from compress.runtime.server.options import Options, check_key
        from compress.runtime.server.prompts import Prompts
        from compress.runtime.server.service import Service
        from compress.shards import read_config

        if draft is not None:
            read_config(draft, "--draft")
        key = check_key(api_key)
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
            names=names or (_name(checkpoint),),
            max_model_len=context_length(engine, max_model_len),
            api_key=key,
            max_body_bytes=max_body,
            max_n=max_n,
            max_queue=max_queue,
            drain_seconds=drain,
        )
        engine.warm_up()  # or the first clients would wait for what is done once
        service = Service(engine, Prompts.of(checkpoint), options, max_running)
        told = f"serving {options.names[0]} on {address(sock)}"
        run_server(service, sock, lambda: click.echo(told), lambda line: click.echo(line, err=True))


def _name(checkpoint: Path) -> str:
    """The directory's, as it was given: a link keeps its own."""
    return checkpoint.name if checkpoint.name not in ("", "..") else checkpoint.resolve().name


@contextmanager
def _told_of_an_early_end() -> Iterator[None]:
    """SIGTERM and Ctrl-C before the server answers: one line, and their exit codes."""

    def end(number: int, frame: FrameType | None) -> None:
        click.echo("terminated", err=True)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:  # told here: click would print an empty line first
        click.echo("interrupted", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
