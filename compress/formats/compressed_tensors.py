"""The compressed-tensors layout, format "pack-quantized": loads in transformers and vLLM.

A linear X of shape [O, I] is stored as
  X.weight_packed      int32 [O, ceil(I·bits/32)]   codes + 2^(bits−1), dense, low bits first
  X.weight_scale       float [O, G]
  X.weight_zero_point  int32 [ceil(O·bits/32), G]   asymmetric only, packed along the rows
  X.weight_shape       int64 [2]                    O, I
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compress.errors import UserError
from compress.kernels.packing import pack_int32, pack_rows, packed_words, unpack_int32, unpack_rows
from compress.kernels.weights import PackedWeight
from compress.quant.scheme import QuantizedWeight, Scheme

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
BITS = range(2, 9)
LINEAR = "Linear"  # the class name by which a config targets every linear


def pack(module: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The stored tensors of the linear `module` (its full name, without `.weight`)."""
    bits = weight.scheme.bits
    tensors = {
        f"{module}.weight_packed": pack_int32(weight.codes_OI, bits),
        f"{module}.weight_scale": weight.scale_OG.contiguous(),
        f"{module}.weight_shape": torch.tensor(weight.codes_OI.shape, dtype=torch.int64),
    }
    if weight.zero_point_OG is not None:
        tensors[f"{module}.weight_zero_point"] = pack_rows(weight.zero_point_OG, bits)
    return tensors


def tensor_names(module: str, scheme: Scheme) -> list[str]:
    """The names that `pack` gives."""
    leaves = ["weight_packed", "weight_scale", "weight_shape"] + ([] if scheme.symmetric else ["weight_zero_point"])
    return [f"{module}.{leaf}" for leaf in leaves]


def unpack(module: str, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
    """The inverse of `pack`. Raises UserError naming the tensor whose shape contradicts the scheme."""
    packed = as_packed(module, tensors, scheme)
    codes = unpack_int32(packed.words_OW, scheme.bits, packed.columns)
    return QuantizedWeight(scheme, codes, packed.scale_OG, packed.zero_point_OG)


def as_packed(module: str, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> PackedWeight:
    """The stored rows as they are, for kernels that read them. Raises UserError as `unpack`."""
    rows, columns = (int(size) for size in tensors[f"{module}.weight_shape"].tolist())
    if scheme.group_size and columns % scheme.group_size:
        raise UserError(
            f"{module}.weight_shape: {columns} columns are not a multiple of group_size {scheme.group_size}"
        )
    groups = scheme.groups(columns)
    expected = {
        "weight_packed": (rows, packed_words(columns, scheme.bits)),
        "weight_scale": (rows, groups),
        "weight_zero_point": (packed_words(rows, scheme.bits), groups),
    }
    for name in tensor_names(module, scheme):
        shape = expected.get(name.rpartition(".")[2])
        if shape and tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{name}: shape {list(tensors[name].shape)}, but {scheme} of [{rows}, {columns}] needs {list(shape)}"
            )
    zero_point = None
    if not scheme.symmetric:
        zero_point = unpack_rows(tensors[f"{module}.weight_zero_point"], scheme.bits, rows)
    words, scale = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
    return PackedWeight(scheme.bits, columns, words, scale, zero_point)


def quantization_config(schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json for linears with `schemes`; `ignored` linears stay dense.

    One scheme targets every Linear; several get one group each, with the modules by name.
    """
    groups: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(ignored),
        "config_groups": {
            f"group_{number}": {
                "targets": [LINEAR] if len(groups) == 1 else modules,
                "format": FORMAT,
                "input_activations": None,
                "output_activations": None,
                "weights": _weight_arguments(scheme),
            }
            for number, (scheme, modules) in enumerate(groups.items())
        },
    }


def _weight_arguments(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.group_size else "channel",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


@dataclass(frozen=True)
class SchemeTable:
    """Which linear has which scheme, as a config states it: by name, by `re:` pattern, or by class."""

    targets: dict[str, Scheme]
    ignored: tuple[str, ...]

    def of(self, module: str) -> Scheme | None:
        """The scheme of a linear; None if it is ignored or not targeted. Names go before patterns before the class."""
        if any(_matches(module, target) for target in self.ignored):
            return None
        if module in self.targets:
            return self.targets[module]
        for target, scheme in self.targets.items():
            if target.startswith("re:") and _matches(module, target):
                return scheme
        return self.targets.get(LINEAR)


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in (module, LINEAR)


def read_schemes(quantization: Mapping[str, Any], where: str = "config.json") -> SchemeTable:
    """Parse a `quantization_config`. Raises UserError for anything stored in another way than described above."""
    for key in ("sparsity_config", "transform_config"):  # kv_cache_scheme: the runtime's cache reads it
        if quantization.get(key):
            raise UserError(f"{where}: quantization_config.{key} is not supported")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UserError(f"{where}: quantization_config.config_groups must name at least one group")
    targets: dict[str, Scheme] = {}
    for name, group in groups.items():
        place = f"{where}: quantization_config.config_groups.{name}"
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            raise UserError(f"{place}: must be an object with a list of targets, not {group!r}")
        form = group.get("format") or quantization.get("format")
        if form != FORMAT:
            raise UserError(f"{place}: format {form!r} is not supported; supported: {FORMAT}")
        if group.get("input_activations") or group.get("output_activations"):
            raise UserError(f"{place}: quantized activations are not supported; supported: weights only")
        targets |= dict.fromkeys(group["targets"], _read_scheme(group.get("weights") or {}, place))
    return SchemeTable(targets, tuple(quantization.get("ignore") or ()))


def _read_scheme(weights: Mapping[str, Any], place: str) -> Scheme:
    supported = {
        "type": ("int",),
        "num_bits": tuple(BITS),
        "strategy": ("group", "channel"),
        "dynamic": (False, None),
        "actorder": (None, "weight", "static", False),  # these leave the columns where they are
        "symmetric": (True, False),
    }
    for key, accepted in supported.items():
        if weights.get(key) not in accepted:
            shown = ", ".join(str(value) for value in accepted)
            raise UserError(f"{place}.weights.{key}: {weights.get(key)!r} is not supported; supported: {shown}")
    group_size = weights.get("group_size") if weights["strategy"] == "group" else None
    if weights["strategy"] == "group" and (not isinstance(group_size, int) or group_size < 1):
        raise UserError(f"{place}.weights.group_size: must be a positive integer, not {group_size!r}")
    return Scheme(weights["num_bits"], group_size, weights["symmetric"])
