"""Progress of long phases: a bar in a terminal, plain lines at least every ten seconds when piped."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERVAL = 10.0  # seconds between plain lines


class Phase:
    """One named piece of work of `total` steps; `advance` may be fractional."""

    def __init__(self, name: str, total: float) -> None:
        self.name = name
        self.total = total
        self.done = 0.0
        self.note = ""
        self.started = time.monotonic()
        self._resumed = 0.0

    def resume_at(self, done: float) -> None:
        """Steps that an earlier run finished: shown as done, but not counted into the speed."""
        self.done = self._resumed = done

    def advance(self, steps: float = 1.0, note: str | None = None) -> None:
        self.done = min(self.total, self.done + steps)
        if note is not None:
            self.note = note

    def line(self) -> str:
        """`quantize 12/30  40%  elapsed 0:31  ETA 0:46  block 12`."""
        elapsed = time.monotonic() - self.started
        fresh = self.done - self._resumed
        eta = clock(elapsed / fresh * (self.total - self.done)) if fresh > 0 else "unknown"
        share = 100 * self.done / self.total if self.total else 100
        steps = f"{int(self.done)}/{int(self.total)}"
        return f"{self.name} {steps}  {share:.0f}%  elapsed {clock(elapsed)}  ETA {eta}  {self.note}".rstrip()


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Reporter:
    """Tells the user what goes on: messages, and phases with their progress and ETA."""

    def __init__(self, stream: TextIO | None = None, interval: float = INTERVAL) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._interval = interval

    def say(self, message: str) -> None:
        self._console.print(message, markup=False)

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[Phase]:
        phase = Phase(name, total)
        show = self._bar if self._console.is_terminal else self._lines
        with show(phase):
            yield phase

    @contextmanager
    def _bar(self, phase: Phase) -> Iterator[None]:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(phase.name, total=phase.total, note="")

            def update() -> None:
                bar.update(task, completed=phase.done, note=phase.note)

            with _every(0.25, update):
                yield
            update()

    @contextmanager
    def _lines(self, phase: Phase) -> Iterator[None]:
        self.say(f"{phase.name} 0/{int(phase.total)}  started")
        with _every(self._interval, lambda: self.say(phase.line())):
            yield
        self.say(phase.line())


@contextmanager
def _every(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(seconds):
            act()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
