"""Each file of tests/kernels/interpreted in a process of its own: a load out of bounds kills the process that
interprets it, and no process both interprets and compiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's interpreter")
FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
NOTHING_COLLECTED = 5


def interpret(path: Path, marks: str) -> int:
    """Run one file's tests; its output is the failure's text."""
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-x", "-p", "no:cacheprovider", "-m", marks]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("PYTEST_ADDOPTS", None)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=1800)
    if done.returncode not in (0, NOTHING_COLLECTED):
        killed = f"killed by {signal.Signals(-done.returncode).name}\n" if done.returncode < 0 else ""
        pytest.fail(f"{path.name}: {killed}{done.stdout}{done.stderr}", pytrace=False)
    return done.returncode


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str) -> None:
    interpret(FOLDER / name, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES)
def test_interpreted_at_length(name: str) -> None:
    if interpret(FOLDER / name, "slow") == NOTHING_COLLECTED:
        pytest.skip("no slow tests")


def test_a_crash_is_told(tmp_path: Path) -> None:
    """A kernel that reads out of bounds fails one test here, with the signal's name."""
    crash = tmp_path / "test_crash.py"
    crash.write_text("import os, signal\n\ndef test_crash():\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(pytest.fail.Exception, match="killed by SIGSEGV"):
        interpret(crash, "not slow")
