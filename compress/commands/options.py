"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

from compress.errors import UserError, nearest

DEVICE = click.option(
    "--device", default="cpu", show_default=True, metavar="NAME", help="Where to compute: cpu, cuda or cuda:N."
)
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


def check_device(device: str) -> None:
    name = device.partition(":")[0]
    if name not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: not a device; devices: cpu, cuda{nearest(name, ['cpu', 'cuda'])}")
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(f"--device {device}: torch sees no CUDA device here; use --device cpu")
