"""The gate: every kernel compiled for every target, and its machine code looked at. No GPU is needed.

    python -m compress.kernels.gate                       # all, and docs/kernels-gate.md
    python -m compress.kernels.gate --target sm_90 --only "int4 M=16"
    python -m compress.kernels.gate --few                 # three targets instead of seven
    python -m compress.kernels.gate --record              # accept the instruction counts as they are

Exit code 0: all is well; 1: one line for each objection; 2: it could not begin.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.kernels.gate_case import Case
from compress.kernels.gate_processes import Failure, run_isolated
from compress.kernels.gate_report import Row, plain_table, refusals, report
from compress.kernels.gate_rules import measure, objections
from compress.kernels.launch import TARGETS, Target, interpreting

FEW = tuple(target for target in TARGETS if str(target) in ("sm_80", "sm_90", "gfx942"))
# Modules of compress.kernels.gate_cases in the order of the report, and the targets of each in a run of all targets.
MODULES: Mapping[str, Sequence[Target]] = {
    "matmul": TARGETS,
    "attention": TARGETS,
    "narrow_matmul": TARGETS,
    "pointwise": TARGETS,
}
BUDGET = Path(__file__).with_name("gate_budget.json")
REPORT = Path(__file__).resolve().parents[1] / "docs" / "kernels-gate.md"


@dataclass(frozen=True)
class Budget:
    """Recorded instructions per element: Triton's version → case → target. Each version counts its own."""

    per_element: Mapping[str, Mapping[str, Mapping[str, float]]]

    @staticmethod
    def read(path: Path) -> Budget:
        return Budget(json.loads(path.read_text()) if path.is_file() else {})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.per_element, indent=1) + "\n")

    def knows(self, triton: str) -> bool:
        """Whether this Triton is bound: it has figures, or nobody has."""
        return triton in self.per_element or not self.per_element

    def of(self, triton: str, case: str, target: Target) -> float | None:
        return self.per_element.get(triton, {}).get(case, {}).get(str(target))


def collect(modules: Iterable[str] = MODULES) -> dict[str, list[Case]]:
    """module → its cases."""
    return {name: list(importlib.import_module(f"compress.kernels.gate_cases.{name}").CASES) for name in modules}


def judge(rows: Sequence[Row], budget: Budget, triton: str) -> list[str]:
    """One line for each objection."""
    found = []
    for row in rows:
        allowed = budget.of(triton, row.case.name, row.target)
        told = objections(row.case, row.target, row.outcome, allowed, budget.knows(triton))
        found += [f"{row.case.name} / {row.target}: {objection}" for objection in told]
    return found


def compile_all(jobs: Sequence[tuple[Case, Target]]) -> list[Row]:
    show = sys.stderr.isatty()

    def progress(count: int) -> None:
        if show:
            print(f"\r{count} of {len(jobs)} compiled", end="\n" if count == len(jobs) else "", file=sys.stderr)

    outcomes = run_isolated(
        [functools.partial(measure, case, target) for case, target in jobs], os.cpu_count() or 1, progress
    )
    return [Row(case, target, outcome) for (case, target), outcome in zip(jobs, outcomes, strict=True)]


def recorded(rows: Sequence[Row], budget: Budget, triton: str, whole: bool = False) -> Budget:
    """The budget with these rows' figures in it; after a whole run, with no others of this Triton."""
    known = {} if whole else budget.per_element.get(triton, {})
    figures = {name: dict(row) for name, row in known.items()}
    for row in rows:
        loop = None if isinstance(row.outcome, Failure) or not row.outcome else row.outcome[0].loop
        if loop is not None and loop.per_element is not None:
            figures.setdefault(row.case.name, {})[str(row.target)] = loop.per_element
    return Budget(dict(sorted({**budget.per_element, triton: figures}.items())))


def compilers() -> tuple[str, str]:
    """Triton's version, and all compilers in words."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    found = []
    for name in ("ptxas", "ptxas-blackwell"):
        if (folder / name).is_file():
            told = subprocess.run([str(folder / name), "--version"], capture_output=True, text=True, check=True).stdout
            version = re.search(r"V(\d+\.\d+\.\d+)", told)
            found.append(f"{name} {version[1] if version else 'of unknown version'}")
    return triton.__version__, ", ".join([f"Triton {triton.__version__}", *found])


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"unknown {kind} '{name}'" + (f"; nearest: '{near[0]}'" if near else "; there are none")


def choose(
    groups: Mapping[str, Sequence[Case]], modules: Mapping[str, Sequence[Target]], options: argparse.Namespace
) -> list[tuple[Case, Target]] | str:
    """What to compile, or what is wrong with the names given."""
    target, only = options.target, options.only
    named = [known for known in TARGETS if str(known) == target] or (FEW if options.few else ())
    if target is not None and target not in map(str, TARGETS):
        return unknown("target", target, [str(known) for known in TARGETS])
    cases = [(case, named or modules[module]) for module, group in groups.items() for case in group]
    if only is not None:
        chosen = groups.get(only) or [case for case, _ in cases if case.name == only]
        if not chosen:
            return unknown("case", only, [*groups, *(case.name for case, _ in cases)])
        cases = [(case, targets) for case, targets in cases if case in chosen]
    return [(case, each) for case, targets in cases for each in targets]


def main(
    arguments: Sequence[str] | None = None,
    modules: Mapping[str, Sequence[Target]] = MODULES,
    budget_file: Path = BUDGET,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help=f"one of {', '.join(map(str, TARGETS))}")
    parser.add_argument("--few", action="store_true", help=f"compile for {', '.join(map(str, FEW))} alone")
    parser.add_argument("--only", metavar="NAME", help="a case, or a module of cases")
    parser.add_argument("--record", action="store_true", help="record the instructions per element as the budget")
    parser.add_argument("--out", type=Path, help="the report's file; of a full run, docs/kernels-gate.md")
    options = parser.parse_args(arguments)
    if interpreting():
        return fail("TRITON_INTERPRET is set: a process that interprets kernels cannot compile them")
    if importlib.util.find_spec("triton") is None:
        return fail("the gate compiles with Triton, which is not installed: pip install 'triton>=3.6'")
    if options.out is not None and not options.out.parent.is_dir():
        return fail(f"--out: there is no folder {options.out.parent}")
    jobs = choose(collect(modules), modules, options)
    if isinstance(jobs, str):
        return fail(jobs)
    return conclude(compile_all(jobs), options, budget_file)


def conclude(rows: Sequence[Row], options: argparse.Namespace, budget_file: Path) -> int:
    """Print, record and judge."""
    triton, described = compilers()
    budget = Budget.read(budget_file)
    whole = options.target is None and options.only is None and not options.few
    if options.record:
        budget = recorded(rows, budget, triton, whole)
        budget.write(budget_file)
    print(plain_table(rows))
    for line in refusals(rows):
        print(f"refused: {line}")
    out = options.out or (REPORT if whole and REPORT.parent.is_dir() else None)
    if out is not None:
        out.write_text(report(rows, described))
    found = judge(rows, budget, triton)
    for line in found:
        print(f"objection: {line}", file=sys.stderr)
    verdict = f"{len(found)} objections" if found else "no objection"
    if not budget.knows(triton):
        known = ", ".join(budget.per_element)
        verdict += f"; INSTRUCTIONS NOT COMPARED: none are recorded for Triton {triton}, only for {known}"
    print(f"{len({row.case.name for row in rows})} cases, {len(rows)} builds, {described}: {verdict}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
