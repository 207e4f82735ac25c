"""The engine: requests in, tokens out.

    engine = Engine.load(Path("out/model"))
    engine.generate(["Once upon a time"], SamplingParams(max_tokens=40))[0].text

Shapes: B sequences, S length, C hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from compress.arch import ModelSpec
from compress.errors import UserError
from compress.runtime.batch import build_batch
from compress.runtime.completion import Completion
from compress.runtime.draft_cost import DraftCost
from compress.runtime.drafting import Drafting, load_drafting
from compress.runtime.executor import Executor, find_device, load_executor
from compress.runtime.outcome import Outcome, choose_tokens, score_prompts
from compress.runtime.pages import PagePool
from compress.runtime.request import FinishReason, Request, SamplingParams, TokenLogprobs, request_key
from compress.runtime.scheduler import Scheduler
from compress.runtime.settings import as_path, check_dtype, check_sizes, check_switches, check_texts, given
from compress.runtime.stats import Stats
from compress.runtime.text import Pieces, TextStream
from compress.runtime.tokenizer import has_tokenizer, load_tokenizer, read_eos_ids

WARMING_TOKENS = 4  # the second step of a kind is the one that is recorded

__all__ = ["Completion", "Engine", "Request", "SamplingParams", "TokenLogprobs"]


class Engine:
    """One model on one device. Use from one thread."""

    def __init__(self, path: Path, executor: Executor, scheduler: Scheduler, drafting: Drafting | None) -> None:
        self.path = path
        self.executor = executor
        self.scheduler = scheduler
        self.drafting = drafting
        self.eos_ids = read_eos_ids(path)
        self._stats = Stats()

    @classmethod
    def load(
        cls,
        path: Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_tokens_in_cache: int | None = None,
        page_size: int = 16,
        max_batched_tokens: int = 2048,
        max_running: int = 64,
        prefix_caching: bool = True,
        kv_dtype: str | None = None,
        exact: bool = False,
        draft: str | Path | None = None,
        speculate: int | None = None,
    ) -> Engine:
        """Load a checkpoint directory. Raises UserError for one that is damaged, not supported, or for bad sizes.

        On a CPU, linears with integer weights quantize their inputs to 8 bits a token and block of columns; `exact`
        keeps them in `dtype`: slower, and what the checkpoint means. `kv_dtype` is the format of the cache (cache.py).
        `speculate` is the most tokens to draft at a time, by the model `draft` or else from the text itself.
        """
        path = as_path("path", path)
        check_dtype(dtype)
        check_texts({"device": device} | given({"kv_dtype": kv_dtype}))
        check_switches({"prefix_caching": prefix_caching, "exact": exact})
        sizes = {"page_size": page_size, "max_batched_tokens": max_batched_tokens, "max_running": max_running}
        check_sizes(sizes | given({"max_tokens_in_cache": max_tokens_in_cache, "speculate": speculate}))
        draft = None if draft is None else as_path("draft", draft)
        executor = load_executor(path, find_device(device), dtype, max_tokens_in_cache, page_size, exact, kv_dtype)
        pool = PagePool(executor.cache.written[0].shape[0], page_size, prefix_caching)
        windows = [options.window for options in executor.model.attention]
        widest = None if None in windows else max(window for window in windows if window is not None)
        drafting = load_drafting(path, executor, pool.total * page_size, max_batched_tokens, draft, speculate)
        return cls(path, executor, Scheduler(pool, max_batched_tokens, max_running, widest), drafting)

    @property
    def spec(self) -> ModelSpec:
        return self.executor.model.spec

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.executor.model.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        return self.executor.model.weight_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.executor.model.embedding_VC.nbytes

    @property
    def expert_bytes(self) -> int:
        """Of the experts of a mixture, among `weight_bytes`; 0 in a dense model."""
        return self.executor.model.expert_bytes

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.path)

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.tokenizer)

    @property
    def stats(self) -> Stats:
        """A copy: counters since loading, gauges of now."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return replace(
            self._stats,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.preemptions,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=pool.used,
            pages_cached=pool.cached,
            pages_total=pool.total,
        )

    def add(self, prompt: str | Sequence[int], params: SamplingParams, sample: int = 0) -> Request:
        """Queue a prompt. `sample` tells apart several answers to one prompt under one seed.

        Raises UserError naming the field and its limit, and for a request that can never fit the cache.
        """
        request = self._request(self.encode(prompt), params, sample)
        self.scheduler.add(request)
        return request

    def fork(self, prompt: str | Sequence[int], params: SamplingParams, n: int) -> list[Request]:
        """Queue `n` samples of one prompt, which is computed once. Raises UserError as `add`."""
        check_sizes({"n": n})
        ids = self.encode(prompt)
        requests = [self._request(ids, params, sample) for sample in range(n)]
        for request in requests:
            request.siblings = tuple(other for other in requests if other is not request)
            self.scheduler.add(request)
        return requests

    def _request(self, ids: list[int], params: SamplingParams, sample: int) -> Request:
        if not isinstance(params, SamplingParams):
            raise UserError(f"params must be SamplingParams, not {params!r}")
        params.check(self.spec.vocab)
        text = None
        if has_tokenizer(self.path):
            stopping = (params.stop, params.include_stop, params.min_tokens)
            text = TextStream(self._pieces, ids, *stopping, params.skip_special_tokens)
        elif params.stop:
            raise UserError(f"stop: strings need a tokenizer, and {self.path} has none; use stop_token_ids")
        eos = frozenset() if params.ignore_eos else self.eos_ids
        return Request(
            token_ids=list(ids),
            prompt_length=len(ids),
            params=params,
            key=request_key(ids, sample),
            stop_ids=eos.union(params.stop_token_ids),
            # the token after the last position can still be chosen, but not fed back
            max_length=min(len(ids) + params.max_tokens, self.spec.max_positions + 1),
            text=text,
        )

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; a string is encoded as its tokenizer does by default. Raises UserError for bad ids."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise UserError(f"prompt must be a text or a list of token ids, not {prompt!r}")
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("prompt must have at least 1 token; it is empty")
        if len(ids) > self.spec.max_positions:
            raise UserError(f"prompt has {len(ids)} tokens; the model takes at most {self.spec.max_positions}")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.spec.vocab:
                raise UserError(f"prompt token id {token!r} is out of range; ids go from 0 to {self.spec.vocab - 1}")
        return ids

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Compute one batch; the requests that gained tokens or came to their end."""
        if self.drafting is not None:
            self.drafting.propose(self.scheduler.running, self.scheduler.max_batched_tokens)
        plan = self.scheduler.plan()
        if not plan.chunks:
            return []
        started = time.perf_counter()
        batch = build_batch(plan, self.scheduler.pool.page_size, self.executor.device)
        hidden_TC = self.executor.run(batch, plan.copies)
        self._stats.steps += 1
        self._stats.computed_tokens += len(hidden_TC)
        score_prompts(self.executor, batch, hidden_TC)
        outcomes = choose_tokens(self.executor, batch, hidden_TC)
        if self.drafting is not None:
            self.drafting.time_step(batch.chunks, time.perf_counter() - started)
        scored = [chunk.request for chunk in batch.chunks if chunk.catches_up and not chunk.request.params.max_tokens]
        for chunk in batch.chunks:
            if not chunk.catches_up or chunk.request in scored:
                self.scheduler.commit(chunk.request, chunk.end)
        for request in scored:
            self._finish(request, "length")
        return [*scored, *(self._take(outcome) for outcome in outcomes)]

    def _take(self, outcome: Outcome) -> Request:
        """Give a request its tokens, one by one up to the one that ends it."""
        request = outcome.chunk.request
        known = len(request.token_ids)
        for token in outcome.tokens:
            request.append(token)
            if request.finish_reason is not None:
                break
        taken, accepted = len(request.token_ids) - known, len(outcome.tokens) - 1
        request.logprobs += outcome.logprobs[:taken]
        self.scheduler.commit(request, known + min(taken, accepted))
        stats = self._stats
        stats.generated_tokens += taken
        if outcome.chunk.drafts:
            stats.drafts += 1
            stats.draft_tokens += len(outcome.chunk.drafts)
            stats.accepted_tokens += min(taken, accepted)
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)
        elif self.drafting is not None:
            self.drafting.settle(request, accepted, outcome.hidden_C)
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        if request.text is not None:
            request.text.finish()
        if self.drafting is not None:
            self.drafting.forget(request)

    def abort(self, request: Request) -> None:
        """Drop a request and free its pages; nothing happens to one that has finished.

        Raises UserError for what is no request of this engine.
        """
        if not isinstance(request, Request):
            raise UserError(f"request must be a Request that `add` gave, not {request!r}")
        if request.status == "finished":
            return
        if request not in self.scheduler.running and request not in self.scheduler.waiting:
            raise UserError("request: it is not one of this engine's; abort it where it was added")
        self._finish(request, "abort")

    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        """Complete all prompts, together. Raises UserError before any work if one of them is not acceptable."""
        if isinstance(prompts, str):
            raise UserError("prompts: a list of texts or of token ids, not one text")
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise UserError(f"prompts must be a list of texts or of token ids, not {prompts!r}")
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
        return [Completion.of(request) for request in requests]

    def warm_up(self) -> None:
        """Do what is done at first use alone: read the tokenizer, record a step, choose a token.

        No counter and no cached page tells of it. For an idle engine.
        """
        scheduler, pool = self.scheduler, self.scheduler.pool
        counted = replace(self._stats), scheduler.prompt_tokens, scheduler.cached_tokens, scheduler.preemptions
        caching, pool.caching = pool.caching, False
        room = min(pool.total * pool.page_size, self.spec.max_positions)
        try:
            for temperature in (0.0, 1.0):  # the likeliest token and a drawn one are chosen by different kernels
                new = max(1, min(WARMING_TOKENS, room - 1))
                self.generate([[0]], SamplingParams(max_tokens=new, temperature=temperature, ignore_eos=True))
        finally:
            pool.caching = caching
            self._stats, scheduler.prompt_tokens, scheduler.cached_tokens, scheduler.preemptions = counted
            if self.drafting is not None:
                self.drafting.cost = DraftCost()  # what is done for the first time takes longer

    @torch.inference_mode()
    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, C] or [B, S, C] after the final norm, for ids [S] or [B, S], in one causal pass.

        Raises UserError for an id beyond the vocabulary.
        """
        least, most = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if least < 0 or most >= self.spec.vocab:
            raise UserError(f"ids must be between 0 and {self.spec.vocab - 1}, not {least if least < 0 else most}")
        return self.executor.hidden_states(ids) if ids.dim() == 2 else self.executor.hidden_states(ids[None])[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [..., V] of hidden states [..., C] after the final norm."""
        return self.executor.model.logits(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
