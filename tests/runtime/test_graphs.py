"""Recorded steps: the bits of computed ones in any company, and none of a model that they would compute wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.kernels.cpu.build import library
from compress.kernels.dispatch import force
from compress.kernels.queries import Capacity
from compress.runtime import graphs
from compress.runtime.cuda_graphs import Captured, CudaRecorder
from compress.runtime.engine import Completion, Engine, SamplingParams
from compress.runtime.graphs import Replays
from tests.runtime.test_mla import MLA
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama", **HEADS)


def prompts() -> list[list[int]]:
    """Of many lengths, so that requests join and end at different steps."""
    return [[(7 * i + 11 * n) % 256 for i in range(3 + 9 * n)] for n in range(7)]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=6 + 5 * n, temperature=0.8 * (n % 2), seed=n, logprobs=2, ignore_eos=True)
        for n in range(7)
    ]


def completions(engine: Engine) -> list[Completion]:
    return engine.generate(prompts(), params())


def without_recordings(directory: Path, **settings: Any) -> Engine:
    engine = Engine.load(directory, **settings)
    engine.executor.replays = Replays(None)
    return engine


@pytest.mark.parametrize(
    "settings", [{}, {"page_size": 1}, {"max_batched_tokens": 9}, {"speculate": 3}, {"kv_dtype": "int8:fp8"}]
)
def test_replayed_steps_give_the_bits_of_computed_ones(directory: Path, settings: dict[str, Any]) -> None:
    expected = completions(without_recordings(directory, **settings))
    engine = Engine.load(directory, **settings)
    for _ in range(3):  # the third time nearly every step has been recorded
        assert completions(engine) == expected
    assert engine.executor.replays.steps > 10
    engine.scheduler.pool.check([])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"head_dim": 16}),  # norms of heads
        ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
        ("qwen2", {}),  # biases
    ],
)
def test_families_are_replayed(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_model(tmp_path, family, **changes)
    expected = completions(without_recordings(source))
    engine = Engine.load(source)
    for _ in range(3):
        assert completions(engine) == expected
    assert engine.executor.replays.steps > 10


@pytest.mark.parametrize("settings", [{"dtype": torch.bfloat16}])
def test_what_cannot_be_recorded_is_computed(directory: Path, settings: dict[str, Any]) -> None:
    """Torch rounds to bfloat16 between the compiled kernels."""
    expected = completions(without_recordings(directory, **settings))
    engine = Engine.load(directory, **settings)
    assert completions(engine) == completions(engine) == expected
    assert engine.executor.replays.steps == 0


def test_a_mixture_of_experts_is_not_recorded(tmp_path: Path) -> None:
    """Which experts run differs from step to step."""
    engine = Engine.load(tiny_model(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2))
    completions(engine)
    completions(engine)
    assert engine.executor.replays.steps == 0


def test_recordings_that_are_not_used_are_dropped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    expected = completions(without_recordings(directory))
    engine = Engine.load(directory)
    for _ in range(4):
        assert completions(engine) == expected
        assert len(engine.executor.replays._kept) <= 2


def test_hidden_states_outlive_the_next_step(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer may keep what it was given."""
    engine = Engine.load(directory)
    request = engine.add([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    run = engine.executor.run
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(*arguments: Any) -> torch.Tensor:
        hidden_TC = run(*arguments)
        kept.append((hidden_TC, hidden_TC.clone()))
        return hidden_TC

    monkeypatch.setattr(engine.executor, "run", watched)
    while request.status != "finished":
        engine.step()
    assert engine.executor.replays.steps >= 5
    assert all(torch.equal(hidden_TC, copy_TC) for hidden_TC, copy_TC in kept)


def rerun(function: Callable[[], torch.Tensor]) -> Captured:
    """What a CUDA graph does, on a CPU: the same work on the same memory."""
    output = function()

    def again() -> None:
        output.copy_(function())

    return again, output


def with_graphs(directory: Path, **settings: Any) -> Engine:
    engine = Engine.load(directory, **settings)
    executor = engine.executor
    executor.replays = Replays(CudaRecorder(executor.model, executor.cache, executor.page_size, rerun))
    return engine


@pytest.mark.parametrize("settings", [{}, {"page_size": 1}, {"speculate": 3}, {"kv_dtype": "int8"}])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v2"])
def test_rows_that_fill_up_a_graph_change_nothing(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Seven requests run in a graph for eight, with drafts of different lengths, windows, and latents."""
    changes = {"llama": HEADS, "gemma2": {"head_dim": 16, "sliding_window": 8}, "deepseek_v2": MLA}[family]
    if family == "deepseek_v2" and "kv_dtype" in settings:
        pytest.skip("latents are not quantized")
    with force("reference"):
        source = tiny_model(tmp_path, family, **changes)
        expected = completions(without_recordings(source, **settings))
        engine = with_graphs(source, **settings)
        for _ in range(2):
            assert_close(completions(engine), expected)
    replays = engine.executor.replays
    assert replays.steps > 20
    assert any(isinstance(kind, Capacity) and kind.tokens > 7 for kind in replays._kept)
    engine.scheduler.pool.check([])


def assert_close(ours: list[Completion], expected: list[Completion]) -> None:
    """The same tokens, and log-probabilities that differ by rounding: rows are summed in other tiles."""
    for one, other in zip(ours, expected, strict=True):
        assert one.token_ids == other.token_ids
        ours_k, expected_k = ([score.chosen for score in c.logprobs or []] for c in (one, other))
        torch.testing.assert_close(torch.tensor(ours_k), torch.tensor(expected_k), rtol=0, atol=1e-4)
