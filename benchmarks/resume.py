"""Kill -9 a recipe's run at random moments, run it again each time, and compare the weights with a whole run's.

    python benchmarks/resume.py recipes/smollm2-135m-awq.yaml --kills 3
    python benchmarks/resume.py recipes/smollm2-135m-awq.yaml --kills 3 --reference out/smollm2-135m-awq

Without --reference an uninterrupted run is made first. Evaluation is cut to one window: it does not touch the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
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


def brief(recipe: Path, output: Path) -> Path:
    """The same job with another output and next to no evaluation; the text stays, as it decides what calibrates."""
    content = yaml.safe_load(recipe.read_text())
    content["output"] = str(output)
    if "evaluate" in content:
        content["evaluate"] |= {"window": 64, "tokens": 64, "speed": None}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def finished_blocks(output: Path) -> int:
    return len(list(output.with_name(output.name + ".work").rglob("block-*.json")))


def kill_after(command: list[str], output: Path, blocks: int, more_seconds: float) -> None:
    """Start a run and SIGKILL it `more_seconds` after so many blocks are finished."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while finished_blocks(output) < blocks:
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself, with exit code {process.returncode}")
        time.sleep(0.05)
    time.sleep(more_seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30, help="blocks of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", type=Path, help="the result of an uninterrupted run of this recipe")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        whole, broken = options.reference or Path(name) / "whole", Path(name) / "broken"
        if options.reference is None:
            subprocess.run(command(brief(options.recipe, whole)), check=True, stderr=subprocess.DEVNULL)
        again = command(brief(options.recipe, broken))
        for blocks in sorted(chance.sample(range(options.layers), options.kills)):
            kill_after(again, broken, blocks, chance.uniform(0, 8))
            print(f"kill -9 after {finished_blocks(broken)} of {options.layers} blocks", flush=True)
        subprocess.run(again, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        expected, found = digest(whole), digest(broken)
    for file, sha256 in expected.items():
        print(f"{sha256[:16]}  {'same' if found.get(file) == sha256 else 'DIFFERENT'}  {file}")
    sys.exit(0 if found == expected else 1)


if __name__ == "__main__":
    main()
