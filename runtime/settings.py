"""What an engine is loaded with, checked: a wrong type or a size below its limit is told by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from compress.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_path(name: str, value: object) -> Path:
    """Raises UserError for what is neither a text nor a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise UserError(f"{name} must be the directory of a checkpoint, not {value!r}")
    return Path(value)


def given(values: Mapping[str, object]) -> dict[str, object]:
    """Those that are not left at None."""
    return {name: value for name, value in values.items() if value is not None}


def check_dtype(dtype: object) -> None:
    """Raises UserError for what the runtime does not compute in."""
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype!r}")


def check_texts(values: Mapping[str, object]) -> None:
    """Raises UserError for a value that is not a text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise UserError(f"{name} must be a text, not {value!r}")


def check_switches(values: Mapping[str, object]) -> None:
    """Raises UserError for a value that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UserError(f"{name} must be True or False, not {value!r}")


def check_sizes(values: Mapping[str, object]) -> None:
    """Raises UserError for a value that is not an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{name} must be an integer, not {value!r}")
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
