"""Building the kernels: once, whole, with any of several compilers, and what happens without one."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from compress.kernels.cpu import build
from compress.kernels.cpu.build import BuildError, built, find_compiler

compiled = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two files that are built in no time."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "isa.h").write_text("int compress_supports(int isa);\n")
    (folder / "isa.c").write_text('#include "isa.h"\nint compress_supports(int isa) { return isa == 0; }\n')
    (folder / "more.c").write_text(
        "static char padding[20000] = {1};\nchar *compress_padding(void) { return padding; }\n"
    )
    monkeypatch.setattr(build, "SOURCES", folder)


@compiled
@pytest.mark.usefixtures("sources")
def test_a_library_is_built_once_and_whole(tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(built(find_compiler(), tmp_path / "new"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == [paths[0].name]  # nothing unfinished is left
    before = paths[0].stat().st_mtime_ns
    assert built(find_compiler(), tmp_path / "new") == paths[0]
    assert paths[0].stat().st_mtime_ns == before
    assert ctypes.CDLL(str(paths[0])).compress_supports(0) == 1


@compiled
@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("kept", [0, 5000, -1])
def test_a_library_that_was_cut_short_is_built_again(kept: int, tmp_path: Path) -> None:
    """As after a power failure or a full disk: to load it would end the process (SIGBUS)."""
    path = built(find_compiler(), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert built(find_compiler(), tmp_path) == path
    assert len(path.read_bytes()) == len(whole)
    assert ctypes.CDLL(str(path)).compress_supports(0) == 1


@compiled
@pytest.mark.usefixtures("sources")
def test_a_compiler_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in CC="ccache gcc"; other arguments, another library."""
    plain = find_compiler()
    monkeypatch.setenv("CC", f"{plain[0]} -DNOTHING")
    assert find_compiler() == (plain[0], "-DNOTHING")
    with_arguments = built(find_compiler(), tmp_path)
    assert with_arguments != built(plain, tmp_path)
    assert ctypes.CDLL(str(with_arguments)).compress_supports(0) == 1


def test_without_a_home_the_cache_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.delenv("COMPRESS_CACHE", raising=False)
    with pytest.raises(BuildError, match="COMPRESS_CACHE"):
        build.cache_directory()
    monkeypatch.setenv("COMPRESS_CACHE", "/somewhere")
    assert build.cache_directory() == Path("/somewhere/kernels")


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    build.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert build.library() is None
            assert build.library() is None
        assert [record.getMessage() for record in caplog.records] == [
            "no compiled CPU kernels (no C compiler: no-such-compiler not found): "
            "weights are dequantized to float32 instead"
        ]
    finally:
        build.library.cache_clear()


@pytest.mark.parametrize("script", ["exit 1", "echo 'x.c:1: error: no such thing' >&2; exit 1"])
def test_a_compiler_that_fails_is_named(script: str, tmp_path: Path) -> None:
    broken = tmp_path / "brokencc"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match="brokencc failed"):
        built((str(broken),), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="file"):
        built(("cc",), tmp_path / "file" / "kernels")


@compiled
def test_loading_leaves_subnormal_numbers_alone() -> None:
    """A library linked for fast arithmetic would flush them to zero in the whole process."""
    build.library()
    assert torch.tensor([1e-39]) * 1.0 > 0
    flags = " ".join(build.FLAGS)
    assert "fast" not in flags
    assert "finite" not in flags


@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_kernels_bring_no_openmp_runtime() -> None:
    """Two in one process would each keep a thread for every core, and some refuse to start (macOS)."""
    code = (
        "from compress.kernels.cpu.build import library\n"
        "import re, pathlib\n"
        "library()\n"
        "found = set(re.findall(r'/\\S*lib(?:gomp|iomp5|omp)\\S*', pathlib.Path('/proc/self/maps').read_text()))\n"
        "print(len(found), found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("0 "), done.stdout
