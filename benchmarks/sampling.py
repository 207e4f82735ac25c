"""What choosing tokens costs, beside a decode step of a model.

    python benchmarks/sampling.py CHECKPOINT [--requests 16] [--rounds 30] [--threads 2]

In each round the engine takes one greedy step for all requests, then each kind of sampling chooses for as many rows of
the model's own logits once: a machine that slows down slows all of them. Milliseconds; the step has greedy sampling in
it. "flat" divides the logits by 300, so that the nucleus is nine tenths of the vocabulary. With one thread its own time
is what counts, so that other processes do not.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported; what `compress` sets for itself

PROMPT = 64
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-k 40": {"temperature": 0.7, "top_k": 40},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-p 0.9, flat": {"temperature": 0.7, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "top-k 1000, top-p 0.9, min-p 0.01": {"temperature": 0.7, "top_k": 1000, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
}


def measure(path: Path, count: int, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of each kind, one for each round; "step" is a whole one."""
    import torch

    from compress.runtime.engine import Engine, SamplingParams
    from compress.runtime.sampler import Draw, distributions, logprobs, sample

    engine = Engine.load(path)
    operations, vocab = engine.executor.model.operations, engine.spec.vocab
    chance = random.Random(0)
    prompts = [[chance.randrange(vocab) for _ in range(PROMPT)] for _ in range(count)]
    requests = [engine.add(p, SamplingParams(max_tokens=rounds + 9, ignore_eos=True)) for p in prompts]
    while any(not request.generated for request in requests):
        engine.step()
    logits_NV = torch.cat([engine.logits(engine.hidden_states(torch.tensor(p))[-1:]) for p in prompts])
    flat_NV = logits_NV / 300

    def draws(kind: str) -> list[Draw]:
        params = SamplingParams(**KINDS[kind])  # type: ignore[arg-type]
        return [Draw(params, r.key, len(r.token_ids), r.token_ids, (), PROMPT) for r in requests]

    works: dict[str, Callable[[], object]] = {
        kind: lambda kind=kind: sample(operations, flat_NV if "flat" in kind else logits_NV, draws(kind))
        for kind in KINDS
    }
    works["distributions, for drafts"] = lambda: distributions(operations, logits_NV, draws("temperature"))
    works["logprobs"] = lambda: logprobs(operations, logits_NV, [1] * count, [0] * count)
    works["logprobs and the 20 likeliest"] = lambda: logprobs(operations, logits_NV, [1] * count, [20] * count)
    took: dict[str, list[float]] = {name: [] for name in ("step", *works)}
    for _ in range(rounds):
        for name, work in {"step": engine.step, **works}.items():
            start = clock()
            work()
            took[name].append(1e3 * (clock() - start))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    took = measure(arguments.checkpoint, arguments.requests, arguments.rounds, clock)
    step = statistics.median(took["step"])
    print(f"{arguments.checkpoint.name}, {arguments.requests} requests, {arguments.threads} thread(s)\n")
    print("| | median ms | least ms | of a step |\n| --- | ---: | ---: | ---: |")
    for name, values in took.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.2f} | {min(values):.2f} | {100 * median / step:.1f} % |")


if __name__ == "__main__":
    main()
