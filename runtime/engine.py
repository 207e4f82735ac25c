"""The engine: requests in, tokens out.

    engine = Engine.load(Path("out/model"))
    engine.generate(["Once upon a time"], SamplingParams(max_tokens=40))[0].text

Shapes: B sequences, S length, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from compress.arch import ModelSpec
from compress.checkpoint import read_config, read_object
from compress.errors import UserError
from compress.runtime.batch import build_batch
from compress.runtime.executor import Executor, find_device, load_executor
from compress.runtime.pages import PagePool
from compress.runtime.request import FinishReason, Request, SamplingParams, TokenLogprobs, request_key
from compress.runtime.sampler import Draw, logprobs_of, sample
from compress.runtime.scheduler import Scheduler

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

__all__ = ["Completion", "Engine", "Request", "SamplingParams", "TokenLogprobs"]


@dataclass(frozen=True)
class Completion:
    prompt_ids: list[int]
    token_ids: list[int]  # with the token that ended it
    text: str  # without it, and without special tokens; empty where the checkpoint has no tokenizer
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None


class Engine:
    """One model on one device. Use from one thread."""

    def __init__(self, path: Path, executor: Executor, scheduler: Scheduler, eos_ids: frozenset[int]) -> None:
        self.path = path
        self.executor = executor
        self.scheduler = scheduler
        self.eos_ids = eos_ids

    @classmethod
    def load(
        cls,
        path: Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_tokens_in_cache: int | None = None,
        page_size: int = 16,
        max_batched_tokens: int = 2048,
        exact: bool = False,
    ) -> Engine:
        """Load a checkpoint directory. Raises UserError for one that is damaged, not supported, or for bad sizes.

        On a CPU, linears with integer weights quantize their inputs to 8 bits a token and block of columns; `exact`
        keeps them in `dtype`: slower, and what the checkpoint means.
        """
        path = Path(path)
        sizes = {"page_size": page_size, "max_batched_tokens": max_batched_tokens}
        if max_tokens_in_cache is not None:
            sizes["max_tokens_in_cache"] = max_tokens_in_cache
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"{name} must be at least 1, not {size}")
        executor = load_executor(path, find_device(device), dtype, max_tokens_in_cache, page_size, exact)
        pool = PagePool(executor.cache.keys[0].shape[0], page_size)
        return cls(path, executor, Scheduler(pool, max_batched_tokens), read_eos_ids(path))

    @property
    def spec(self) -> ModelSpec:
        return self.executor.model.spec

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.executor.model.final_norm_C.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        return self.executor.model.weight_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.executor.model.embedding_VC.nbytes

    @cached_property
    def tokenizer(self) -> Any:
        # imported here: it takes seconds, and prompts may be token ids
        from transformers import AutoTokenizer

        if not has_tokenizer(self.path):
            raise UserError(f"{self.path}: no tokenizer ({', '.join(TOKENIZER_FILES)}); give prompts as token ids")
        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    def add(self, prompt: str | Sequence[int], params: SamplingParams, sample: int = 0) -> Request:
        """Queue a prompt. `sample` tells apart several answers to one prompt under one seed.

        Raises UserError naming the field and its limit; the engine is then as before.
        """
        request = self._request(prompt, params, sample)
        self.scheduler.add(request)
        return request

    def _request(self, prompt: str | Sequence[int], params: SamplingParams, sample: int) -> Request:
        params.check(self.spec.vocab)
        ids = self.encode(prompt)
        eos = frozenset() if params.ignore_eos else self.eos_ids
        return Request(
            token_ids=list(ids),
            prompt_length=len(ids),
            params=params,
            key=request_key(ids, sample),
            stop_ids=eos.union(params.stop_token_ids),
            # the token after the last position can still be chosen, but not fed back
            max_length=min(len(ids) + params.max_tokens, self.spec.max_positions + 1),
        )

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; a string is encoded as its tokenizer does by default. Raises UserError for bad ids."""
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("prompt must have at least 1 token; it is empty")
        if len(ids) > self.spec.max_positions:
            raise UserError(f"prompt has {len(ids)} tokens; the model takes at most {self.spec.max_positions}")
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self.spec.vocab:
                raise UserError(f"prompt token id {token!r} is out of range; ids go from 0 to {self.spec.vocab - 1}")
        return ids

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Compute one batch; the requests that gained a token, some of them now finished."""
        plan = self.scheduler.plan()
        if not plan:
            return []
        batch = build_batch(plan, self.scheduler.pool.page_size, self.executor.device)
        logits_NV = self.executor.run(batch)
        self.scheduler.commit(plan)
        requests = [chunk.request for chunk in batch.sampled]
        tokens = sample(logits_NV, [Draw(r.params, r.key, len(r.token_ids)) for r in requests])
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if request.params.logprobs is not None:
                request.logprobs.append(logprobs_of(logits_NV[row], token, request.params.logprobs))
            request.append(token)
            if request.finish_reason is not None:
                self.scheduler.finish(request, request.finish_reason)
        return requests

    def abort(self, request: Request) -> None:
        """Drop a request and free its pages; nothing happens to one that has finished."""
        if request.status != "finished":
            self.scheduler.finish(request, "abort")

    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        """Complete all prompts, together. Raises UserError before any work if one of them is not acceptable."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise UserError(f"params: {len(each)} given for {len(prompts)} prompts; give one, or one for each")
        requests: list[Request] = []
        try:
            for prompt, chosen in zip(prompts, each, strict=True):
                requests.append(self.add(prompt, chosen))
            while any(request.status != "finished" for request in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return [self.completion(request) for request in requests]

    def completion(self, request: Request) -> Completion:
        """What a finished request came to."""
        assert request.finish_reason is not None
        generated = request.generated
        shown = generated[:-1] if request.finish_reason == "stop" else generated
        return Completion(
            prompt_ids=request.token_ids[: request.prompt_length],
            token_ids=generated,
            text=self._text(request.token_ids[: request.prompt_length], shown) if has_tokenizer(self.path) else "",
            finish_reason=request.finish_reason,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
        )

    def _text(self, prompt: list[int], shown: list[int]) -> str:
        """What the new tokens add to the prompt's text: alone, many tokenizers would drop their first space."""
        before = self.tokenizer.decode(prompt, skip_special_tokens=True)
        whole = self.tokenizer.decode(prompt + shown, skip_special_tokens=True)
        if whole.startswith(before):
            return whole[len(before) :]
        return self.tokenizer.decode(shown, skip_special_tokens=True)  # the prompt ends inside a character

    @torch.inference_mode()
    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, C] or [B, S, C] after the final norm, for ids [S] or [B, S], in one causal pass."""
        return self.executor.hidden_states(ids) if ids.dim() == 2 else self.executor.hidden_states(ids[None])[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [..., V] of hidden states [..., C] after the final norm."""
        return self.executor.model.logits(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


def has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def read_eos_ids(path: Path) -> frozenset[int]:
    """The union of eos_token_id, a number or a list, in config.json and generation_config.json.

    Raises UserError for a file that is damaged, or an id that is no number.
    """
    sources = {path / "config.json": read_config(path)}
    if (path / "generation_config.json").is_file():
        sources[path / "generation_config.json"] = read_object(path / "generation_config.json")
    ids: set[int] = set()
    for file, source in sources.items():
        value = source.get("eos_token_id")
        stated = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in stated):
            raise UserError(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}")
        ids.update(stated)
    return frozenset(ids)
