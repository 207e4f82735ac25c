"""A cache directory that several processes may fill at once, and any of them be killed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_directory(cache: Path | None) -> Path:
    """`cache`, else $COMPRESS_CACHE, else ~/.cache/compress."""
    return cache or Path(os.environ.get("COMPRESS_CACHE") or Path.home() / ".cache" / "compress")


def cached(entry: Path, build: Callable[[Path], None]) -> Path:
    """`entry`, made by `build(temporary)` if it is not there yet: whole or not at all, once.

    A second process waits for the first. The lock dies with its process, and the next one removes what it left.
    """
    if entry.exists():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(entry.with_name(f".{entry.name}.lock")):
        if not entry.exists():
            temporary = entry.with_name(f".{entry.name}.partial")
            _remove(temporary)
            try:
                build(temporary)
                temporary.rename(entry)
            finally:
                _remove(temporary)
    return entry


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(16 << 20):
            digest.update(piece)
    return digest.hexdigest()
