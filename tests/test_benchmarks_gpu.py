"""The GPU benchmark without a GPU: what it says, what it would catch, and its tables with made-up times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from benchmarks.gpu_inputs import error_of, poisoned
from benchmarks.gpu_tables import Column, Deadline, Section

ROOT = Path(__file__).parents[1]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | quiet | environment, capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run("-m", "benchmarks.gpu")
    assert done.returncode == 2
    assert done.stderr == "error: torch sees no GPU here; --interpret runs the same script on this CPU\n"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_in_units_of_rounding(dtype: torch.dtype) -> None:
    """A rounding to nearest costs 0.41 of a unit; one lost element in a thousand, or one NaN, is beyond every limit."""
    torch.manual_seed(0)
    expected = torch.randn(100_000, dtype=torch.float64)
    got = expected.to(dtype)
    assert 0.35 < error_of(got, expected, dtype) < 0.45
    lost = got.clone()
    lost[::1000] = 0
    assert error_of(lost, expected, dtype) > 2.5
    lost[0] = torch.nan
    assert error_of(lost, expected, dtype) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_what_a_kernel_does_not_write_is_poison(dtype: torch.dtype) -> None:
    with poisoned():
        assert torch.empty(64, dtype=dtype).float().isnan().all()
        assert (torch.empty(64, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_tables() -> None:
    section = Section("Times", (Column("layer"), Column("µs", ".1f")))
    section.add("qkv", 12.345)
    section.add("o", None)
    section.failures.append("o: 3 > 2")
    text = section.markdown()
    assert "| layer | µs |\n| --- | ---: |\n| qkv | 12.3 |\n| o | – |" in text
    assert "**FAILED** o: 3 > 2" in text
    assert section.as_dict()["rows"][1] == {"layer": "o", "µs": None}


def test_time_that_is_up_is_told() -> None:
    deadline = Deadline(0.0)
    assert all(deadline.passed(f"layer {i}") for i in range(8))
    assert deadline.note() == [
        "Skipped as 0 s were up: layer 0, layer 1, layer 2, layer 3, layer 4, layer 5 and 2 more."
    ]
    assert not Deadline(60.0).passed("soon")


MADE_UP = """
import sys, torch
from benchmarks import gpu_attention, gpu_linear
from benchmarks.gpu_clock import Bench, Roofline, Timing
from benchmarks.gpu_shapes import SMALL_LAYERS
from benchmarks.gpu_tables import Deadline

class Clock(Bench):
    def measure(self, calls):
        for call in calls[:1]:
            call()
        return Timing(2e-5, 1e-5, 3e-5)

bench = Clock(torch.device("cpu"), (torch.float16,), False, 1 << 12)
gpu_linear.LAYERS, gpu_linear.TOKENS = SMALL_LAYERS[:1], (1, 2)
gpu_attention.MODELS = gpu_attention.SMALL_MODELS
gpu_attention.CONTEXTS, gpu_attention.BATCHES = (48,), (1, 2)
gpu_attention.fits = lambda bench, nbytes: nbytes < 20000
roofline = Roofline(1e12, 1e14)
print(gpu_linear.measure_linears(bench, roofline, Deadline(60)).markdown())
print(gpu_attention.measure_attention(bench, roofline, Deadline(60)).markdown())
"""


def test_times_become_speed_ups_and_shares() -> None:
    """128 × 256 half-precision weights are 65.5 KB: of 1 TB/s and 20 µs, 0.3 %. What memory forbids is a dash."""
    done = run("-c", MADE_UP, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "| small | square | 128 × 256 | cuBLAS | 20.0 µs, ×1.00, 0% | 20.0 µs, ×1.00, 0% |" in done.stdout
    assert "| small | square | 128 × 256 | int4 | 20.0 µs, ×1.00, 0% |" in done.stdout
    assert "| small | 48 | torch | 20.0 µs, 0% | – |" in done.stdout
    assert "| small | 48 | paged, fp8 | 20.0 µs, ×1.00, 0% | 20.0 µs, 0% |" in done.stdout


@pytest.mark.slow
def test_the_whole_script_runs_interpreted(tmp_path: Path) -> None:
    done = run("-m", "benchmarks.gpu", "--interpret", "--out", str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "report" / "report.json").read_text())
    titles = [section["title"].partition(",")[0] for section in told["sections"]]
    assert titles == ["Correctness", "Linears", "Decode attention", "Latent decode attention", "Decode of the engine"]
    assert all(section["rows"] for section in told["sections"])
    assert all(row.get("seconds") is None for section in told["sections"] for row in section["rows"])
    assert told["receipt"]["command"].startswith("python -m benchmarks.gpu --interpret --out ")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "µs" not in text
    assert " ok |" in text
