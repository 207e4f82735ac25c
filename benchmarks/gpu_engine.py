"""Decode with the bundled engine: a randomly initialised model of Qwen3-0.6B's shape, written here.

Shapes: O out features, I in features.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_clock import Bench
from benchmarks.gpu_tables import Column, Deadline, Section
from compress.arch import read_spec
from compress.checkpoint import LazyTensor, write_checkpoint
from compress.errors import UserError
from compress.runtime.engine import Engine, SamplingParams
from compress.runtime.graphs import Replays

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
GROUP = 64


def write_model(directory: Path, config: dict[str, Any], int4: bool) -> None:
    """A checkpoint of random weights: bfloat16, or linears in compressed-tensors' pack-quantized int4."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, LazyTensor] = {}

    def lazy(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        def make() -> torch.Tensor:
            if name.endswith("_packed"):
                return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
            if name.endswith("_shape"):
                return torch.tensor([shape_of[name.removesuffix("_shape")]]).flatten()
            if name.endswith("_scale"):
                return (torch.rand(shape, generator=generator) * 0.002 + 0.004).to(dtype)
            return (
                torch.ones(shape, dtype=dtype)
                if len(shape) == 1
                else torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
            )

        tensors[name] = LazyTensor(dtype, shape, make)

    shape_of = read_spec(config).tensors()
    for name, shape in shape_of.items():
        if int4 and len(shape) == 2 and ".layers." in name:
            lazy(f"{name}_packed", torch.int32, (shape[0], shape[1] // 8))
            lazy(f"{name}_scale", torch.bfloat16, (shape[0], shape[1] // GROUP))
            lazy(f"{name}_shape", torch.int64, (2,))
        else:
            lazy(name, torch.bfloat16, shape)
    write_checkpoint(directory, tensors, config | (quantization() if int4 else {}), None)


def quantization() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {"quantization_config": told | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}}


def measure_engine(bench: Bench, deadline: Deadline) -> Section:
    """Each step computed as it comes, and steps replayed from graphs (without a GPU: from recorded programs)."""
    columns = (Column("weights"), Column("batch", "d"), Column("context", "d"), Column("steps"))
    speed = (Column("tok/s", ".0f"), Column("ms a step", ".2f"))
    section = Section("Decode of the engine, Qwen3-0.6B's shape, random weights", (*columns, *speed))
    config = QWEN3 | SMALL if bench.interpreted else QWEN3
    dtype = torch.float32 if bench.interpreted else torch.bfloat16
    prompt, batches, count = (8, (1, 2), 4) if bench.interpreted else (512, (1, 8, 64), 48)
    room = (prompt + count + 32) * max(batches)
    for weights in ("bfloat16", "int4"):
        if deadline.passed(weights):
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "model"
            write_model(place, config, weights == "int4")
            try:
                engine = Engine.load(place, bench.device.type, dtype, max_tokens_in_cache=room)
            except UserError as error:
                section.notes.append(f"{weights}: the engine does not load it: {error}")
                continue
            for batch in batches:
                if not deadline.passed(f"{weights}, batch {batch}"):
                    for steps, seconds in measure_steps(engine, batch, prompt, count, bench, section).items():
                        told = (None, None) if bench.interpreted else (batch / seconds, 1e3 * seconds)
                        section.add(weights, batch, prompt, steps, *told)
            del engine
    section.notes += deadline.note()
    return section


def measure_steps(
    engine: Engine, batch: int, prompt: int, count: int, bench: Bench, section: Section
) -> dict[str, float]:
    """Seconds of a step that is computed as it comes, and of one that is replayed."""
    recordings = engine.executor.replays
    engine.executor.replays = Replays(None)
    computed = decode_seconds(engine, batch, prompt, count, bench)
    engine.executor.replays = recordings
    before = recordings.steps
    replayed = decode_seconds(engine, batch, prompt, count, bench)
    if recordings.steps - before < count // 2 and not bench.interpreted:
        section.failures.append(f"batch {batch}: {recordings.steps - before} steps of {count} were replayed")
    return {"computed": computed, "replayed": replayed}


def decode_seconds(engine: Engine, batch: int, prompt: int, steps: int, bench: Bench) -> float:
    """The median of the steps in which every request gains a token, after the prompts and a few steps to warm up."""
    vocabulary = engine.spec.vocab
    ids = torch.randint(vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_tokens=steps + 4, ignore_eos=True)
    requests = [engine.add(row, params) for row in ids]
    spent = []
    while any(request.status != "finished" for request in requests):
        started = time.perf_counter()
        gained = engine.step()
        if not bench.interpreted:
            torch.cuda.synchronize()
        if len(gained) == batch and all(len(request.token_ids) > prompt + 3 for request in requests):
            spent.append(time.perf_counter() - started)
    return statistics.median(spent)
