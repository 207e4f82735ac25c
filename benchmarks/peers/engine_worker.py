"""A worker of benchmarks/serving.py: the bundled runtime."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from compress.runtime.engine import Engine, SamplingParams


def main(path: Path, threads: int, name: str) -> None:
    torch.set_num_threads(threads)
    engine = Engine.load(path)
    print(json.dumps({"ready": True, "name": name}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(max_tokens=job["output"], temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        requests = [engine.add(ids, params) for ids in job["prompt"]]
        while not all(request.generated for request in requests):
            engine.step()
        first, before = time.perf_counter(), sum(len(request.generated) for request in requests)
        while any(request.status != "finished" for request in requests):
            engine.step()
        end = time.perf_counter()
        tokens = sum(len(request.generated) for request in requests) - before
        print(json.dumps({"ttft": first - start, "seconds": end - first, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
