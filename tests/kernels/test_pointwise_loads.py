"""The small kernels move 16 bytes at a time: their machine code for sm_90, at aligned shapes."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from compress.kernels.aot import build
from compress.kernels.gate_cases.pointwise import CASES
from compress.kernels.launch import Target
from compress.kernels.machine_code import count

SM90 = Target("cuda", 90)
NAMES = [case.name for case in CASES if case.name.endswith("bf16")]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_loads_and_stores_are_128_bits_wide(name: str) -> None:
    """All loads of the first launch; all stores but those of one number per row or tile."""
    case = next(case for case in CASES if case.name == name)
    found = count(build(case.plan(SM90)[0], SM90).program.instructions, re.compile(r"LDG|STG"))
    assert {mnemonic for mnemonic in found if mnemonic.startswith("LDG")} == {"LDG.E.128"}
    if name.startswith(("log-probabilities", "divergence")):
        return
    assert found["STG.E.128"] >= 1
    assert found["STG.E"] == (1 if name.startswith("tokens") else 0)
