"""A worker of benchmarks/serving.py: vLLM's CPU build, in an environment of its own.

VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 PYTHON vllm_worker.py CHECKPOINT THREADS
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main(path, threads, dtype):
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    llm = LLM(path, dtype=dtype, enforce_eager=True, max_model_len=2048, enable_prefix_caching=False)
    print(json.dumps({"ready": True, "name": f"vLLM {dtype}"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(max_tokens=job["output"], temperature=0.0, ignore_eos=True, detokenize=False)
        engine = llm.llm_engine
        start = first = time.perf_counter()
        for number, ids in enumerate(job["prompt"]):
            engine.add_request(f"{start}-{number}", {"prompt_token_ids": ids}, params)
        counts, before = {}, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if not before and len(counts) == len(job["prompt"]):  # everybody has a first token
                first, before = time.perf_counter(), sum(counts.values())
        result = {
            "ttft": first - start,
            "seconds": time.perf_counter() - first,
            "tokens": sum(counts.values()) - before,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "float32")
