"""The GPU kernels on one GPU: first whether they are right, then how fast they are, beside cuBLAS and torch.

    python -m benchmarks.gpu --out out/gpu          # under 8 minutes; report.md and report.json
    python -m benchmarks.gpu --interpret            # no GPU: the same script on small shapes, without times

Exit code 0: every kernel is right; 1: one is not, or a section failed; 2: it could not begin.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHARES = {
    "correctness": 120.0,
    "linears": 150.0,
    "attention": 60.0,
    "latent attention": 25.0,
    "engine": 70.0,
}  # seconds of each


def receipt(arguments: Sequence[str], interpreted: bool) -> dict[str, Any]:
    """What was measured, on what, by which command."""
    import torch
    import triton

    from compress.evaluate import environment

    told: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *arguments]),
        "commit": environment.commit(Path(__file__).parents[1]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "interpreted": "yes: on a CPU, without times" if interpreted else "no",
    }
    if not interpreted:
        properties = torch.cuda.get_device_properties(0)
        told |= {"gpu": properties.name, "memory_bytes": properties.total_memory, "driver": driver_version()}
    return told


def driver_version() -> str | None:
    for command in (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[-1]
    return None


def run_sections(interpreted: bool, chosen: Sequence[str], scale: float) -> list[Any]:
    """Imports what needs Triton only now: whether it interprets is settled when kernels are defined."""
    from benchmarks.gpu_attention import measure_attention, measure_latent_attention
    from benchmarks.gpu_checks import check_kernels
    from benchmarks.gpu_clock import measure_roofline, open_bench
    from benchmarks.gpu_engine import measure_engine
    from benchmarks.gpu_linear import measure_linears
    from benchmarks.gpu_tables import Column, Deadline, Section

    bench = open_bench(interpreted)
    roofline = measure_roofline(bench)
    makers: dict[str, Callable[[Deadline], Section]] = {
        "correctness": lambda deadline: check_kernels(bench, deadline),
        "linears": lambda deadline: measure_linears(bench, roofline, deadline),
        "attention": lambda deadline: measure_attention(bench, roofline, deadline),
        "latent attention": lambda deadline: measure_latent_attention(bench, roofline, deadline),
        "engine": lambda deadline: measure_engine(bench, deadline),
    }
    sections = []
    if roofline is not None:
        columns = (Column("copy, read and written, GB/s", ".0f"), Column("bfloat16 TFLOP/s", ".0f"))
        measured = Section("This GPU, in this run", columns)
        measured.add(roofline.bytes_per_second / 1e9, roofline.flops / 1e12)
        print(measured.markdown(), flush=True)
        sections.append(measured)
    for name in chosen:
        started = time.monotonic()
        try:
            section = makers[name](Deadline(SHARES[name] * scale))
        except Exception as error:  # the other sections' figures are worth having
            traceback.print_exc()
            section = Section(name, (), failures=[f"{type(error).__name__}: {error}"])
        section.notes.append(f"This section took {time.monotonic() - started:.0f} s.")
        print(section.markdown(), flush=True)
        sections.append(section)
    return sections


def document(told: dict[str, Any], sections: Sequence[Any]) -> str:
    facts = [f"- {name.replace('_', ' ')}: {value}" for name, value in told.items()]
    return "\n".join(["# GPU kernels", "", *facts, "", *(section.markdown() for section in sections)])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.md and report.json there")
    parser.add_argument("--interpret", action="store_true", help="run on this CPU: right or wrong, but no times")
    parser.add_argument("--sections", nargs="+", choices=list(SHARES), default=list(SHARES), help="some of them")
    parser.add_argument("--scale", type=float, default=1.0, help="of each section's share of the time")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("error: Triton is not installed: pip install 'triton>=3.6'", file=sys.stderr)
        return 2
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    else:
        import torch

        if not torch.cuda.is_available():
            print("error: torch sees no GPU here; --interpret runs the same script on this CPU", file=sys.stderr)
            return 2
    started = time.monotonic()
    told = receipt(arguments, options.interpret)
    sections = run_sections(options.interpret, options.sections, options.scale)
    told["seconds"] = round(time.monotonic() - started)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.md").write_text(document(told, sections))
        results = {"receipt": told, "sections": [section.as_dict() for section in sections]}
        (options.out / "report.json").write_text(json.dumps(results, indent=1) + "\n")
    failures = [failure for section in sections for failure in section.failures]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
