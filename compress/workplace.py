"""Where a run works and where its result goes: DIR.work while it lasts, DIR whole or not at all.

DIR.work/fingerprint.json  what was begun; another model, recipe or data is refused
DIR.work/replaces          there while a run with --fresh makes a result anew that stands in DIR
DIR.work/replaced          that result, for the moment between taking its name away and giving it to the new one
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.blockwise import write_durably
from compress.checkpoint import publish
from compress.errors import UserError


@dataclass(frozen=True)
class Workplace:
    path: Path  # DIR.work
    output: Path
    replaces: bool  # whether the result may take the place of one that stands there

    def deliver(self, directory: Path) -> None:
        """Give a finished directory the output's name, and remove the workplace."""
        if self.output.exists():
            if not self.replaces:
                raise UserError(f"{self.output}: appeared while this run was at work; it was left alone")
            self.output.rename(self.path / "replaced")
        publish(directory, self.output)
        shutil.rmtree(self.path)


def workplace_of(output: Path) -> Path:
    return output.with_name(output.name + ".work")


def check_output(output: Path) -> dict[str, Any] | None:
    """The report of the result that stands in `output`; None where there is nothing.

    Raises UserError for a place that cannot be written, and for anything that is there and not a result of this tool:
    not even a fresh run may replace it.
    """
    if output.name in ("", ".."):
        raise UserError(f"output: {str(output)!r} names no directory of its own; give one, such as out/model")
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{output}: cannot be made, for {parent} is not a directory that this user may write to")
    if not output.exists() and not output.is_symlink():
        return None
    try:
        told = json.loads((output / "report.json").read_bytes())
    except (OSError, ValueError):
        told = None
    if not isinstance(told, dict) or "fingerprint" not in (told.get("provenance") or {}):
        raise UserError(f"{output}: exists and was not written by compress; choose another --out")
    return told


def begun_replacing(output: Path, fingerprint: dict[str, Any]) -> bool:
    """Whether an interrupted run with --fresh was making this very result anew: then it goes on."""
    work = workplace_of(output)
    if not (work / "replaces").exists() or (work / "replaced").exists():  # the latter: it had delivered
        return False
    begun = work / "fingerprint.json"
    return begun.exists() and json.loads(begun.read_text()) == fingerprint


def changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    return " and ".join(key for key in now if before.get(key) != now[key])


@contextmanager
def open_workplace(output: Path, fingerprint: dict[str, Any], fresh: bool) -> Iterator[Workplace]:
    """DIR.work, locked, and begun with this fingerprint; `fresh` empties it first.

    Raises UserError where another run is at work there, or what was begun differs.
    """
    work = workplace_of(output)
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{work}: another run is at work there; wait for it, or choose another --out") from None
        if (work / "replaced").exists() and not output.exists():
            (work / "replaced").rename(output)  # killed before the new result had its name: the old one still counts
        begun, replaces = work / "fingerprint.json", work / "replaces"
        if fresh:
            for item in work.iterdir():
                if item.name != "lock":
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
            if output.exists():
                replaces.touch()
        elif begun.exists() and (before := json.loads(begun.read_text())) != fingerprint:
            what = changed(before, fingerprint)
            raise UserError(f"{work}: was begun with another {what}; --fresh starts over, --out DIR leaves it alone")
        write_durably(begun, json.dumps(fingerprint))
        yield Workplace(work, output, replaces.exists())


def drop_leftovers(output: Path, fingerprint: dict[str, Any]) -> None:
    """Remove the workplace of a run that was killed after its result had its name."""
    begun = workplace_of(output) / "fingerprint.json"
    if begun.exists() and json.loads(begun.read_text()) == fingerprint:
        with open_workplace(output, fingerprint, fresh=False) as place:
            shutil.rmtree(place.path)
