"""GGUF → Hugging Face directory, one tensor at a time.

The names are mapped back, Llama's query and key rows are put back in Hugging Face order, and the weights are stored in
the narrowest float type that the file's own types justify.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from compress.checkpoint import LazyTensor, write_checkpoint
from compress.errors import UserError
from compress.sources.gguf_config import ROPE_FACTORS, check_architecture, generation_config, read_gguf_config
from compress.sources.gguf_header import GgufHeader, GgufTensor, read_header
from compress.sources.gguf_tokenizer import write_tokenizer
from compress.tensorfile import write_json

INTERVAL = 5.0  # seconds between progress lines
SLAB = 16 << 20  # quantized bytes decoded at a time
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Overflow(Exception):
    """A value does not fit float16."""


def convert(source: Path, directory: Path, origin: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Convert one GGUF file into the new directory `directory`; `origin` is recorded in source.json.

    Raises UserError, before any weights are read, for an architecture, tensor, type or key that is not supported.
    """
    header = read_header(source)
    check_architecture(header)
    names = {name: huggingface_name(header, name) for name in header.tensors if name != ROPE_FACTORS}
    _check_kinds(header)
    dtype = storage_dtype(header)
    try:
        _write(header, names, directory, dtype, progress)
    except _Overflow as error:
        progress(f"{error}; storing bfloat16 instead")
        _write(header, names, directory, torch.bfloat16, progress)
    progress("rebuilding the tokenizer")
    write_tokenizer(header, directory)
    write_json(directory / "generation_config.json", generation_config(header))
    fields = header.fields
    described = {
        "license": fields.get("general.license"),
        "name": fields.get("general.name"),
        "organization": fields.get("general.organization"),
        "base_model": fields.get("general.base_model.0.name"),
        "base_model_url": fields.get("general.base_model.0.repo_url"),
        "stored": stored_bytes(header),
    }
    write_json(directory / "source.json", origin | {k: v for k, v in described.items() if v is not None})


def config_of(source: Path) -> dict[str, Any]:
    """config.json of a GGUF file, from its header alone."""
    header = read_header(source)
    check_architecture(header)
    return _config(header, storage_dtype(header))


def huggingface_name(header: GgufHeader, name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`. Raises UserError for an unknown tensor."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, module, leaf = match.groups()
        if layer is None and module in _OUTER:
            return f"{_OUTER[module]}.{leaf}"
        if layer is not None and module in _INNER:
            return f"model.layers.{layer}.{_INNER[module]}.{leaf}"
    raise UserError(f"{header.path}: tensor {name!r} has no place in the supported architectures")


def stored_bytes(header: GgufHeader) -> dict[str, int]:
    """Bytes of the file's tensors by their kind: `{"F32": 140544, "Q4_1": 84216960}`."""
    kinds = sorted({tensor.kind.name for tensor in header.tensors.values()})
    return {kind: sum(t.nbytes for t in header.tensors.values() if t.kind.name == kind) for kind in kinds}


def storage_dtype(header: GgufHeader) -> torch.dtype:
    """bfloat16 if the file holds any, float32 if it holds nothing else, otherwise float16: what its scales are."""
    kinds = {tensor.kind for tensor in header.tensors.values()}
    if GGMLQuantizationType.BF16 in kinds:
        return torch.bfloat16
    return torch.float32 if kinds == {GGMLQuantizationType.F32} else torch.float16


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from GGUF's interleaved rotary pairs (2i, 2i+1) of each head to Hugging Face's halves (i, i + D/2)."""
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def read_tensor(path: Path, tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode one tensor slab by slab: float32 arithmetic, one rounding to `dtype`, memory of the result."""
    rows = tensor.nbytes // tensor.row_bytes
    out = torch.empty(rows, tensor.shape[-1], dtype=dtype)
    step = max(1, SLAB // tensor.row_bytes)
    with path.open("rb") as stream:
        stream.seek(tensor.start)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = np.frombuffer(stream.read(count * tensor.row_bytes), np.uint8).reshape(count, tensor.row_bytes)
            wide = torch.from_numpy(np.array(dequantize(raw, tensor.kind), dtype=np.float32))
            out[first : first + count] = wide
            if dtype == torch.float16 and bool((wide.abs() > torch.finfo(dtype).max).any()):
                raise _Overflow(f"{tensor.name}: {wide.abs().max().item():.3g} does not fit float16")
    return out.reshape(tensor.shape)


def _config(header: GgufHeader, dtype: torch.dtype) -> dict[str, Any]:
    factors = header.tensors.get(ROPE_FACTORS)
    values = None if factors is None else read_tensor(header.path, factors, torch.float32).numpy().reshape(-1)
    return read_gguf_config(header, values, str(dtype).removeprefix("torch."))


def _check_kinds(header: GgufHeader) -> None:
    for tensor in header.tensors.values():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.kind][1]), np.uint8), tensor.kind)
        except NotImplementedError:
            raise UserError(f"{header.path}: {tensor.name} has type {tensor.kind.name}, which cannot be read") from None


def _write(
    header: GgufHeader, names: dict[str, str], directory: Path, dtype: torch.dtype, progress: Callable[[str], None]
) -> None:
    config = _config(header, dtype)
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    said = time.monotonic() - INTERVAL

    def load(number: int, name: str) -> torch.Tensor:
        nonlocal said
        if time.monotonic() - said >= INTERVAL:
            progress(f"converting tensor {number}/{len(names)}: {name}")
            said = time.monotonic()
        tensor = read_tensor(header.path, header.tensors[name], dtype)
        module = name.split(".")[-2]
        if header.fields["general.architecture"] == "llama" and module in permuted:
            return unpermute(tensor, permuted[module])
        return tensor

    tensors = {
        target: LazyTensor(dtype, header.tensors[name].shape, partial(load, number, name))
        for number, (name, target) in enumerate(names.items(), 1)
    }
    write_checkpoint(directory, tensors, config, sidecars_from=None)
