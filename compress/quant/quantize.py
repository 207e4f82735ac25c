"""Weight-only quantization, block by block: which mathematics is applied to which linear, and what came of it.

A block goes through four choices: a transform that leaves its function unchanged (AWQ scaling), a range search, a
rounding, and the scheme that says what is stored. The mathematics stands in the files beside this one.

Shapes: O out features, I in features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from compress.arch import HEAD, TAPS, ModelSpec, Tap
from compress.blockwise import Block, Changes, HeadBlock
from compress.quant.fidelity import relative_errors
from compress.quant.gptq import dampening_for, gptq
from compress.quant.ranges import RangeMethod, find_range
from compress.quant.rtn import round_to_nearest
from compress.quant.scaling import producer_scale, scale_tap
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.statistics import Statistics

NOT_CLIPPED = ("self_attn.q_proj", "self_attn.k_proj")  # arXiv 2306.00978: clipping them hurts the attention logits


@dataclass(frozen=True)
class Quantizer:
    """A Technique that quantizes the linears of `schemes` (by full name) and leaves every other tensor alone."""

    spec: ModelSpec
    schemes: Mapping[str, Scheme]
    transform: Literal["none", "awq"]
    range: RangeMethod
    rounding: Literal["rtn", "gptq"]
    scale_dtype: torch.dtype
    act_order: bool
    dampening: float | None  # None: as much as the noise of the Gram matrix asks for
    refine: int
    pack: Callable[[str, QuantizedWeight], dict[str, torch.Tensor]]

    @property
    def wants_head(self) -> bool:
        return HEAD in self.schemes

    def block(self, block: Block) -> Changes:
        if not any(block.prefix + linear in self.schemes for tap in TAPS for linear in tap.linears):
            if block.has_data:
                block.advance()
            return Changes()
        work = _Work(block, dict(block.weights))
        if not block.has_data:
            for tap in TAPS:
                self._tap(work, tap, None)
        elif self.transform == "awq":
            self._scaled(work)
        else:
            for found in block.sequential():
                self._tap(work, found.tap, found.statistics)
        self._store_changed(work)
        return work.changes

    def head(self, head: HeadBlock) -> Changes:
        changes = Changes()
        found = head.observe()
        statistics = found.statistics if found else None
        gram_II = statistics.gram() if statistics else None
        rounded, report = self._round({HEAD: head.weight}, HEAD, statistics, gram_II)
        restored_OI, scheme = rounded[HEAD].dequantize(), self.schemes[HEAD]
        errors = relative_errors(head.weight, restored_OI, gram_II, scheme, self.scale_dtype, [len(head.weight)])
        self._store(changes, HEAD, rounded[HEAD], statistics, errors[0] | report)
        return changes

    def _scaled(self, work: _Work) -> None:
        """AWQ: the scales of all taps from the block as it came, then rounding."""
        block = work.block
        # AWQ with round to nearest gains nothing from inputs of the quantized prefix (docs/log.md),
        # so the block as it came passes its outputs on, and one forward pass does.
        observed = block.observe(hold_out=True, propagate=self.rounding == "rtn")
        for tap in TAPS:
            work.scales[tap.name], told = scale_tap(block, observed[tap.name], self.schemes, self.scale_dtype)
            work.changes.transforms.append(told)
        if self.rounding == "gptq":
            for found in block.sequential():
                self._tap(work, found.tap, found.statistics)
            return
        for tap in TAPS:
            seen = observed.pop(tap.name)
            whole = seen.statistics.merge(seen.held_out) if seen.held_out else seen.statistics
            self._tap(work, tap, whole.scaled(work.scales[tap.name]))

    def _tap(self, work: _Work, tap: Tap, statistics: Statistics | None) -> None:
        """Quantize the selected linears of one tap, given the statistics of their (scaled) input."""
        block = work.block
        chosen = [linear for linear in tap.linears if block.prefix + linear in self.schemes]
        if not chosen:
            return
        name = block.prefix + chosen[0]
        weights = {linear: block.weights[f"{linear}.weight"] for linear in chosen}
        gram_II = statistics.gram() if statistics else None
        rounded, report = self._round(weights, name, statistics, gram_II)
        original_OI = torch.cat([work.originals[f"{linear}.weight"] for linear in chosen])
        restored_OI = torch.cat([work.restored(linear, rounded[linear], tap) for linear in chosen])
        scale_I = work.scales.get(tap.name)
        if gram_II is not None and scale_I is not None:
            gram_II = gram_II * scale_I[:, None] * scale_I
        sizes = [len(weight) for weight in weights.values()]
        errors = relative_errors(original_OI, restored_OI, gram_II, self.schemes[name], self.scale_dtype, sizes)
        for linear, told in zip(chosen, errors, strict=True):
            self._store(work.changes, block.prefix + linear, rounded[linear], statistics, told | report)
            block.weights[f"{linear}.weight"] = rounded[linear].dequantize()

    def _round(
        self,
        weights: Mapping[str, torch.Tensor],
        name: str,
        statistics: Statistics | None,
        gram_II: torch.Tensor | None,
    ) -> tuple[dict[str, QuantizedWeight], dict[str, Any]]:
        """Range search, then rounding, of linears that share an input: rows are independent, so they go as one."""
        scheme = self.schemes[name]
        stacked_OI = torch.cat(list(weights.values()))
        sizes = [len(weight) for weight in weights.values()]
        parts = [self._range(linear, weight, scheme, statistics, gram_II) for linear, weight in weights.items()]
        scale_OG = torch.cat([scale for scale, _ in parts])
        zeros = [zero for _, zero in parts if zero is not None]
        zero_OG = torch.cat(zeros) if zeros else None
        if self.rounding == "rtn" or statistics is None or gram_II is None:
            whole, report = round_to_nearest(stacked_OI, scheme, scale_OG, zero_OG), dict[str, Any]()
        else:
            dampening = self.dampening or dampening_for(stacked_OI.shape[1], statistics.tokens)
            whole, told = gptq(
                stacked_OI,
                gram_II,
                scheme,
                scale_OG,
                zero_OG,
                dampening=dampening,
                act_order=self.act_order,
                refine=self.refine,
            )
            report = {"dampening": told.dampening, "fallback": "rtn" if told.fallback else None}
        return dict(zip(weights, _split(whole, sizes), strict=True)), report

    def _range(
        self,
        linear: str,
        weight_OI: torch.Tensor,
        scheme: Scheme,
        statistics: Statistics | None,
        gram_II: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        method = self.range
        if self.transform == "awq" and self.range != "minmax" and linear in NOT_CLIPPED:
            method = "mse"
        importance = gram_II if method == "gram" else statistics.mean_square() if statistics else None
        return find_range(weight_OI, scheme, method, importance, self.scale_dtype)

    def _store(
        self,
        changes: Changes,
        name: str,
        rounded: QuantizedWeight,
        statistics: Statistics | None,
        told: Mapping[str, Any],
    ) -> None:
        changes.replace(f"{name}.weight", self.pack(name, rounded))
        usual = {"scheme": str(rounded.scheme), "tokens": statistics.tokens if statistics else 0}
        usual |= {"dampening": None, "fallback": None, "codes_sha256": codes_sha256(rounded)}
        changes.layers.append({"name": name, **usual, **told})

    def _store_changed(self, work: _Work) -> None:
        """Store the dense tensors (norms, biases) that a transform changed, in the type they came in."""
        block, changes = work.block, work.changes
        for local, tensor in block.weights.items():
            name = block.prefix + local
            if tensor is not work.originals[local] and name not in changes.removed:
                changes.replace(name, {name: tensor.to(block.dtypes[local])})


@dataclass
class _Work:
    """One block under way: its weights as they came, the scales folded into it, and what was changed."""

    block: Block
    originals: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor] = field(default_factory=dict)  # by tap
    changes: Changes = field(default_factory=Changes)

    def restored(self, linear: str, rounded: QuantizedWeight, tap: Tap) -> torch.Tensor:
        """What the codes stand for in the original model: the scales of its inputs and outputs undone."""
        weight_OI = rounded.dequantize()
        if tap.name in self.scales:
            weight_OI = weight_OI / self.scales[tap.name]
        for fed in TAPS:
            if fed.producer == linear and fed.name in self.scales:
                weight_OI = weight_OI * producer_scale(fed, self.scales[fed.name], self.block.spec)[:, None]
        return weight_OI


def codes_sha256(weight: QuantizedWeight) -> str:
    """Over codes, scales and zero points as they are in memory, before any packing."""
    digest = hashlib.sha256()
    for tensor in (weight.codes_OI, weight.scale_OG, weight.zero_point_OG):
        if tensor is not None:
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _split(whole: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    zeros = whole.zero_point_OG.split(sizes) if whole.zero_point_OG is not None else [None] * len(sizes)
    parts = zip(whole.codes_OI.split(sizes), whole.scale_OG.split(sizes), zeros, strict=True)
    return [QuantizedWeight(whole.scheme, codes, scale, zero) for codes, scale, zero in parts]
