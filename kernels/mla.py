"""Multi-head latent attention over a paged cache, absorbed (DeepSeek-V2, arXiv 2405.04434, §2.1).

A token leaves one latent c and one rotated key k that all heads share. With the key's and the value's projections
absorbed into the query and the output, a head's score is (q·c + q′·k) · scale and its result Σ p c, of the latent's
size.

Shapes: T tokens, H heads, R latent rank, E rotated dimensions, P pages, S slots of a page (keys in NLS), N requests,
L new tokens of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.kernels.attention import Span, gather, join_rows, plan_spans
from compress.kernels.kv import Pages
from compress.kernels.queries import Capacity, PagedQueries


@dataclass(frozen=True, eq=False)
class LatentPages:
    """Latents [P, S, R] and rotated keys [P, S, E] of one layer; both may be slices of one tensor."""

    latents_PSR: torch.Tensor
    keys_PSE: torch.Tensor

    @property
    def as_heads(self) -> Pages:
        """Latents as the keys and rotated keys as the values of one head: how the kernel that stores takes them."""
        return Pages(self.latents_PSR[:, :, None], self.keys_PSE[:, :, None])


@dataclass(frozen=True)
class LatentCache:
    """Latents and rotated keys of every layer."""

    latents: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]

    def layer(self, index: int) -> LatentPages:
        return LatentPages(self.latents[index], self.keys[index])

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        return self.latents + self.keys

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.written)


def store_latents(c_TR: torch.Tensor, k_TE: torch.Tensor, pages: LatentPages, slots_T: torch.Tensor) -> None:
    """Write the latents and rotated keys of T tokens to their slots. Tokens whose slot is −1 are left out."""
    kept_T = slots_T >= 0
    page_T, slot_T = slots_T[kept_T] // pages.keys_PSE.shape[1], slots_T[kept_T] % pages.keys_PSE.shape[1]
    pages.latents_PSR[page_T, slot_T] = c_TR[kept_T]
    pages.keys_PSE[page_T, slot_T] = k_TE[kept_T]


class PagedLatentAttention:
    """Latent attention of one step, planned once. The reference of the kernel."""

    def __init__(self, queries: PagedQueries, capacity: Capacity | None = None) -> None:
        self._queries = queries
        self._capacity = capacity
        self._spans: list[Span] | None = None

    def update(self, queries: PagedQueries) -> bool:
        """As `operations.LatentAttention`."""
        if self._capacity is not None and not self._capacity.fits(queries):
            return False
        self._queries, self._spans = queries, None
        return True

    def __call__(self, q_THR: torch.Tensor, q_THE: torch.Tensor, pages: LatentPages, scale: float) -> torch.Tensor:
        """[T, H, R] in the dtype of q."""
        if self._spans is None:
            self._spans = plan_spans(self._queries, None, q_THR.shape[1], torch.float32, q_THR.device)
        parts = [_attend_span(q_THR[span.tokens], q_THE[span.tokens], pages, span, scale) for span in self._spans]
        return join_rows(parts, q_THR)


def _attend_span(
    q_THR: torch.Tensor, q_THE: torch.Tensor, pages: LatentPages, span: Span, scale: float
) -> torch.Tensor:
    heads, rank = q_THR.shape[1:]
    # all heads of all new tokens of a request are rows of one product
    q_NXR, q_NXE = (q.reshape(span.requests, -1, q.shape[-1]) for q in (q_THR, q_THE))
    c_NSR, k_NSE = (gather(x, span).to(q_THR.dtype) for x in (pages.latents_PSR, pages.keys_PSE))
    scores_NXS = (q_NXR @ c_NSR.mT + q_NXE @ k_NSE.mT).float() * scale
    if span.causal:
        hidden_LS = torch.ones(span.length, span.keys, dtype=torch.bool, device=scores_NXS.device).triu(1)
        scores_NXS = scores_NXS.masked_fill(hidden_LS.repeat_interleave(heads, dim=0), -torch.inf)
    elif span.mask_N1RS is not None:
        mask_NRS = span.mask_N1RS[:, 0]
        scores_NXS = scores_NXS + (mask_NRS if span.folded else mask_NRS.repeat_interleave(heads, dim=1))
    return (scores_NXS.softmax(dim=-1).to(c_NSR.dtype) @ c_NSR).reshape(-1, heads, rank)
