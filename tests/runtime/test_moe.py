"""Mixtures of experts: Mixtral and Qwen3-MoE, in every spelling of their experts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch import block_prefix, read_spec
from compress.checkpoint import Checkpoint, check_tensors, write_checkpoint
from compress.errors import UserError
from compress.kernels.linear import Linear
from compress.quant.scheme import Scheme
from compress.runtime.engine import Engine, SamplingParams
from compress.runtime.models.decoder import Decoder
from compress.runtime.models.moe import Mixture, route
from tests.runtime.agreement import BOUND, Pair, prompts, quantized_error, ragged
from tests.tiny import tiny_model

MIXTRAL: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-window": ("mixtral", MIXTRAL | {"sliding_window": 16}),
    "mixtral-one-expert": ("mixtral", MIXTRAL | {"num_experts_per_tok": 1}),
    "qwen3-moe": ("qwen3_moe", QWEN),
    "qwen3-moe-normalized": ("qwen3_moe", QWEN | {"norm_topk_prob": True}),
    "qwen3-moe-some-layers": (
        "qwen3_moe",
        QWEN | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3-moe-window": ("qwen3_moe", QWEN | {"use_sliding_window": True, "sliding_window": 16}),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, changes = CASES[request.param]
    return Pair.load(tiny_model(tmp_path_factory.mktemp(request.param), family, **changes))


def test_logits_equal_transformers(pair: Pair) -> None:
    assert pair.full_error(prompts(2, 128)) < BOUND


def test_decoding_from_the_cache_equals_transformers(pair: Pair) -> None:
    assert pair.cached_error(ragged(), tokens=20) < BOUND


def fuse(source: Path, directory: Path) -> Path:
    """The same model with the experts of each layer in two 3-D tensors, as transformers 5 holds them in memory."""
    checkpoint = Checkpoint.open(source)
    experts = read_spec(checkpoint.config).experts
    assert experts is not None
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    gate, up, down = experts.names
    for layer, sparse in enumerate(experts.sparse):
        prefix = block_prefix(layer)
        if not sparse:
            continue

        def stack(name: str, prefix: str = prefix) -> torch.Tensor:
            module = f"{prefix}{experts.module}.experts"
            return torch.stack([tensors.pop(f"{module}.{e}.{name}.weight") for e in range(experts.count)])

        tensors[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat((stack(gate), stack(up)), dim=1)
        tensors[f"{prefix}mlp.experts.down_proj"] = stack(down)
        tensors[f"{prefix}mlp.gate.weight"] = tensors.pop(f"{prefix}{experts.module}.gate.weight")
    write_checkpoint(directory, tensors, checkpoint.config, source)
    return directory


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe-some-layers"])
def test_fused_experts_are_the_same_bits(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    source = tiny_model(tmp_path / "each", family, **changes)
    fused = fuse(source, tmp_path / "fused")
    check_tensors(Checkpoint.open(fused), read_spec(Checkpoint.open(fused).config))
    ids_BS = prompts(1, 40)
    assert torch.equal(Engine.load(fused).hidden_states(ids_BS), Engine.load(source).hidden_states(ids_BS))


@pytest.mark.parametrize("spelling", ["each", "fused"])
def test_missing_and_foreign_tensors_are_named(spelling: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "each", "mixtral", **MIXTRAL)
    checkpoint = Checkpoint.open(source if spelling == "each" else fuse(source, tmp_path / "fused"))
    spec = read_spec(checkpoint.config)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    lost = next(name for name in tensors if name.endswith((".experts.3.w2.weight", ".experts.down_proj")))
    write_checkpoint(tmp_path / "lost", {n: t for n, t in tensors.items() if n != lost}, checkpoint.config, source)
    with pytest.raises(UserError, match=f"1 tensors missing: {lost}$"):
        check_tensors(Checkpoint.open(tmp_path / "lost"), spec)
    foreign = "model.layers.0.mlp.shared_expert.up_proj.weight"
    write_checkpoint(tmp_path / "more", tensors | {foreign: torch.ones(2, 2)}, checkpoint.config, source)
    with pytest.raises(UserError, match=f"1 tensors not part of the model: {foreign}$"):
        check_tensors(Checkpoint.open(tmp_path / "more"), spec)


def test_a_request_is_the_same_bits_alone_and_in_company(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, "qwen3_moe", **QWEN)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0)

    def logprobs(engine: Engine, batch: list[list[int]]) -> list[list[float]]:
        return [[step.chosen for step in done.logprobs or []] for done in engine.generate(batch, params)]

    together = logprobs(Engine.load(directory), ragged())
    engine = Engine.load(directory, max_batched_tokens=7, page_size=1)
    assert together == [logprobs(engine, [prompt])[0] for prompt in ragged()]


def test_only_the_experts_that_are_hit_are_computed(tmp_path: Path) -> None:
    engine = Engine.load(tiny_model(tmp_path, "mixtral", **MIXTRAL))
    decoder = engine.executor.model
    assert isinstance(decoder, Decoder)
    mixture = decoder.blocks[0].feed_forward
    assert isinstance(mixture, Mixture)
    calls: Counter[int] = Counter()

    class Counted:
        def __init__(self, expert: int, linear: Linear) -> None:
            self.expert, self.linear = expert, linear

        @property
        def nbytes(self) -> int:
            return self.linear.nbytes

        def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
            calls[self.expert] += len(x_TI)
            return self.linear(x_TI)

    experts = tuple(replace(e, gate_up=Counted(i, e.gate_up)) for i, e in enumerate(mixture.experts))
    x_TC = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    chosen, _ = route(mixture.router(x_TC), 2, True)
    assert torch.equal(replace(mixture, experts=experts)(x_TC), mixture(x_TC))
    assert calls == Counter(chosen.flatten().tolist())


def test_routing_where_the_answer_is_known() -> None:
    logits_TE = torch.tensor([[0.5, 0.25, 0.2, 0.05], [0.05, 0.25, 0.2, 0.5]]).log()
    expert_TM, weight_TM = route(logits_TE, 2, normalized=False)
    assert expert_TM.tolist() == [[0, 1], [3, 1]]
    assert torch.allclose(weight_TM, torch.tensor([[0.5, 0.25], [0.5, 0.25]]))
    assert torch.allclose(route(logits_TE, 2, normalized=True)[1], torch.tensor([[2 / 3, 1 / 3]]).expand(2, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        ({"num_local_experts": 0}, "num_local_experts must be a positive integer, not 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, not 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers, not 1"),
    ],
)
def test_nonsense_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((tiny_model(tmp_path, "qwen3_moe", **QWEN) / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        read_spec(config | change)


def test_quantized_linears_equal_their_dequantized_weights(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "mixtral", **MIXTRAL)
    assert quantized_error(source, tmp_path, [Scheme(4, 16, False), Scheme(8, 16, True)], torch.float16) < BOUND
