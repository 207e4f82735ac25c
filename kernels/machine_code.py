"""Machine code as the disassembler prints it: its instructions, their loops, and the loop that does the work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LABEL = re.compile(r"^(\.L\w+|\.?LBB\w+):")
SASS = re.compile(
    r"^\s+(?:/\*[0-9a-f]+\*/)?\s*(?P<guard>@!?U?P\w+\s+)?(?P<mnemonic>[A-Z][A-Z0-9_]*(?:\.\w+)*)\b(?P<operands>[^;]*);"
)
SASS_TARGET = re.compile(r"`\((\.L\w+)\)")
AMD = re.compile(r"^\s+(?P<mnemonic>[a-z]\w+)(?P<operands>[^;]*)")
AMD_TARGET = re.compile(r"\s(\.?LBB\w+)\s*$")

MATRIX = re.compile(r"^(HMMA|IMMA|QMMA|OMMA|HGMMA|QGMMA|IGMMA|UTC\w*MMA|v_s?mfma)")
# Loads of a tile: from global memory to registers, and asynchronous copies of it into shared memory.
LOAD = re.compile(r"^(LDG|LDGSTS|UTMALDG|UBLKCP|global_load|buffer_load)")
ASYNCHRONOUS = re.compile(r"^(LDGSTS|UTMALDG|UBLKCP)")
SPILL = re.compile(r"^(STL|LDL|scratch_)")
JUMPS = ("BRA", "UBRA", "JMP", "s_branch", "s_cbranch")
ENDS = ("EXIT", "RET", "s_endpgm", "s_setpc")


@dataclass(frozen=True)
class Instruction:
    """`jump` is the label that it may continue at, `falls_through` whether it may continue behind itself."""

    mnemonic: str
    jump: str | None = None
    falls_through: bool = True


@dataclass(frozen=True)
class Program:
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # the index of the instruction behind a label

    def successors(self, index: int) -> list[int]:
        instruction = self.instructions[index]
        behind = [index + 1] if instruction.falls_through and index + 1 < len(self.instructions) else []
        target = self.labels.get(instruction.jump or "", len(self.instructions))
        return behind + ([target] if target < len(self.instructions) else [])


def parse_sass(text: str) -> Program:
    """What `nvdisasm -c` prints."""
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := SASS.match(line):
            mnemonic, operands = found["mnemonic"], found["operands"]
            base = mnemonic.partition(".")[0]
            target = SASS_TARGET.search(operands) if base in JUMPS else None
            # The condition stands before the mnemonic or, of a uniform branch, before the label.
            conditional = found["guard"] is not None or re.match(r"\s*!?U?P\d", operands) is not None
            falls_through = conditional or base not in (*JUMPS, *ENDS)
            instructions.append(Instruction(mnemonic, target[1] if target else None, falls_through))
    return Program(tuple(instructions), labels)


def parse_amdgcn(text: str) -> Program:
    """The assembly that LLVM's AMDGPU backend prints."""
    instructions, labels = [], {}
    for line in text.splitlines():
        line = line.partition(";")[0].rstrip()
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := AMD.match(line):
            mnemonic = found["mnemonic"]
            target = AMD_TARGET.search(line) if mnemonic.startswith(JUMPS) else None
            falls_through = mnemonic != "s_branch" and not mnemonic.startswith(ENDS)
            instructions.append(Instruction(mnemonic, target[1] if target else None, falls_through))
    return Program(tuple(instructions), labels)


def count(instructions: Sequence[Instruction], pattern: re.Pattern[str] | None = None) -> Counter[str]:
    """Instructions by mnemonic."""
    return Counter(
        instruction.mnemonic for instruction in instructions if pattern is None or pattern.match(instruction.mnemonic)
    )


def loops(program: Program) -> list[list[int]]:
    """The natural loops, each the sorted indices of its instructions.

    A loop's head dominates the jump back to it. Without that condition the slow paths that ptxas puts behind a
    function's end, which jump back into its middle, would look like loops.
    """
    starts, successors = _blocks(program)
    dominators = _dominators(successors)
    predecessors: list[list[int]] = [[] for _ in starts]
    for block, following in enumerate(successors):
        for other in following:
            predecessors[other].append(block)
    bodies: dict[int, set[int]] = {}
    for block, following in enumerate(successors):
        for head in following:
            if dominators[block] >> head & 1:
                body = bodies.setdefault(head, {head})
                pending = [block]
                while pending:
                    member = pending.pop()
                    if member not in body:
                        body.add(member)
                        pending += predecessors[member]
    ends = [*starts[1:], len(program.instructions)]
    return [sorted(index for block in body for index in range(starts[block], ends[block])) for body in bodies.values()]


def main_loop(program: Program) -> list[Instruction]:
    """The loop that does the work: of those with a matrix instruction (where none has one: with a load, or any at
    all) the innermost; of several the one with most loads, then with most instructions. Empty without a loop."""
    found = [[program.instructions[i] for i in body] for body in loops(program)]
    found = [body for body in found if len(body) > 1]  # the endless jump behind a function pads it
    for pattern in (MATRIX, LOAD):
        found = [body for body in found if count(body, pattern)] or found
    sizes = {id(body): {id(instruction) for instruction in body} for body in found}
    innermost = [body for body in found if not any(sizes[id(other)] < sizes[id(body)] for other in found)]
    return max(innermost, key=lambda body: (count(body, LOAD).total(), len(body)), default=[])


def _blocks(program: Program) -> tuple[list[int], list[list[int]]]:
    """Basic blocks that are reached: the first instruction of each, and the blocks that may follow it."""
    instructions = program.instructions
    if not instructions:
        return [], []
    leaders = {0, *(target for target in program.labels.values() if target < len(instructions))}
    for index, instruction in enumerate(instructions[:-1]):
        if instruction.jump or not instruction.falls_through:
            leaders.add(index + 1)
    starts = sorted(leaders)
    block_of = {start: block for block, start in enumerate(starts)}
    lasts = [start - 1 for start in starts[1:]] + [len(instructions) - 1]
    return starts, [[block_of[index] for index in program.successors(last)] for last in lasts]


def reached(program: Program) -> list[Instruction]:
    """The instructions that a run may come to, without what pads the function."""
    starts, successors = _blocks(program)
    ends = [*starts[1:], len(program.instructions)]
    found = [program.instructions[i] for block in _reached(successors) for i in range(starts[block], ends[block])]
    return [instruction for instruction in found if instruction.mnemonic != "NOP"]


def _reached(successors: list[list[int]]) -> list[int]:
    seen = {0} if successors else set()
    pending = list(seen)
    while pending:
        new = set(successors[pending.pop()]) - seen
        seen |= new
        pending += new
    return sorted(seen)


def _dominators(successors: list[list[int]]) -> list[int]:
    """For each block the set, as bits, of the blocks on every path from the first one to it; 0 where none leads."""
    order = _reached(successors)
    found = [0] * len(successors)
    for block in order:
        found[block] = (1 << len(successors)) - 1 if block else 1
    changed = True
    while changed:
        changed = False
        for block in order:
            for other in successors[block]:
                narrowed = found[other] & (found[block] | 1 << other)
                changed |= narrowed != found[other]
                found[other] = narrowed
    return found
