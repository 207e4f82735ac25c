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
CONTEXT = multiprocessing.get_context("fork")
ERROR = re.compile(r"\berror:|\bERROR\b|Error:")


@dataclass(frozen=True)
class Failure:
    """Why a job gave no result, in one line."""

    reason: str


class _Worker:
    """A forked process that runs jobs one after the other, by index, until it dies of one."""

    def __init__(self, jobs: Sequence[Callable[[], Any]], log: Path, others: Sequence[_Worker]) -> None:
        self.log = log
        self.job: int | None = None
        self.connection, theirs = CONTEXT.Pipe()
        inherited = [self.connection, *(other.connection for other in others)]
        self.process = CONTEXT.Process(target=_serve, args=(jobs, theirs, inherited, log), daemon=True)
        self.process.start()
        theirs.close()  # so that the process's death ends the pipe

    def begin(self, job: int) -> None:
        self.job = job
        self.connection.send(job)

    def result(self) -> Any:
        """A result or a Failure; None where the process died."""
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            return None


def run_isolated(
    jobs: Sequence[Callable[[], T]], count: int, finished: Callable[[int], None] = lambda done: None
) -> list[T | Failure]:
    """The result of each job, or why there is none. Processes are forked, so jobs may be closures; results are pickled.

    A process takes job after job: the compiler's start costs more than most kernels.
    """
    results: list[T | Failure] = [Failure("not run")] * len(jobs)
    pending = list(range(len(jobs)))[::-1]
    with tempfile.TemporaryDirectory() as folder:
        workers: list[_Worker] = []
        while len(workers) < min(count, len(jobs)):
            workers.append(_Worker(jobs, Path(folder) / f"{len(workers)}.log", workers))
            workers[-1].begin(pending.pop())
        while busy := [worker for worker in workers if worker.job is not None]:
            ready = wait([worker.connection for worker in busy])
            for worker in [worker for worker in busy if worker.connection in ready]:
                assert worker.job is not None
                result = worker.result()
                results[worker.job] = _explained(result, worker)
                worker.job = None
                if result is None:
                    workers.remove(worker)
                    worker = _Worker(jobs, worker.log, workers)
                    workers.append(worker)
                if pending:
                    worker.begin(pending.pop())
                finished(len(jobs) - len(pending) - sum(other.job is not None for other in workers))
        for worker in workers:
            worker.connection.close()
            worker.process.join()
    return results


def _serve(
    jobs: Sequence[Callable[[], Any]], connection: Connection, inherited: Sequence[Connection], log: Path
) -> None:
    for other in inherited:
        other.close()
    faulthandler.disable()  # one line of the compiler's is enough
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)  # compilers print from C++
        os.dup2(file.fileno(), 2)
        while True:
            try:
                job = jobs[connection.recv()]
            except EOFError:
                return
            file.seek(0)
            file.truncate()
            try:
                result = job()
            except Exception as error:
                result = Failure(_line_of(error))
            connection.send(result)


def _line_of(error: BaseException) -> str:
    """The innermost cause: Triton wraps what went wrong into a listing of the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _explained(result: Any, worker: _Worker) -> Any:
    """Why a process died, and which pass failed, from what it printed."""
    died = result is None
    if not died and not (isinstance(result, Failure) and "PassManager" in result.reason):
        return result
    printed = worker.log.read_text(errors="replace").splitlines()
    told = next((line.strip("\0 ") for line in printed if ERROR.search(line)), None)
    if not died:
        return Failure(told) if told else result
    code = worker.process.exitcode or 0
    death = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Failure(f"{told or 'the compiler died'} ({death})")
