"""Numbers read off a config.json, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from compress.errors import UserError, nearest

Config = Mapping[str, Any]


def count(config: Config, key: str, where: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} must be a positive integer, not {value!r}")
    return value


def count_or_none(config: Config, key: str, where: str) -> int | None:
    return None if config.get(key) is None else count(config, key, where)


def positive(config: Config, key: str, where: str, default: float | None = None) -> float:
    value = default if config.get(key) is None else config[key]
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not 0 < number < math.inf:
        raise UserError(f"{where}: {key} must be a positive number, not {value!r}")
    return number


def positive_or_none(config: Config, key: str, where: str) -> float | None:
    return None if config.get(key) is None else positive(config, key, where)


def choice(value: object, key: str, accepted: Sequence[str], where: str) -> str:
    if not isinstance(value, str) or value not in accepted:
        hint = nearest(str(value), accepted)
        raise UserError(f"{where}: {key} {value!r} is not supported; supported: {', '.join(accepted)}{hint}")
    return value
