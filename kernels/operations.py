"""What stands between the linears, for one device: chosen once, held by the model.

Shapes: as in the files of the references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from compress.kernels.kv import Pages
from compress.kernels.mla import LatentPages
from compress.kernels.queries import AttentionOptions, Capacity, PagedQueries
from compress.kernels.sampling import Rules, TopLogprobs


class Attention(Protocol):
    """The paged attention of one step, planned once and run in every layer."""

    def __call__(self, q_THD: torch.Tensor, pages: Pages, options: AttentionOptions) -> torch.Tensor: ...

    def update(self, queries: PagedQueries) -> bool:
        """Plan another step in the same memory, for calls that are recorded; False, with nothing changed, where it
        does not fit: beyond the capacity, or on a GPU without one.

        With a capacity, Triton's kernels read all that differs between steps at fixed addresses on the device, and
        their grids are fixed. A CUDA graph that holds calls of a plan computes the step of its last update, which has
        to be made on the graph's stream. A call for each shape of layer, for any window, has to precede the capture.
        """
        ...


class LatentAttention(Protocol):
    """The same over latents: [T, H, R]."""

    def __call__(self, q_THR: torch.Tensor, q_THE: torch.Tensor, pages: LatentPages, scale: float) -> torch.Tensor: ...

    def update(self, queries: PagedQueries) -> bool: ...


class PlanAttention(Protocol):
    def __call__(self, queries: PagedQueries, capacity: Capacity | None = None) -> Attention: ...


class PlanLatentAttention(Protocol):
    def __call__(self, queries: PagedQueries, capacity: Capacity | None = None) -> LatentAttention: ...


@dataclass(frozen=True)
class Operations:
    """Each has the signature and the meaning of its reference, named in the comment."""

    rms_norm: Callable[..., torch.Tensor]  # norm.rms_norm
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # norm.add_rms_norm
    rotate: Callable[..., torch.Tensor]  # rotary.rotate
    gated: Callable[..., torch.Tensor]  # activation.gated
    store: Callable[..., None]  # kv.store
    copy_pages: Callable[..., None]  # kv.copy_pages
    attention: PlanAttention  # attention.PagedAttention
    latent_attention: PlanLatentAttention  # mla.PagedLatentAttention
    token_logprobs: Callable[..., object]  # logprob.token_logprobs
    sample_tokens: Callable[[torch.Tensor, Rules, Sequence[float]], torch.Tensor]  # sampling.sample_tokens
    token_distributions: Callable[[torch.Tensor, Rules], torch.Tensor]  # sampling.token_distributions
    pick_tokens: Callable[[torch.Tensor, Sequence[float]], torch.Tensor]  # sampling.pick_tokens
    verify_drafts: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # sampling.verify_drafts
    top_logprobs: Callable[[torch.Tensor, Sequence[int], int], TopLogprobs]  # sampling.top_logprobs
