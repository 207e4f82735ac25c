"""What is written is read back and checked against what was meant.

Codes, scales and zero points must hash to what they were in memory before packing; linears that were to stay as they
are, embedding, head and final norm must have the source's bytes; and the runtime, which loads the files by its own
path, must give the logits of a plain forward pass over the dequantized weights. The runtime holds the whole model in
float32: where that does not fit into memory, its part is left out, and the result says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from compress.arch import EMBEDDING, FINAL_NORM, HEAD, ModelSpec, block_prefix, read_spec
from compress.block import BlockForward
from compress.checkpoint import Checkpoint, TensorRef, check_tensors
from compress.errors import RunError
from compress.formats import read_linear
from compress.kernels.norm import rms_norm
from compress.memory import available_bytes
from compress.quant.quantize import codes_sha256
from compress.quant.scheme import QuantizedWeight
from compress.roofline import parameters
from compress.runtime.engine import Engine

BLOCKS = "model.layers."
TOLERANCE = 1e-3  # of the largest logit: float32 sums in another order differ by about 1e-6 of it a layer


@dataclass(frozen=True)
class Verification:
    reload_bit_equal: bool
    engine_matches_reference: bool | None  # None where the model does not fit into memory whole
    largest_difference: float | None  # between the runtime's logits and the reference's, relative to the largest logit
    unquantized: list[str]

    def section(self) -> dict[str, Any]:
        return {
            "reload_bit_equal": self.reload_bit_equal,
            "engine_matches_reference": self.engine_matches_reference,
            "largest_difference": self.largest_difference,
            "unquantized": self.unquantized,
        }


def verify(directory: Path, source: Path, layers: list[dict[str, Any]], ids_S: torch.Tensor) -> Verification:
    """Check a written checkpoint against its records and its source; `ids_S` is a short text to compare logits on.

    Raises RunError naming the first tensor that is not what it should be.
    """
    checkpoint, original = Checkpoint.open(directory), Checkpoint.open(source)
    spec = read_spec(checkpoint.config, str(directory / "config.json"))
    check_tensors(checkpoint, spec)
    for layer in layers:
        stored = read_linear(checkpoint, layer["name"])
        if not isinstance(stored, QuantizedWeight) or codes_sha256(stored) != layer["codes_sha256"]:
            raise RunError(f"{directory}: {layer['name']} reads back as something else than was written")
    quantized = {layer["name"] for layer in layers}
    unquantized = [name for name in spec.linears() if name not in quantized]
    for name in original.names:
        stays = name.removesuffix(".weight") in unquantized or not name.startswith(BLOCKS)
        if name in checkpoint and stays and not _same_bytes(original.ref(name), checkpoint.ref(name)):
            raise RunError(f"{directory}: {name} was to stay as it is, and differs from {source}")
    if 4 * parameters(spec) > available_bytes():
        return Verification(True, None, None, unquantized)
    difference = logit_difference(checkpoint, spec, ids_S)
    if not difference < TOLERANCE:
        raise RunError(
            f"{directory}: the runtime's logits differ from the reference by {difference:.1e} of the largest one"
        )
    return Verification(True, True, difference, unquantized)


def _same_bytes(one: TensorRef, other: TensorRef) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and all(a == b for a, b in zip(one.pieces(), other.pieces(), strict=True))


@torch.inference_mode()
def logit_difference(checkpoint: Checkpoint, spec: ModelSpec, ids_S: torch.Tensor) -> float:
    """The largest difference of logits between the runtime and the reference, relative to the largest logit."""
    reference_SV = reference_logits(checkpoint, spec, ids_S)
    engine = Engine.load(checkpoint.path, exact=True)
    logits_SV = engine.logits(engine.hidden_states(ids_S))
    return float((logits_SV - reference_SV).abs().max() / reference_SV.abs().max())


def reference_logits(checkpoint: Checkpoint, spec: ModelSpec, ids_S: torch.Tensor) -> torch.Tensor:
    """Logits [S, vocab] of one sequence in float32: dense weights, one block in memory at a time."""
    hidden_SC = F.embedding(ids_S, checkpoint.read(f"{EMBEDDING}.weight")).float()
    for index in range(spec.layers):
        prefix, forward = block_prefix(index), BlockForward(spec, index)
        weights = {name: _dense(checkpoint, prefix + name) for name in spec.block_tensors()}
        x = forward.attention_input(hidden_SC, weights)
        context = forward.attention_output(x, weights, [len(ids_S)])
        hidden_SC = forward.after_attention(hidden_SC, context, weights)
        gated = forward.mlp_output(forward.mlp_input(hidden_SC, weights), weights)
        hidden_SC = forward.after_mlp(hidden_SC, gated, weights)
    normed_SC = rms_norm(hidden_SC, checkpoint.read(f"{FINAL_NORM}.weight").float(), spec.norm_eps)
    head = f"{EMBEDDING}.weight" if spec.tied else f"{HEAD}.weight"
    return normed_SC @ _dense(checkpoint, head).T


def _dense(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    if name in checkpoint:
        return checkpoint.read(name).float()
    stored = read_linear(checkpoint, name.removesuffix(".weight"))
    return stored.dequantize() if isinstance(stored, QuantizedWeight) else stored.float()
