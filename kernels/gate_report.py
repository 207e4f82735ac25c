"""What the gate found, as a table for a terminal and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.kernels.gate_case import Case
from compress.kernels.gate_processes import Failure
from compress.kernels.gate_rules import Outcome
from compress.kernels.launch import Target

HEAD = ("case", "target", "registers", "spills", "shared", "matrix instruction", "in flight", "instr./element")


@dataclass(frozen=True)
class Row:
    case: Case
    target: Target
    outcome: Outcome


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table, in the order of HEAD: the first launch, then what the others have beyond it."""
    name = (row.case.name, str(row.target))
    if isinstance(row.outcome, Failure):
        return (*name, "refused", "", "", "", "", "")
    first, loop = row.outcome[0], row.outcome[0].loop
    matrix = ", ".join(f"{count} {mnemonic}" for mnemonic, count in sorted(loop.matrix.items())) if loop else ""
    tiles = row.case.tiles_in_flight
    in_flight = str(first.shared // tiles[1]) if tiles is not None and row.target.backend == "cuda" else ""
    per_element = ""
    if loop is not None and loop.per_element is not None:
        per_element = f"{loop.per_element:.2f}" + ("" if loop.exists else " (no loop)")
    return (
        *name,
        " + ".join(str(facts.registers) for facts in row.outcome),
        "yes" if any(facts.spilled for facts in row.outcome) else "none",
        f"{max(facts.shared for facts in row.outcome) / 1024:.1f} KiB",
        matrix,
        in_flight,
        per_element,
    )


def plain_table(rows: Sequence[Row]) -> str:
    lines = [HEAD, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def report(rows: Sequence[Row], compilers: str) -> str:
    """The Markdown document: the same for the same kernels and compilers."""
    lines = [
        "# Kernels, as their machine code is",
        "",
        "Written by `python -m compress.kernels.gate`, which compiles every kernel for every target without a GPU and",
        "fails where registers spill, shared memory does not suffice, a loop lacks its matrix instruction or its",
        "asynchronous copies, or has grown. Several launches of one case are joined by +. Instructions per element are",
        "those of the loop that does the work, in all threads of a program, per element that one iteration handles.",
        "",
        f"Compiled by {compilers}.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- | --- | ---: | --- | ---: | --- | ---: | ---: |",
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    refused = refusals(rows)
    if refused:
        lines += ["", "Refused:", "", *(f"- {line}" for line in refused)]
    return "\n".join(lines) + "\n"


def refusals(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.case.name} / {row.target}: {row.case.refused[str(row.target)]} (`{row.outcome.reason}`)"
        for row in rows
        if isinstance(row.outcome, Failure) and str(row.target) in row.case.refused
    ]
