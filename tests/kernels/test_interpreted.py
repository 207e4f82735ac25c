"""Each file of tests/kernels/interpreted in a process of its own: a load out of bounds kills the process that
interprets it, and no process both interprets and compiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's interpreter")
FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str


def interpret(path: Path, marks: str) -> Outcome:
    """Run one file's tests."""
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-x", "-p", "no:cacheprovider", "-m", marks]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("PYTEST_ADDOPTS", None)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=1800)
    killed = f"killed by {signal.Signals(-done.returncode).name}\n" if done.returncode < 0 else ""
    return Outcome(done.returncode, f"{path.name}: {killed}{done.stdout}{done.stderr}")


def check(outcome: Outcome) -> int:
    """The exit status; what went wrong is the failure's text."""
    if outcome.code not in (0, NOTHING_COLLECTED):
        pytest.fail(outcome.text, pytrace=False)
    return outcome.code


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[Outcome]]]:
    """All files that are to be run, as many at a time as there are cores: an interpreter uses one."""
    marks = {"test_interpreted": "not slow", "test_interpreted_at_length": "slow"}
    wanted = [
        (str(item.callspec.params["name"]), marks[item.originalname])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and item.originalname in marks
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {(name, mark): pool.submit(interpret, FOLDER / name, mark) for name, mark in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str, outcomes: dict[tuple[str, str], Future[Outcome]]) -> None:
    check(outcomes[name, "not slow"].result())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES)
def test_interpreted_at_length(name: str, outcomes: dict[tuple[str, str], Future[Outcome]]) -> None:
    if check(outcomes[name, "slow"].result()) == NOTHING_COLLECTED:
        pytest.skip("no slow tests")


def test_a_crash_is_told(tmp_path: Path) -> None:
    """A kernel that reads out of bounds fails one test here, with the signal's name."""
    crash = tmp_path / "test_crash.py"
    crash.write_text("import os, signal\n\ndef test_crash():\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(pytest.fail.Exception, match="killed by SIGSEGV"):
        check(interpret(crash, "not slow"))
