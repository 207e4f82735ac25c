"""Kill a recipe's run at random moments, run it again, and compare every weight file with an uninterrupted run's.

    python benchmarks/resume.py recipes/smollm2-135m-awq.yaml --kills 3

An uninterrupted run is made first. Evaluation is left out: it does not touch the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

MEASURED = ("report.json", "report.html", "README.md", "recipe.yaml")  # tell times, or name the output


def digest(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in MEASURED]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def command(recipe: Path) -> list[str]:
    return [sys.executable, "-m", "compress.cli", "run", str(recipe)]


def without_evaluation(recipe: Path, output: Path) -> Path:
    content = yaml.safe_load(recipe.read_text())
    content.pop("evaluate", None)
    content["output"] = str(output)
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        whole = place / "whole"
        started = time.monotonic()
        subprocess.run(command(without_evaluation(options.recipe, whole)), check=True, stderr=subprocess.DEVNULL)
        seconds = time.monotonic() - started
        print(f"uninterrupted: {seconds:.0f} s", flush=True)
        expected = digest(whole)
        for kill in range(options.kills):
            broken = place / f"broken{kill}"
            recipe = without_evaluation(options.recipe, broken)
            moment = chance.uniform(0.1, 0.95) * seconds
            process = subprocess.Popen(command(recipe), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            time.sleep(moment)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            blocks = len(list(broken.with_name(broken.name + ".work").rglob("block-*.json")))
            subprocess.run(command(recipe), check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            same = digest(broken) == expected
            failed += not same
            print(
                f"kill -9 at {moment:.0f} s, after {blocks} blocks: {'same bytes' if same else 'DIFFERENT'}", flush=True
            )
            shutil.rmtree(broken)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
