"""Work shared out among threads: nothing twice, nothing left, nobody waited for, and no time spent between jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from compress.kernels.cpu.build import FLAGS, SOURCES, library
from compress.kernels.dispatch import prepare_linear

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")
COMPILER = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "cc")
HARNESS = Path(__file__).parent / "cpu_threads.c"
CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [(), ("-fsanitize=thread", "-O1")], ids=["plain", "sanitized"])
def test_each_item_is_visited_once(flags: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "threads"
    sources = [str(HARNESS), str(SOURCES / "threads.c")]
    built = subprocess.run(
        [COMPILER, *FLAGS, *flags, f"-I{SOURCES}", *sources, "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode and flags:
        pytest.skip("this compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), "2000" if flags else "50000"], capture_output=True, text=True, timeout=300)
    if flags and "FATAL" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this system")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    assert flags or "children failed: 0" in done.stdout, done.stdout
    if (os.cpu_count() or 1) > 1:
        assert "others helped" in done.stdout


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    """One has the workers, the others compute alone."""
    torch.manual_seed(0)
    linear = prepare_linear([torch.randn(600, 96)], [None], CPU, torch.float32)
    inputs = [torch.randn(5, 96) for _ in range(4)]
    expected = [linear(x_TI) for x_TI in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        torch.set_num_threads(3)  # of this thread
        wrong.extend(index for _ in range(300) if not torch.equal(linear(inputs[index]), expected[index]))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_sleep_when_there_is_nothing_to_do() -> None:
    """In a process of its own: other tests leave threads behind."""
    code = """
import time, torch
from compress.kernels.dispatch import prepare_linear
torch.set_num_threads(4)
linear = prepare_linear([torch.randn(600, 96)], [None], torch.device("cpu"), torch.float32)
for _ in range(50):
    linear(torch.randn(5, 96))
time.sleep(0.05)
started = time.process_time()
time.sleep(0.5)
print(time.process_time() - started)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.05


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_threads_that_have_no_work_any_more_sleep() -> None:
    """After jobs on eight threads, jobs on two take the time of two."""
    code = """
import time, torch
from pathlib import Path
from compress.kernels.dispatch import prepare_linear

linear = prepare_linear([torch.randn(512, 512)], [None], torch.device("cpu"), torch.float32)
x_TI = torch.randn(1, 512)

def run(threads, seconds):
    torch.set_num_threads(threads)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        linear(x_TI)

def ticks():
    return {task.name: int((task / "stat").read_text().split()[13]) for task in Path("/proc/self/task").iterdir()}

run(8, 0.2)
run(2, 0.2)
before = ticks()
run(2, 0.6)
print(sum(ticks()[name] - used > 3 for name, used in before.items()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 2
