"""The engine on the Triton kernels, and its steps on the memory of graphs: the tokens of the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.kernels.dispatch import force
from compress.runtime.cuda_graphs import Captured, CudaRecorder
from compress.runtime.engine import Completion, Engine, SamplingParams
from compress.runtime.graphs import Replays
from tests.tiny import tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
    },
}


def completions(engine: Engine) -> list[Completion]:
    """Three requests of different lengths: in a graph for four, at last in one for one."""
    prompts = [[(7 * i + 11 * n) % 256 for i in range(3 + 9 * n)] for n in range(3)]
    params = [SamplingParams(max_tokens=8 + n // 2, temperature=0.0, logprobs=0, ignore_eos=True) for n in range(3)]
    return engine.generate(prompts, params)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_tokens_of_the_reference(family: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path, family, **FAMILIES[family])
    captures: list[int] = []

    def rerun(function: Callable[[], torch.Tensor]) -> Captured:
        output = function()
        captures.append(len(output))

        def again() -> None:
            output.copy_(function())

        return again, output

    with force("reference"):
        expected = completions(Engine.load(source))
    with force("triton"):
        engine = Engine.load(source)
        executor = engine.executor
        executor.replays = Replays(CudaRecorder(executor.model, executor.cache, executor.page_size, rerun))
        ours = completions(engine)
    assert executor.replays.steps > 3
    assert max(captures) == 4
    for one, other in zip(ours, expected, strict=True):
        assert one.token_ids == other.token_ids
        logprobs = ([score.chosen for score in c.logprobs or []] for c in (one, other))
        torch.testing.assert_close(*map(torch.tensor, logprobs), rtol=0, atol=1e-3)
