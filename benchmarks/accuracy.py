"""What each method costs in accuracy, on one model, with the same calibration tokens and the same text, in one run.

    python benchmarks/accuracy.py --samples 128 --sequence-length 512 --json docs/results/accuracy.json

    python benchmarks/accuracy.py --table docs/results/accuracy.json      # the README's table, from an earlier run

KL is KL(baseline ‖ compressed) in nats per token; `ratio` is to plain round-to-nearest of the same bits, group size and
symmetry. CPU seconds are of the quantize stage alone.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from compress.calibration import calibrate_texts
from compress.evaluate import environment
from compress.evaluate.divergence import compare_models
from compress.heldout import evaluation_source, evaluation_windows
from compress.progress import Reporter
from compress.recipe import QuantizeSettings, load_recipe
from compress.runtime.engine import Engine
from compress.sources import resolve
from compress.stages import StageRun, run_stage

RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2-135m-awq.yaml"


@dataclass(frozen=True)
class Arm:
    name: str
    changes: dict[str, Any]
    reference: str  # the arm whose KL the ratio is to


ARMS = [
    Arm("rtn sym", {"method": "rtn"}, "rtn sym"),
    Arm("rtn asym", {"method": "rtn", "symmetric": False}, "rtn asym"),
    Arm("gptq sym", {"method": "gptq"}, "rtn sym"),
    Arm("gptq asym", {"method": "gptq", "symmetric": False}, "rtn asym"),
    Arm("awq sym", {"method": "awq"}, "rtn sym"),
    Arm("awq asym", {"method": "awq", "symmetric": False}, "rtn asym"),
    Arm("awq+gptq sym", {"method": "awq", "rounding": "gptq"}, "rtn sym"),
    Arm("awq+gptq asym", {"method": "awq", "rounding": "gptq", "symmetric": False}, "rtn asym"),
]


def table(told: dict[str, Any]) -> str:
    """A finished run as a Markdown table, with what it was measured on."""
    lines = [
        "| method | perplexity | KL, 95 % interval | KL to RTN | top-1 agreement | CPU s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in told["rows"].items():
        low, high = row["kl_ci95"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"| {name} | {row['perplexity']['compressed']:.2f} | {row['kl']:.4f} ({low:.4f} to {high:.4f}) | {ratio} "
            f"| {100 * row['top1']:.1f} % | {row['cpu_seconds']:.0f} |"
        )
    baseline = next(iter(told["rows"].values()))["perplexity"]["baseline"]
    text, calibration, hardware = told["text"], told["calibration"], told["hardware"]
    lines += [
        "",
        f"SmolLM2-135M-Instruct, int4, group {told['group_size']}, {calibration['samples']} × "
        f"{calibration['sequence_length']} calibration tokens; baseline perplexity {baseline:.2f} on {text['windows']} "
        f"windows of {text['window']} tokens held apart; {hardware['cores']} cores of an {hardware['cpu']}; commit "
        f"{told['commit']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="gives the model, the data and the text")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--text", help="another text to evaluate on")
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--arms", nargs="*", default=[arm.name for arm in ARMS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print a finished run's table and stop")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    recipe = load_recipe(options.recipe)
    assert recipe.calibration is not None
    assert recipe.evaluate is not None
    source = resolve(recipe.model).path
    text = options.text or recipe.evaluate.text
    data = recipe.calibration.sources
    calibration = calibrate_texts(data, options.samples, options.sequence_length, 0, None, source, evaluation=text)
    windows = evaluation_windows(evaluation_source(text, data), source, 1024, options.tokens)
    baseline = Engine.load(source, exact=True)
    facts = calibration.facts
    print(f"{facts.samples} samples, {facts.tokens} tokens; {windows.facts.windows} windows of 1024 of {text}")
    columns = ("method", "perplexity", "KL", "95 % CI", "ratio", "top-1", "CPU s", "wall s")
    print("{:14} {:>18} {:>8} {:>18} {:>6} {:>6} {:>6} {:>6}".format(*columns))
    rows: dict[str, dict[str, Any]] = {}
    for arm in (arm for arm in ARMS if arm.name in options.arms):
        settings = QuantizeSettings(**({"group_size": options.group_size} | arm.changes))
        with tempfile.TemporaryDirectory() as place:
            used = None if settings.method == "rtn" else calibration  # min-max RTN reads no data
            run = StageRun(source, Path(place) / "out", Path(place) / "walk", used, Reporter())
            started, cpu = time.monotonic(), time.process_time()
            record = run_stage("quantize", run, settings)
            spent = time.process_time() - cpu, time.monotonic() - started
            found = compare_models(baseline, Engine.load(run.output, exact=True), windows.ids)
        row = {
            "perplexity": found.perplexity.model_dump(),
            "kl": found.kl.mean,
            "kl_ci95": found.kl.ci95,
            "top1": found.top1_agreement,
            "cpu_seconds": spent[0],
            "seconds": spent[1],
            "peak_above_start_bytes": record["peak_rss_bytes"] - record["rss_before_bytes"],
        }
        rows[arm.name] = row
        row["ratio"] = row["kl"] / rows[arm.reference]["kl"] if arm.reference in rows else None
        low, high = found.kl.ci95 or (float("nan"), float("nan"))
        change = f"{found.perplexity.baseline:.3f} -> {found.perplexity.compressed:.3f}"
        ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
        print(
            f"{arm.name:14} {change:>18} {row['kl']:8.4f} {f'{low:.4f}–{high:.4f}':>18} {ratio:>6} "
            f"{row['top1']:6.3f} {spent[0]:6.0f} {spent[1]:6.0f}",
            flush=True,
        )
    if options.json:
        told = {
            "calibration": facts.as_dict(),
            "text": windows.facts.as_dict(),
            "group_size": options.group_size,
            "rows": rows,
            "hardware": environment.hardware(),
            "versions": environment.versions(),
            "commit": environment.commit(),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
