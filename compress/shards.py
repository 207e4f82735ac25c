"""Which files make up a checkpoint directory, and what is wrong with one that is not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import UserError, nearest
from compress.tensorfile import TensorFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-\d+-of-\d+\.safetensors")


def read_config(path: Path, option: str | None = None) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises UserError saying what is there, naming the option that gave it."""
    where = f"{option} {path}" if option else f"{path}"
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{where}: no such directory{nearest(path.name, siblings)}")
    if not path.is_dir():
        raise UserError(f"{where}: a file; a checkpoint is a directory with config.json and *.safetensors")
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{where}: no config.json, so not a checkpoint; the directory holds {_listing(path)}")
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError for one that does not."""
    content = _read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: must be a JSON object, not {type(content).__name__}")
    return content


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from None


def _listing(path: Path, limit: int = 5) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "nothing"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def shard_names(path: Path) -> list[str]:
    """The weight files that make up the checkpoint. Raises UserError for a missing, stray or stale one."""
    numbered = sorted(file.name for file in path.iterdir() if _NUMBERED.fullmatch(file.name))
    if (path / INDEX).is_file():
        wanted = sorted(set(weight_map_of(path / INDEX).values()))
        for name in wanted:
            if Path(name).name != name or not (path / name).is_file():
                raise UserError(f"{path / INDEX}: shard {name!r} is missing{nearest(name, numbered)}")
        stray = sorted({*numbered, *((SINGLE,) if (path / SINGLE).is_file() else ())} - set(wanted))
        if stray:
            raise UserError(f"{path}: {stray[0]} is not in {INDEX}; the index is stale or the file left over")
        return wanted
    if numbered:
        raise UserError(f"{path}: {numbered[0]} and {len(numbered) - 1} more shards, but no {INDEX}")
    if not (path / SINGLE).is_file():
        raise UserError(f"{path}: no {SINGLE} or {INDEX}; the directory holds {_listing(path)}")
    return [SINGLE]


def weight_map_of(index: Path) -> dict[str, str]:
    content = _read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{index}: no weight_map from tensor names to file names")
    return weight_map


def check_index(index: Path, owner: Mapping[str, TensorFile]) -> None:
    """Check that the index and the shards' own headers name the same tensors in the same files."""
    weight_map = weight_map_of(index)
    for name, shard in weight_map.items():
        if name not in owner:
            raise UserError(f"{index}: tensor {name!r} is in no shard{nearest(name, set(owner) - set(weight_map))}")
        if owner[name].path.name != shard:
            raise UserError(f"{index}: tensor {name!r} is said to be in {shard}, but is in {owner[name].path.name}")
    for name, file in owner.items():
        if name not in weight_map:
            raise UserError(f"{file.path}: tensor {name!r} is not in {INDEX}; the index is stale")
