"""Tables on a terminal or in a pipe."""

from __future__ import annotations


def show(renderable: object) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)  # piped: no folding at 80 columns
    console.print(renderable, crop=False)
