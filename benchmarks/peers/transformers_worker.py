"""A worker of benchmarks/serving.py: transformers' generate on a dense checkpoint in float32."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(path: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    print(json.dumps({"ready": True, "name": "transformers fp32"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompt"])
        times: list[float] = []

        def note(_ids: torch.Tensor, scores: torch.Tensor, times: list[float] = times) -> torch.Tensor:
            times.append(time.perf_counter())
            return scores

        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job["output"],
                min_new_tokens=job["output"],
                do_sample=False,
                logits_processor=[note],
                pad_token_id=0,
            )
        tokens = len(ids) * (job["output"] - 1)
        print(json.dumps({"ttft": times[0] - start, "seconds": times[-1] - times[0], "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
