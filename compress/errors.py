"""A user's mistake, told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong usage, recipe or input, found before any work: exit code 2 and one line, never a traceback.

    The message says where, what is accepted, and the nearest right name.
    """


class RunError(Exception):
    """The work itself failed while running: exit code 1 and one line."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'lm_head'?` where a known name is close to `name`, else the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
