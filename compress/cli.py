"""The `compress` command: its parts are in commands/; here is how it starts, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from compress import __version__
from compress.commands.bench import bench
from compress.commands.evaluate import evaluate
from compress.commands.generate import generate
from compress.commands.inspect import inspect
from compress.commands.run import plan, run
from compress.commands.serve import serve
from compress.errors import RunError, UserError, nearest


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


for command in (run, plan, inspect, evaluate, generate, bench, serve):
    cli.add_command(command)


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
    # Torch's spinning threads stall others on a shared machine; it reads this once, when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with one_line_errors():
        _invoke()


def _invoke() -> None:
    try:
        code = cli.main(sys.argv[1:] or ["--help"], standalone_mode=False, prog_name="compress")
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "compress"
        told = error.format_message().rstrip(".")
        raise UserError(f"{command}: {told[:1].lower()}{told[1:]} (`{command} --help` explains)") from error
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
