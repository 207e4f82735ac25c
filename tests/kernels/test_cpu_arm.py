"""The kernels on Arm, where a cross compiler and an emulator are installed: the bits of this machine's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from compress.kernels.cpu.build import FLAGS, SOURCES

HARNESS = Path(__file__).parent / "cpu_bits.c"
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
NATIVE = next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None)


def hashes(compiler: str, output: Path, emulator: list[str]) -> list[str]:
    """One line for each instruction set that the (emulated) processor has."""
    sources = [str(HARNESS), *map(str, sorted(SOURCES.glob("*.c")))]
    command = [compiler, *FLAGS, "-static", f"-I{SOURCES}", *sources, "-o", str(output), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([*emulator, str(output)], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(NATIVE is None, reason="no C compiler on this machine")
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    assert NATIVE is not None
    here = hashes(NATIVE, tmp_path / "native", [])
    assert len(set(here)) == 1
    assert len(here[0].split()) == 33
    if shutil.which(CROSS) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"{CROSS} and {EMULATOR} are not installed: Arm was not run")
    assert set(hashes(CROSS, tmp_path / "arm", [EMULATOR])) == set(here)
