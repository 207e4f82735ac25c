"""Results of the GPU benchmark as they are gathered, and as Markdown and JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Column:
    name: str
    format: str = ""  # of a number; text is written as it is


@dataclass
class Section:
    """One table. `failures` make the run fail; `notes` tell what was left out and why; `figures` are for the JSON
    alone, where the table shows less."""

    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *cells: Any) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(cells)

    def as_dict(self) -> dict[str, Any]:
        names = [column.name for column in self.columns]
        rows = self.figures or [dict(zip(names, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": self.notes, "failures": self.failures}

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        if self.rows:
            lines.append("| " + " | ".join(column.name for column in self.columns) + " |")
            lines.append("| " + " | ".join("---:" if column.format else "---" for column in self.columns) + " |")
            for row in self.rows:
                cells = (_cell(column, value) for column, value in zip(self.columns, row, strict=True))
                lines.append("| " + " | ".join(cells) + " |")
            lines.append("")
        lines += [f"{note}\n" for note in self.notes]
        lines += [f"**FAILED** {failure}\n" for failure in self.failures]
        return "\n".join(lines)


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return "–"
    return format(value, column.format) if column.format and not isinstance(value, str) else str(value)


@dataclass
class Deadline:
    """A section's share of the time; what does not fit into it is skipped, and said to be."""

    seconds: float
    started: float = field(default_factory=time.monotonic)
    skipped: list[str] = field(default_factory=list)

    def passed(self, what: str) -> bool:
        """Whether the time is up; then `what` is noted as skipped."""
        if time.monotonic() - self.started < self.seconds:
            return False
        self.skipped.append(what)
        return True

    def note(self) -> list[str]:
        if not self.skipped:
            return []
        shown = ", ".join(self.skipped[:6]) + (f" and {len(self.skipped) - 6} more" if len(self.skipped) > 6 else "")
        return [f"Skipped as {self.seconds:.0f} s were up: {shown}."]
