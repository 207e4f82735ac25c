"""What the gate measures of a case on a target, and what it objects to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compress.kernels.gate_case import Case
from compress.kernels.gate_processes import Failure
from compress.kernels.launch import SHARED_MEMORY, Target
from compress.kernels.machine_code import ASYNCHRONOUS, MATRIX, count, main_loop

SLACK = 1.05  # a loop may grow by so much before it needs a new record


@dataclass(frozen=True)
class Facts:
    """One launch's machine code. Registers and stack bytes of a thread, shared memory in bytes of a block."""

    kernel: str
    registers: int
    stack: int
    spills: bool
    spilled: str
    shared: int
    has_loop: bool
    instructions: int  # of the loop that does the work, per thread; of the whole program without a loop
    matrix: Mapping[str, int]  # matrix instructions of that loop by mnemonic
    asynchronous: int  # asynchronous copies into shared memory in that loop
    per_element: float | None


Outcome = tuple[Facts, ...] | Failure


def measure(case: Case, target: Target) -> tuple[Facts, ...]:
    """Compile every launch of a case. Whatever planning or the compiler raises, it raises."""
    from compress.kernels.aot import build  # imports Triton

    facts = []
    for index, launch in enumerate(case.plan(target)):
        made = build(launch, target)
        elements = case.elements if index == 0 else None
        counts = [(made.vector_spills, "vector registers"), (made.spill_instructions, "instructions to or from memory")]
        facts.append(
            Facts(
                kernel=launch.kernel.__name__,
                registers=made.registers,
                stack=made.stack,
                spills=made.spills,
                spilled=" and ".join(f"{number} {what}" for number, what in counts if number),
                shared=made.shared,
                has_loop=bool(main_loop(made.program)),
                instructions=len(made.loop),
                matrix=dict(count(made.loop, MATRIX)),
                asynchronous=count(made.loop, ASYNCHRONOUS).total(),
                per_element=None if elements is None else round(made.per_element(elements), 3),
            )
        )
    return tuple(facts)


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
        if facts.spills:
            found.append(f"{facts.kernel}: registers spill: {facts.stack} bytes of stack, {facts.spilled}")
    if not outcome:
        return [*found, "plans no launch"]
    first = outcome[0]
    wanted = case.matrix.get(name)
    if wanted is not None and not any(mnemonic.startswith(wanted) for mnemonic in first.matrix):
        seen = ", ".join(sorted(first.matrix)) or "no matrix instruction"
        found.append(f"{first.kernel}: expected {wanted} in its loop, found {seen}")
    found += _objections_to_tiles(case, target, first)
    if first.per_element is not None and budgeted:
        found += _objections_to_budget(first, budget)
    return found


def _objections_to_tiles(case: Case, target: Target, first: Facts) -> list[str]:
    if case.tiles_in_flight is None or target.backend != "cuda":
        return []
    tiles, size = case.tiles_in_flight
    if not first.asynchronous:
        return [f"{first.kernel}: no asynchronous copy in its loop"]
    if first.shared < tiles * size:
        return [f"{first.kernel}: {first.shared // size} tiles of {size} bytes in flight, {tiles} expected"]
    return []


def _objections_to_budget(first: Facts, budget: float | None) -> list[str]:
    if budget is None:
        return [f"{first.kernel}: {first.per_element} instructions per element, none recorded; look, then --record"]
    assert first.per_element is not None
    if first.per_element > budget * SLACK:
        return [f"{first.kernel}: {first.per_element} instructions per element, recorded are {budget}"]
    return []
