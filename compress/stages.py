"""The one table of stages. A stage maps a checkpoint directory to a checkpoint directory.

So stages chain, resume and can be tested alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.arch import HEAD, ModelSpec, read_spec
from compress.blockwise import Changes, Walk
from compress.calibration import Calibration
from compress.checkpoint import Checkpoint, TensorRef, open_part, write_checkpoint
from compress.flow import arrange
from compress.formats import compressed_tensors
from compress.memory import peak_bytes, reset_peak, resident_bytes
from compress.progress import Reporter
from compress.quant.quantize import Quantizer
from compress.quant.scheme import Scheme
from compress.recipe import QuantizeSettings, resolve_method
from compress.selection import check_groups, select_linears

CHUNK_TOKENS = 1536  # rows of one forward step: large enough for full matrix products, small enough for memory


@dataclass(frozen=True)
class StageRun:
    """Where a stage reads, writes and works; `calibration` is None where the recipe has none."""

    source: Path
    output: Path
    work: Path
    calibration: Calibration | None
    reporter: Reporter
    device: str = "cpu"
    chunk_tokens: int = CHUNK_TOKENS


def quantize(run: StageRun, settings: QuantizeSettings) -> dict[str, Any]:
    """Quantize the linears of a dense checkpoint; every other tensor is copied byte for byte."""
    checkpoint = Checkpoint.open(run.source)
    spec = read_spec(checkpoint.config, str(run.source / "config.json"))
    schemes = chosen_schemes(spec, settings)
    method = resolve_method(settings)
    tokens = None
    if run.calibration is not None:
        tokens = arrange(run.calibration.ids_T, run.calibration.lengths, run.chunk_tokens)
    walk = Walk(checkpoint, spec, tokens, run.work, run.reporter, run.device)
    quantizer = Quantizer(
        spec=spec,
        schemes=schemes,
        transform=method.transform,
        range=method.range,
        rounding=method.rounding,
        scale_dtype=scale_dtype(settings, spec),
        act_order=settings.act_order,
        dampening=settings.dampening,
        refine=settings.refine,
        pack=compressed_tensors.pack,
    )
    changes = walk.run(quantizer, f"quantize ({settings.method})")
    config = dict(checkpoint.config)
    ignored = [name for name in spec.linears() if name not in schemes]
    config["quantization_config"] = compressed_tensors.quantization_config(schemes, ignored)
    if HEAD in schemes:
        config["tie_word_embeddings"] = False  # a quantized head is a tensor of its own
    parts = walk.parts(spec.layers + quantizer.wants_head)
    with run.reporter.phase("write", 1) as phase:
        write_checkpoint(run.output, merged(checkpoint, spec, changes, parts), config, run.source)
        phase.advance()
    return {"layers": changes.layers, "transforms": changes.transforms, "method": method.model_dump()}


def chosen_schemes(spec: ModelSpec, settings: QuantizeSettings, where: str = "stages[0].quantize") -> dict[str, Scheme]:
    """The scheme of every selected linear. Raises UserError for a pattern or group size that does not fit."""
    selected = select_linears(spec, settings.ignore, f"{where}.ignore")
    check_groups(spec, selected, settings.bits, settings.group_size, where)
    group_size = None if settings.group_size == -1 else settings.group_size
    scheme = Scheme(settings.bits, group_size, settings.symmetric)
    return {name: scheme for name, chosen in selected.items() if chosen}


def scale_dtype(settings: QuantizeSettings, spec: ModelSpec) -> torch.dtype:
    """The type scales are stored in: the model's own where it has 16 bits, else float16, unless the recipe says."""
    name = settings.scale_dtype
    if name == "auto":
        name = spec.dtype if spec.dtype in ("float16", "bfloat16") else "float16"
    return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def merged(checkpoint: Checkpoint, spec: ModelSpec, changes: Changes, parts: list[Path]) -> dict[str, TensorRef]:
    """The tensors of the new checkpoint by name: those of the part files, and the source's that none replaces."""
    removed = set(changes.removed)
    if spec.tied:
        removed.add(f"{HEAD}.weight")  # a tied head is stored once, as the embedding
    tensors = {name: checkpoint.ref(name) for name in checkpoint.names if name not in removed}
    for part in parts:
        tensors |= open_part(part).refs
    return tensors


STAGES: dict[str, Callable[[StageRun, Any], dict[str, Any]]] = {"quantize": quantize}


def run_stage(name: str, run: StageRun, settings: Any) -> dict[str, Any]:
    """Run one stage and record its time and peak memory."""
    reset_peak()
    before, started = resident_bytes(), time.monotonic()
    record = STAGES[name](run, settings)
    return {
        "name": name,
        "seconds": time.monotonic() - started,
        "peak_rss_bytes": peak_bytes(),
        "rss_before_bytes": before,
        **record,
    }
