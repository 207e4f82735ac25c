"""The gate objects to machine code that is not as its case says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the gate compiles with Triton")
import triton
import triton.language as tl

from compress.kernels import gate
from compress.kernels.gate import Budget, compile_all, judge, recorded
from compress.kernels.gate_case import Case
from compress.kernels.gate_processes import Failure, run_isolated
from compress.kernels.gate_report import Row, report
from compress.kernels.launch import TARGETS, Launch, Target

AMPERE, HOPPER, AMD = Target("cuda", 80), Target("cuda", 90), Target("hip", "gfx942")


@triton.jit
def gemm(a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + start + k[:, None])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total)


@triton.jit
def elementwise(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.float32) * 2.0)


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def plan_gemm(m: int = 64, n: int = 64, warps: int = 4, stages: int = 3) -> Callable[[Target], list[Launch]]:
    def plan(target: Target) -> list[Launch]:
        arguments: dict[str, Any] = {"a_ptr": meta(m, 4096), "b_ptr": meta(n, 4096), "K": 4096}
        arguments |= {"out_ptr": meta(m, n, dtype=torch.float32), "M": m, "N": n, "BK": 64}
        return [Launch(gemm, (1,), arguments, warps, stages)]

    return plan


def plan_e4m3(target: Target) -> list[Launch]:
    arguments = {"x_ptr": meta(512, dtype=torch.float8_e4m3fn), "out_ptr": meta(512), "BLOCK": 512}
    return [Launch(elementwise, (1,), arguments)]


GEMM = Case(
    "gemm",
    plan_gemm(),
    elements=64 * 64,
    matrix={"sm_80": "HMMA", "sm_90": "HGMMA", "gfx942": "v_mfma"},
    tiles_in_flight=(2, 64 * 64 * 2),
)


def objections_to(case: Case, *targets: Target, budget: Budget | None = None) -> list[str]:
    rows = compile_all([(case, target) for target in targets])
    if budget is None:
        budget = recorded(rows, Budget({}), triton.__version__)
    return judge(rows, budget, triton.__version__)


def changed(**changes: Any) -> Case:
    return Case(**({**vars(GEMM), **changes}))


def test_nothing_is_said_of_a_kernel_that_is_as_expected() -> None:
    assert objections_to(GEMM, AMPERE, HOPPER, AMD) == []


def test_a_spill() -> None:
    """In one warp the float32 accumulator alone is 512 registers of a thread; sm_80 has 255, gfx942 512."""
    for target, shape in ((AMPERE, (128, 128)), (AMD, (256, 128))):
        found = objections_to(
            changed(plan=plan_gemm(*shape, warps=1, stages=1), matrix={}, tiles_in_flight=None), target
        )
        assert len(found) == 1, target
        assert f"gemm / {target}: gemm: registers spill: " in found[0]


def test_too_much_shared_memory() -> None:
    found = objections_to(changed(plan=plan_gemm(256, 128, warps=8, stages=6), matrix={}), Target("cuda", 89))
    assert [line for line in found if "bytes of shared memory, 101376 are there" in line]


def test_another_matrix_instruction_than_expected() -> None:
    """Hopper's wgmma has at least 64 rows; 16 rows fall back to mma."""
    case = changed(plan=plan_gemm(16, 64), tiles_in_flight=None)
    (line,) = objections_to(case, HOPPER)
    assert "expected HGMMA in its loop, found HMMA" in line


def test_too_few_tiles_in_flight() -> None:
    (line,) = objections_to(changed(tiles_in_flight=(9, 64 * 64 * 2)), AMPERE)
    assert "tiles of 8192 bytes in flight, 9 expected" in line
    (line,) = objections_to(changed(plan=plan_gemm(stages=1)), AMPERE)
    assert "no asynchronous copy in its loop" in line


def test_a_loop_beyond_its_budget() -> None:
    rows = compile_all([(GEMM, AMPERE)])
    budget = recorded(rows, Budget({}), triton.__version__)
    figure = budget.per_element[triton.__version__]["gemm"]["sm_80"]
    for allowed, objects in ((figure / 1.04, False), (figure / 1.06, True)):
        found = judge(rows, Budget({triton.__version__: {"gemm": {"sm_80": allowed}}}), triton.__version__)
        assert bool(found) == objects
        assert not objects or f"{figure} instructions per element, recorded are {allowed}" in found[0]
    (line,) = judge(rows, Budget({}), triton.__version__)
    assert "none recorded; look, then --record" in line
    assert judge(rows, Budget({"2.0.0": {}}), triton.__version__) == []  # another compiler's figures bind nobody


def test_a_loop_beyond_what_its_case_allows() -> None:
    """Whatever is recorded; and a case without a loop does not pass either."""
    figure = objections_to(changed(most={"sm_80": 0.01}), AMPERE)
    assert len(figure) == 1
    assert "at most 0.01 are allowed" in figure[0]
    assert not objections_to(changed(most={"sm_80": 1000.0}), AMPERE)


def test_one_of_several_matrix_instructions_will_do() -> None:
    assert not objections_to(changed(matrix={"sm_80": "QMMA|HMMA"}), AMPERE)
    assert objections_to(changed(matrix={"sm_80": "QMMA|IMMA"}), AMPERE)


def test_a_refused_compile() -> None:
    """Ampere knows no e4m3; a refusal has to be announced, and to stay true."""
    (line,) = objections_to(Case("e4m3", plan_e4m3), AMPERE)
    assert "does not compile: " in line
    assert "fp8e4nv not supported" in line
    announced = Case("e4m3", plan_e4m3, refused={"sm_80": "no e4m3 before sm_89", "sm_90": "untrue"})
    (line,) = objections_to(announced, AMPERE, HOPPER)
    assert line == "e4m3 / sm_90: compiles, but the case says that it is refused: untrue"
    (row,) = compile_all([(announced, AMPERE)])
    assert "e4m3 / sm_80: no e4m3 before sm_89 (`" in report([row], "a compiler")


def test_a_compiler_that_dies_takes_nothing_with_it() -> None:
    def die() -> int:
        os.write(2, b"LLVM ERROR: unsupported\n")
        os.abort()

    def fail() -> int:
        raise RuntimeError("a listing\n  of the kernel\nwhat is wrong")

    results = run_isolated([lambda: 1, die, fail, die, lambda: 2], 2)
    assert results == [
        1,
        Failure("LLVM ERROR: unsupported (killed by SIGABRT)"),
        Failure("RuntimeError: what is wrong"),
        Failure("LLVM ERROR: unsupported (killed by SIGABRT)"),
        2,
    ]


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Target, ...]]:
    """A module of cases as the command finds it."""
    found = SimpleNamespace(CASES=[GEMM])
    monkeypatch.setitem(sys.modules, "compress.kernels.gate_cases.examples", found)  # type: ignore[arg-type]
    return {"examples": TARGETS}


def test_the_command_records_then_passes_then_objects(
    tmp_path: Path, cases: dict[str, tuple[Target, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    budget, out = tmp_path / "budget.json", tmp_path / "report.md"
    arguments = ["--target", "sm_80", "--out", str(out)]
    assert gate.main(arguments, cases, budget) == 1
    assert "objection: gemm / sm_80: gemm: " in capsys.readouterr().err
    assert gate.main([*arguments, "--record"], cases, budget) == 0
    written = out.read_text()
    assert "| gemm | sm_80 |" in written
    assert f"Triton {triton.__version__}, ptxas " in written
    assert gate.main(arguments, cases, budget) == 0
    assert out.read_text() == written
    shrunk = Budget.read(budget).per_element[triton.__version__]["gemm"]["sm_80"] / 2
    Budget({triton.__version__: {"gemm": {"sm_80": shrunk}}}).write(budget)
    assert gate.main(arguments, cases, budget) == 1


def test_a_compiler_without_a_record_is_told_in_the_last_line(
    tmp_path: Path, cases: dict[str, tuple[Target, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate passes, but nobody who reads its verdict alone takes that for a comparison."""
    budget = tmp_path / "budget.json"
    Budget({"2.0.0": {"gemm": {"sm_80": 1.0}}}).write(budget)
    assert gate.main(["--target", "sm_80"], cases, budget) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    told = f"none are recorded for Triton {triton.__version__}, only for 2.0.0"
    assert last.endswith(f": no objection; INSTRUCTIONS NOT COMPARED: {told}")
    assert gate.main(["--target", "sm_80", "--record"], cases, budget) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(": no objection")


def test_few_targets(cases: dict[str, tuple[Target, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate.main(["--few"], cases, tmp_path / "budget.json")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown if line.startswith("gemm ")] == ["sm_80", "sm_90", "gfx942"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm90"], "unknown target 'sm90'; nearest: 'sm_90'"),
        (["--only", "gem"], "unknown case 'gem'; nearest: 'gemm'"),
        (["--out", "no/such/report.md"], "--out: there is no folder no/such"),
    ],
)
def test_a_wrong_argument_is_one_line(
    cases: dict[str, tuple[Target, ...]], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert gate.main(arguments, cases) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("environment", "prelude", "message"),
    [
        ({"TRITON_INTERPRET": "1"}, "", "TRITON_INTERPRET is set"),
        ({}, "sys.modules['triton'] = None", "which is not installed"),
    ],
)
def test_where_it_cannot_work_it_says_so_in_one_line(environment: dict[str, str], prelude: str, message: str) -> None:
    code = f"import sys\n{prelude}\nfrom compress.kernels.gate import main\nsys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_names_of_cases_are_unique() -> None:
    names = [case.name for group in gate.collect().values() for case in group]
    assert len(names) == len(set(names))


def test_every_row_of_the_report_names_its_case() -> None:
    rows = [Row(Case("left out", plan_gemm()), AMPERE, Failure("no"))]
    assert "| left out | sm_80 | refused |" in report(rows, "a compiler")
