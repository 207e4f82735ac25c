"""Weight-only quantization, block by block: which mathematics is applied to which linear, and what came of it.

A block goes through four choices: a transform that leaves its function unchanged (AWQ scaling), a range search, a
rounding, and the scheme that says what is stored. The mathematics stands in the files beside this one.

Shapes: O out features, I in features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compress.arch import TAPS, ModelSpec, Tap
from compress.blockwise import Block, Changes, HeadBlock
from compress.quant.gptq import dampening_for, gptq, output_error
from compress.quant.ranges import RangeMethod, find_range
from compress.quant.rtn import round_to_nearest
from compress.quant.scaling import scale_tap
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
    pack: Callable[[str, QuantizedWeight], dict[str, torch.Tensor]]

    @property
    def wants_head(self) -> bool:
        return "lm_head" in self.schemes

    def block(self, block: Block) -> Changes:
        if not any(block.prefix + linear in self.schemes for tap in TAPS for linear in tap.linears):
            if block.has_data:
                block.advance()
            return Changes()
        if not block.has_data:
            return self._without_data(block)
        changes = Changes()
        scales: dict[str, torch.Tensor] = {}
        if self.transform == "awq":
            observed = block.observe(hold_out=True, propagate=self.rounding == "rtn")
            originals = {name: block.weights[name] for name in block.weights}
            for tap in TAPS:
                found = observed[tap.name]
                scales[tap.name], told = scale_tap(block, found, self.schemes, self.scale_dtype)
                changes.transforms.append(told)
            if self.rounding == "rtn":
                for tap in TAPS:
                    found = observed[tap.name]
                    whole = found.statistics.merge(found.held_out) if found.held_out else found.statistics
                    self._tap(block, tap, whole.scaled(scales[tap.name]), scales[tap.name], originals, changes)
                return self._close(block, originals, changes)
        else:
            originals = dict(block.weights)
        for found in block.sequential():
            scale_I = scales.get(found.tap.name)
            self._tap(block, found.tap, found.statistics, scale_I, originals, changes)
        return self._close(block, originals, changes)

    def head(self, head: HeadBlock) -> Changes:
        changes = Changes()
        found = head.observe()
        statistics = found.statistics if found else None
        weight, report = self._round({"lm_head": head.weight}, "lm_head", statistics)
        self._store("lm_head", weight["lm_head"], changes)
        errors = self._errors(head.weight, weight["lm_head"], head.weight, statistics, None, self.schemes["lm_head"])
        changes.layers.append(self._record("lm_head", weight["lm_head"], statistics, errors, report))
        return changes

    def _without_data(self, block: Block) -> Changes:
        changes = Changes()
        for tap in TAPS:
            self._tap(block, tap, None, None, dict(block.weights), changes)
        return changes

    def _tap(
        self,
        block: Block,
        tap: Tap,
        statistics: Statistics | None,
        scale_I: torch.Tensor | None,
        originals: Mapping[str, torch.Tensor],
        changes: Changes,
    ) -> None:
        """Quantize the selected linears of one tap, given the statistics of their (scaled) input."""
        chosen = [linear for linear in tap.linears if block.prefix + linear in self.schemes]
        if not chosen:
            return
        weights = {linear: block.weights[f"{linear}.weight"] for linear in chosen}
        rounded, report = self._round(weights, block.prefix + chosen[0], statistics)
        for linear in chosen:
            name = block.prefix + linear
            original = originals[f"{linear}.weight"]
            errors = self._errors(weights[linear], rounded[linear], original, statistics, scale_I, self.schemes[name])
            changes.layers.append(self._record(name, rounded[linear], statistics, errors, report))
            self._store(name, rounded[linear], changes)
            block.weights[f"{linear}.weight"] = rounded[linear].dequantize()

    def _round(
        self, weights: Mapping[str, torch.Tensor], name: str, statistics: Statistics | None
    ) -> tuple[dict[str, QuantizedWeight], dict[str, Any]]:
        """Range search, then rounding, of linears that share an input: rows are independent, so they go as one."""
        scheme = self.schemes[name]
        stacked_OI = torch.cat(list(weights.values()))
        sizes = [len(weight) for weight in weights.values()]
        if statistics is None:
            scale_OG, zero_OG = find_range(stacked_OI, scheme, self.range, None, self.scale_dtype)
            whole, report = round_to_nearest(stacked_OI, scheme, scale_OG, zero_OG), dict[str, Any]()
        else:
            scale_OG, zero_OG = self._ranges(weights, scheme, statistics)
            if self.rounding == "gptq":
                whole, told = gptq(
                    stacked_OI,
                    statistics.gram(),
                    scheme,
                    scale_OG,
                    zero_OG,
                    dampening=self.dampening or dampening_for(stacked_OI.shape[1], statistics.tokens),
                    act_order=self.act_order,
                )
                report = {"dampening": told.dampening, "fallback": "rtn" if told.fallback else None}
            else:
                whole, report = round_to_nearest(stacked_OI, scheme, scale_OG, zero_OG), dict[str, Any]()
        return dict(zip(weights, _split(whole, sizes), strict=True)), report

    def _ranges(
        self, weights: Mapping[str, torch.Tensor], scheme: Scheme, statistics: Statistics
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales, zeros = [], []
        for linear, weight in weights.items():
            clipped = not (self.transform == "awq" and linear in NOT_CLIPPED)
            method: RangeMethod = self.range if clipped or self.range == "minmax" else "mse"
            importance = statistics.gram() if method == "gram" else statistics.mean_square()
            scale_OG, zero_OG = find_range(weight, scheme, method, importance, self.scale_dtype)
            scales.append(scale_OG)
            zeros.append(zero_OG)
        return torch.cat(scales), None if zeros[0] is None else torch.cat(zeros)

    def _errors(
        self,
        weight: torch.Tensor,
        rounded: QuantizedWeight,
        original: torch.Tensor,
        statistics: Statistics | None,
        scale_I: torch.Tensor | None,
        scheme: Scheme,
    ) -> dict[str, Any]:
        """Relative error of the linear's output, and what plain round-to-nearest would have had on the same input."""
        scale_OG, zero_OG = find_range(original, scheme, "minmax", None, self.scale_dtype)
        plain = round_to_nearest(original, scheme, scale_OG, zero_OG).dequantize() - original
        delta = rounded.dequantize() - weight
        if statistics is None:
            norm = float(original.double().square().sum()) or 1.0
            return {
                "error": float(delta.double().square().sum()) / norm,
                "rtn_error": float(plain.double().square().sum()) / norm,
                "error_of": "weights",
            }
        gram = statistics.gram()
        plain_gram = gram if scale_I is None else statistics.scaled(1 / scale_I).gram()
        norm = output_error(weight, gram) or 1.0
        return {
            "error": output_error(delta, gram) / norm,
            "rtn_error": output_error(plain, plain_gram) / norm,
            "error_of": "outputs",
        }

    def _record(
        self,
        name: str,
        rounded: QuantizedWeight,
        statistics: Statistics | None,
        errors: dict[str, Any],
        report: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "name": name,
            "scheme": str(rounded.scheme),
            "tokens": statistics.tokens if statistics else 0,
            **errors,
            "dampening": None,
            "fallback": None,
            **report,
            "codes_sha256": codes_sha256(rounded),
        }

    def _store(self, name: str, rounded: QuantizedWeight, changes: Changes) -> None:
        changes.replace(f"{name}.weight", self.pack(name, rounded))

    def _close(self, block: Block, originals: Mapping[str, torch.Tensor], changes: Changes) -> Changes:
        """Store the dense tensors (norms, biases) that a transform changed, in the type they came in."""
        for local, tensor in block.weights.items():
            name = block.prefix + local
            if tensor is not originals[local] and name not in changes.removed:
                changes.replace(name, {name: tensor.to(block.dtypes[local])})
        return changes


def codes_sha256(weight: QuantizedWeight) -> str:
    """Over codes, scales and zero points as they are in memory, before any packing."""
    digest = hashlib.sha256()
    for tensor in (weight.codes_OI, weight.scale_OG, weight.zero_point_OG):
        if tensor is not None:
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _split(whole: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    zeros = whole.zero_point_OG.split(sizes) if whole.zero_point_OG is not None else [None] * len(sizes)
    parts = zip(whole.codes_OI.split(sizes), whole.scale_OG.split(sizes), zeros, strict=True)
    return [QuantizedWeight(whole.scheme, codes, scale, zero) for codes, scale, zero in parts]
