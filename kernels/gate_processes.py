"""Jobs in processes of their own, a few at a time: a compiler that aborts takes one job with it, not the gate."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ERROR = re.compile(r"\berror:|\bERROR\b|Error:")


@dataclass(frozen=True)
class Failure:
    """Why a job gave no result, in one line."""

    reason: str


@dataclass(frozen=True)
class _Running:
    index: int
    process: Any
    log: Path


def run_isolated(
    jobs: Sequence[Callable[[], T]], workers: int, finished: Callable[[int], None] = lambda count: None
) -> list[T | Failure]:
    """The result of each job, or why there is none. Jobs are forked, so they may be closures; results are pickled."""
    context = multiprocessing.get_context("fork")
    results: list[T | Failure] = [Failure("not run")] * len(jobs)
    pending = list(enumerate(jobs))[::-1]
    running: dict[Connection, _Running] = {}
    with tempfile.TemporaryDirectory() as folder:
        while pending or running:
            while pending and len(running) < workers:
                index, job = pending.pop()
                reader, writer = context.Pipe(duplex=False)
                log = Path(folder) / f"{index}.log"
                process = context.Process(target=_child, args=(job, writer, log))
                process.start()
                writer.close()  # so that the child's death ends the pipe
                running[reader] = _Running(index, process, log)
            for reader in wait(list(running)):
                assert isinstance(reader, Connection)
                done = running.pop(reader)
                results[done.index] = _result(reader, done)
                finished(len(jobs) - len(pending) - len(running))
    return results


def _child(job: Callable[[], Any], writer: Connection, log: Path) -> None:
    faulthandler.disable()  # one line of the compiler's is enough
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)  # compilers print from C++
        os.dup2(file.fileno(), 2)
    try:
        result = job()
    except Exception as error:
        result = Failure(_line_of(error))
    writer.send(result)
    writer.close()


def _line_of(error: BaseException) -> str:
    """The innermost cause: Triton wraps what went wrong into a listing of the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _result(reader: Connection, done: _Running) -> Any:
    try:
        result = reader.recv()
    except EOFError:
        result = None
    reader.close()
    done.process.join()
    printed = done.log.read_text(errors="replace") if done.log.is_file() else ""
    told = next((line.strip() for line in printed.splitlines() if ERROR.search(line)), None)
    if result is None:
        code = done.process.exitcode
        death = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Failure(f"{told or 'the compiler died'} ({death})")
    if isinstance(result, Failure) and told is not None and "PassManager" in result.reason:
        return Failure(told)  # the exception says that a pass failed, the log which
    return result
