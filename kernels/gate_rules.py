"""What the gate measures of a case on a target, and what it objects to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.kernels.gate_case import Case
from compress.kernels.gate_processes import Failure
from compress.kernels.launch import SHARED_MEMORY, Target
from compress.kernels.machine_code import ASYNCHRONOUS, MATRIX, count, main_loop

if TYPE_CHECKING:
    from compress.kernels.aot import Build

SLACK = 1.05  # a loop may grow by so much before it needs a new record


@dataclass(frozen=True)
class Loop:
    """The loop that does the work, or the whole program where there is none."""

    exists: bool
    matrix: Mapping[str, int]  # matrix instructions by mnemonic
    asynchronous: int  # asynchronous copies into shared memory
    per_element: float | None


@dataclass(frozen=True)
class Facts:
    """One launch's machine code. Registers and stack bytes of a thread, shared memory in bytes of a block."""

    kernel: str
    registers: int
    stack: int
    spilled: str  # what, in words; empty where nothing is
    shared: int
    loop: Loop | None  # of a case's first launch, where the case says anything of it


Outcome = tuple[Facts, ...] | Failure


def measure(case: Case, target: Target) -> tuple[Facts, ...]:
    """Compile every launch of a case. Whatever planning or the compiler raises, it raises."""
    from compress.kernels.aot import build  # imports Triton

    facts = []
    for index, launch in enumerate(case.plan(target)):
        made = build(launch, target)
        asked = case.elements or case.matrix or case.tiles_in_flight
        loop = _loop_of(made, case.elements) if index == 0 and asked else None
        name = launch.kernel.__name__
        facts.append(Facts(name, made.registers, made.stack, _spilled(made), made.shared, loop))
    return tuple(facts)


def _loop_of(made: Build, elements: int | None) -> Loop:
    return Loop(
        exists=bool(main_loop(made.program)),
        matrix=dict(count(made.loop, MATRIX)),
        asynchronous=count(made.loop, ASYNCHRONOUS).total(),
        per_element=None if elements is None else round(made.per_element(elements), 3),
    )


def _spilled(made: Build) -> str:
    if not made.spills:
        return ""
    counts = ((made.vector_spills, "vector registers"), (made.spill_instructions, "instructions to or from memory"))
    return " and ".join(f"{number} {what}" for number, what in counts if number)


def objections(case: Case, target: Target, outcome: Outcome, budget: float | None, budgeted: bool) -> list[str]:
    """What is wrong, one line each. `budgeted` is False where the record is another compiler's."""
    name = str(target)
    if isinstance(outcome, Failure):
        return [] if name in case.refused else [f"does not compile: {outcome.reason}"]
    if name in case.refused:
        return [f"compiles, but the case says that it is refused: {case.refused[name]}"]
    found = []
    for facts in outcome:
        if facts.shared > SHARED_MEMORY[name]:
            found.append(f"{facts.kernel}: {facts.shared} bytes of shared memory, {SHARED_MEMORY[name]} are there")
        if facts.spilled:
            found.append(f"{facts.kernel}: registers spill: {facts.stack} bytes of stack, {facts.spilled}")
    if not outcome:
        return [*found, "plans no launch"]
    first, loop = outcome[0], outcome[0].loop
    if loop is None:
        return found
    wanted = case.matrix.get(name)
    if wanted is not None and not any(mnemonic.startswith(tuple(wanted.split("|"))) for mnemonic in loop.matrix):
        seen = ", ".join(sorted(loop.matrix)) or "no matrix instruction"
        found.append(f"{first.kernel}: expected {wanted} in its loop, found {seen}")
    found += _objections_to_tiles(case, target, first, loop)
    limit = case.most.get(name)
    if limit is not None and (loop.per_element is None or loop.per_element > limit):
        found.append(f"{first.kernel}: {loop.per_element} instructions per element, at most {limit} are allowed")
    if loop.per_element is not None and budgeted:
        found += _objections_to_budget(first.kernel, loop.per_element, budget)
    return found


def _objections_to_tiles(case: Case, target: Target, first: Facts, loop: Loop) -> list[str]:
    if case.tiles_in_flight is None or target.backend != "cuda":
        return []
    tiles, size = case.tiles_in_flight
    if not loop.asynchronous:
        return [f"{first.kernel}: no asynchronous copy in its loop"]
    if first.shared < tiles * size:
        return [f"{first.kernel}: {first.shared // size} tiles of {size} bytes in flight, {tiles} expected"]
    return []


def _objections_to_budget(kernel: str, figure: float, budget: float | None) -> list[str]:
    if budget is None:
        return [f"{kernel}: {figure} instructions per element, none recorded; look, then --record"]
    if figure > budget * SLACK:
        return [f"{kernel}: {figure} instructions per element, recorded are {budget}"]
    return []
