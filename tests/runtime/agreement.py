"""The runtime against transformers' eager float32 forward: one pass, and ragged prompts decoded from the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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
