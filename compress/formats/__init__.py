"""How quantized linears are stored: one file for each layout, and here what is the same for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compress.checkpoint import Checkpoint
from compress.errors import UserError
from compress.formats import compressed_tensors
from compress.formats.compressed_tensors import SchemeTable, read_schemes
from compress.kernels.weights import PackedWeight
from compress.quant.scheme import QuantizedWeight, Scheme

__all__ = [
    "map_linear",
    "quantization_method",
    "read_linear",
    "require_dense",
    "scheme_table",
    "stored_scheme",
]

READABLE = (compressed_tensors.METHOD,)
# Leaves that only quantized linears have, and the file that names the method where config.json does not.
_QUANTIZED_LEAVES = frozenset(("weight_packed", "qweight", "weight_scale", "weight_scale_inv", "qzeros", "quant_state"))
_METHOD_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """What config.json says the weights were quantized with; None for a dense model. Raises UserError for nonsense."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise UserError(f"config.json: quantization_config must be an object, not {quantization!r}")
    return str(quantization.get("quant_method") or "an unnamed method")


def scheme_table(checkpoint: Checkpoint) -> SchemeTable | None:
    """The schemes of a checkpoint; None if it is dense. Raises UserError for a method that cannot be read."""
    method = quantization_method(checkpoint.config) or _method_file(checkpoint)
    if method is None:
        return None
    where = str(checkpoint.path / "config.json")
    if method not in READABLE:
        raise UserError(f"{where}: quantized with {method}, which cannot be read; readable: {', '.join(READABLE)}")
    return read_schemes(checkpoint.config.get("quantization_config") or checkpoint.config["compression_config"], where)


def stored_scheme(checkpoint: Checkpoint, module: str) -> Scheme | None:
    """The scheme of the linear `module` (full name, without `.weight`); None if it is stored dense or not at all.

    Raises UserError where config.json and the tensors contradict each other.
    """
    table = scheme_table(checkpoint)
    stated = table.of(module) if table else None
    packed, dense = f"{module}.weight_packed" in checkpoint, f"{module}.weight" in checkpoint
    if packed and stated is None:
        raise UserError(f"{checkpoint.path}: {module} is stored quantized, but config.json gives no scheme for it")
    if dense and stated is not None:
        raise UserError(f"{checkpoint.path}: config.json says {module} is {stated}, but its weight is stored dense")
    return stated if packed else None


def read_linear(checkpoint: Checkpoint, module: str) -> torch.Tensor | QuantizedWeight:
    """The weight of one linear, as it is stored. Raises UserError if it is missing or contradicts config.json."""
    scheme = _checked_scheme(checkpoint, module)
    if scheme is None:
        return checkpoint.read(f"{module}.weight")
    names = compressed_tensors.tensor_names(module, scheme)
    return compressed_tensors.unpack(module, {name: checkpoint.read(name) for name in names}, scheme)


def map_linear(checkpoint: Checkpoint, module: str) -> torch.Tensor | PackedWeight:
    """The same in the file's own pages, for the runtime: nothing is unpacked or copied but zero points."""
    scheme = _checked_scheme(checkpoint, module)
    if scheme is None:
        return checkpoint.map(f"{module}.weight")
    names = compressed_tensors.tensor_names(module, scheme)
    return compressed_tensors.as_packed(module, {name: checkpoint.map(name) for name in names}, scheme)


def _checked_scheme(checkpoint: Checkpoint, module: str) -> Scheme | None:
    """`stored_scheme` of a linear all of whose tensors are there."""
    scheme = stored_scheme(checkpoint, module)
    if scheme is None and f"{module}.weight" not in checkpoint:
        raise UserError(f"{checkpoint.path}: no weight of {module}")
    for name in compressed_tensors.tensor_names(module, scheme) if scheme else ():
        if name not in checkpoint:
            raise UserError(f"{checkpoint.path}: {name} is missing, which {scheme} needs")
    return scheme


def require_dense(checkpoint: Checkpoint) -> None:
    """Refuse an already quantized checkpoint as the input of compression, by the name of its method."""
    method = quantization_method(checkpoint.config) or _method_file(checkpoint)
    if method is None:
        leaf = next((name for name in checkpoint.names if name.rpartition(".")[2] in _QUANTIZED_LEAVES), None)
        method = f"an unnamed method (it stores {leaf})" if leaf else None
    if method is None:
        narrow = next((name for name in checkpoint.names if checkpoint.dtype(name).itemsize == 1), None)
        method = f"{checkpoint.dtype(narrow)} weights ({narrow})".removeprefix("torch.") if narrow else None
    if method is not None:
        raise UserError(f"{checkpoint.path}: already quantized with {method}; give the dense original instead")


def _method_file(checkpoint: Checkpoint) -> str | None:
    return next((method for file, method in _METHOD_FILES.items() if (checkpoint.path / file).is_file()), None)
