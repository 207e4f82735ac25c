"""The runtime against transformers' eager float32 forward: one pass, and ragged prompts decoded from the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from compress.arch import HEAD, read_spec
from compress.checkpoint import Checkpoint, write_checkpoint
from compress.formats.compressed_tensors import pack, quantization_config
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.runtime.engine import Engine, SamplingParams

BOUND = 3e-4  # logits reach 12; the largest difference seen is 1.1e-4, transformers' own from float64 as much
LENGTHS = (1, 15, 16, 17, 128)  # around a page of 16, and past every window and original context of the tests


@dataclass(frozen=True)
class Pair:
    engine: Engine
    reference: Any

    @classmethod
    def load(cls, directory: Path) -> Pair:
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
        return cls(Engine.load(directory), model.eval())

    @torch.no_grad()
    def expected(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """transformers' logits [B, S, V]."""
        return self.reference(ids_BS).logits

    def full_error(self, ids_BS: torch.Tensor) -> float:
        """Largest difference of logits in one pass without a cache."""
        ours = self.engine.logits(self.engine.hidden_states(ids_BS))
        return float((ours - self.expected(ids_BS)).abs().max())

    def cached_error(self, prompts: list[list[int]], tokens: int) -> float:
        """Largest difference of the log-probabilities of greedily decoded tokens, all prompts in one batch; fails where
        a token is not transformers' first choice.
        """
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)
        worst = 0.0
        for prompt, completion in zip(prompts, self.engine.generate(prompts, params), strict=True):
            assert completion.logprobs is not None
            text = torch.tensor([prompt + completion.token_ids[:-1]])
            rows_SV = self.expected(text)[0].log_softmax(-1)[len(prompt) - 1 :]
            assert completion.token_ids == rows_SV.argmax(-1).tolist()
            steps = zip(rows_SV, completion.token_ids, completion.logprobs, strict=True)
            worst = max(worst, *(abs(float(row_V[token]) - step.chosen) for row_V, token, step in steps))
        return worst


def prompts(count: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 256, (count, length), generator=torch.Generator().manual_seed(seed))


def ragged() -> list[list[int]]:
    """A prompt of each of LENGTHS."""
    return [prompts(1, length, seed=length)[0].tolist() for length in LENGTHS]


def write_quantized(
    source: Path, quantized: Path, dense: Path, schemes: list[Scheme], scale_dtype: torch.dtype
) -> None:
    """Write `source` with its linears rounded to nearest, scheme by scheme in turn, and the dense model it means."""
    checkpoint = Checkpoint.open(source)
    spec = read_spec(checkpoint.config)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    meant, stated = dict(tensors), {}
    modules = [module for module in spec.linears() if module != HEAD]
    for number, module in enumerate(modules):
        scheme = stated[module] = schemes[number % len(schemes)]
        weight_OGg = tensors.pop(f"{module}.weight").unflatten(1, (-1, scheme.group_size or 64))
        scale_OG = (weight_OGg.abs().amax(2) / scheme.qmax).to(scale_dtype)
        zero_OG = None if scheme.symmetric else torch.randint_like(scale_OG, -3, 4).to(torch.int8)
        steps_OGg = weight_OGg / scale_OG.float()[..., None] + (zero_OG[..., None] if zero_OG is not None else 0)
        codes_OI = steps_OGg.round().clamp(scheme.qmin, scheme.qmax).to(torch.int8).flatten(1)
        weight = QuantizedWeight(scheme, codes_OI, scale_OG, zero_OG)
        meant[f"{module}.weight"] = weight.dequantize()
        tensors |= pack(module, weight)
    write_checkpoint(dense, meant, checkpoint.config, source)
    config = checkpoint.config | {"quantization_config": quantization_config(stated, [HEAD])}
    write_checkpoint(quantized, tensors, config, source)


def quantized_error(source: Path, directory: Path, schemes: list[Scheme], scale_dtype: torch.dtype) -> float:
    """Largest difference of logits between the quantized model and transformers' forward of the weights it means."""
    write_quantized(source, directory / "quantized", directory / "dense", schemes, scale_dtype)
    engine, dense = Engine.load(directory / "quantized", exact=True), Pair.load(directory / "dense")
    ids_BS = prompts(1, 60)
    return float((engine.logits(engine.hidden_states(ids_BS)) - dense.expected(ids_BS)).abs().max())
