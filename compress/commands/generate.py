"""`compress generate`."""

from __future__ import annotations

from pathlib import Path

import click

from compress.commands.options import DEVICE, DRAFT, EXACT, check_device
from compress.errors import UserError


@click.command(short_help="Continue prompts.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--prompt", "prompts", multiple=True, required=True, metavar="TEXT", help="Repeat it for several at once."
)
@click.option(
    "--max-tokens", type=click.IntRange(1), metavar="N", default=64, show_default=True, help="New ones, at most."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    metavar="X",
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    default=1.0,
    show_default=True,
    help="Keep the likeliest tokens up to this much probability.",
)
@click.option(
    "--seed", type=int, metavar="N", default=0, show_default=True, help="The same seed draws the same answer."
)
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
    check_device(device)
    from compress.encoding import encode_prompt, load_tokenizer
    from compress.runtime.engine import Engine, SamplingParams
    from compress.shards import read_config

    read_config(checkpoint)
    if draft is not None:
        read_config(draft, "--draft")
    tokenizer = load_tokenizer(checkpoint)
    if chat and tokenizer.chat_template is None:
        raise UserError(
            f"--chat: {checkpoint} has no chat template: put its chat_template.jinja there, or leave out --chat and "
            "write the prompt as the model expects it"
        )
    engine = Engine.load(checkpoint, device=device, draft=draft, exact=exact)
    asked = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
    ids = [encode_prompt(tokenizer, prompt, add_generation_prompt=chat) for prompt in asked]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    for prompt, completion in zip(prompts, engine.generate(ids, params), strict=True):
        click.echo(completion.text if chat else prompt + completion.text)
        new, old = len(completion.token_ids), len(completion.prompt_ids)
        if completion.finish_reason == "length" and new < max_tokens:
            told = (
                f"{new} tokens after {old} of the prompt, not {max_tokens}: the context of {engine.spec.max_positions}"
            )
            click.echo(f"{told} is full", err=True)
