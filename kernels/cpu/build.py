"""The compiled CPU kernels: built by the system's C compiler at first use, kept in a cache, loaded by ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
# Contraction is off: fused multiply-adds are written out, so that every instruction set gives the same bits. Never
# -ffast-math: a library linked with it sets flush-to-zero for the whole process.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
SEAL = hashlib.sha256().digest_size
Compiler = tuple[str, ...]  # a program and its first arguments

log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None, with one line in the log, where they cannot be built or loaded."""
    try:
        return ctypes.CDLL(str(built(find_compiler(), cache_directory())))
    except (BuildError, OSError) as error:
        log.warning("no compiled CPU kernels (%s): weights are dequantized to float32 instead", error)
        return None


class BuildError(Exception):
    """Why there are no compiled kernels, in a few words."""


def find_compiler() -> Compiler:
    """$CC, which may be a wrapper with arguments ("ccache gcc"), or the first of cc, gcc and clang that exists."""
    named = os.environ.get("CC", "").split()
    for name, *arguments in (named,) if named else [(name,) for name in COMPILERS]:
        path = shutil.which(name)
        if path:
            return path, *arguments
    raise BuildError(f"no C compiler: {' '.join(named) or ', '.join(COMPILERS)} not found")


def cache_directory() -> Path:
    named = os.environ.get("COMPRESS_CACHE")
    try:
        return Path(named or Path.home() / ".cache" / "compress") / "kernels"
    except RuntimeError:  # no $HOME, and a user whom the system does not know
        raise BuildError("no home directory, and no COMPRESS_CACHE") from None


def built(compiler: Compiler, directory: Path) -> Path:
    """The library of these sources, flags, compiler and kind of machine, built if it is not there yet and whole."""
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(repr((FLAGS, platform.machine(), _version(compiler))).encode())
    for path in sorted([*sources, *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    library_path = directory / f"cpu-{digest.hexdigest()[:16]}.so"
    try:
        if not _is_whole(library_path):
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory) as work:
                # renamed when it is whole: several processes may build at once
                _sealed(_compile(compiler, sources, Path(work))).replace(library_path)
    except OSError as error:
        raise BuildError(f"{directory}: {error.strerror or error}") from None
    return library_path


def _sealed(path: Path) -> Path:
    """The file with the hash of its bytes behind them, where a loader does not look."""
    with path.open("rb+") as file:
        file.write(hashlib.sha256(file.read()).digest())
    return path


def _is_whole(path: Path) -> bool:
    """Whether a file is there and as it was sealed: to load one that was cut short would end the process."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-SEAL]).digest() == content[-SEAL:]


def _version(compiler: Compiler) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return " ".join(compiler[1:]) + done.stdout.partition("\n")[0]


def _compile(compiler: Compiler, sources: list[Path], work: Path) -> Path:
    def compile_one(source: Path) -> Path:
        output = work / f"{source.stem}.o"
        _run([*compiler, *FLAGS, "-c", str(source), "-o", str(output)])
        return output

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, sources))
    output = work / "cpu.so"
    _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(output), "-lm"])
    return output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise BuildError(f"{Path(command[0]).name} failed: {first.strip()}")
