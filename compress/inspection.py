"""What a checkpoint stores: scheme, bits and bytes of every linear, and the totals."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group
from rich.table import Table

from compress.checkpoint import Checkpoint
from compress.formats import quantization_method, stored_scheme
from compress.formats.compressed_tensors import tensor_names

Kind = Literal["quantized linears", "dense linears", "embeddings", "other"]
_LAYER = re.compile(r"^.*\blayers\.(\d+)\.")
KINDS: tuple[Kind, ...] = ("quantized linears", "dense linears", "embeddings", "other")


@dataclass(frozen=True)
class StoredModule:
    """A linear, an embedding, or one other tensor."""

    name: str
    kind: Kind
    scheme: str  # "int4 sym g64", or the dtype of a dense tensor
    shape: tuple[int, ...]  # of the dense tensor it stands for
    bytes: int  # as stored, scales and zero points included

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / max(self.parameters, 1)


@dataclass(frozen=True)
class Total:
    modules: int
    parameters: int
    bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / max(self.parameters, 1)


@dataclass(frozen=True)
class Inspection:
    path: str
    model_type: str
    method: str | None  # how it was quantized; None if dense
    tied: bool  # the head is the embedding, stored once
    modules: tuple[StoredModule, ...]

    def total(self, kind: Kind | None = None) -> Total:
        """Over the modules of one kind, or over all."""
        chosen = [module for module in self.modules if kind in (None, module.kind)]
        return Total(len(chosen), sum(module.parameters for module in chosen), sum(module.bytes for module in chosen))

    @property
    def unquantized(self) -> list[str]:
        """Linears left dense in a quantized checkpoint."""
        if self.method is None:
            return []
        return [module.name for module in self.modules if module.kind == "dense linears"]

    @property
    def dense_bytes(self) -> int:
        """Size of the same model with 16 bits for every weight."""
        return 2 * self.total().parameters

    def to_json(self) -> str:
        """JSON text, with the derived figures spelled out."""

        def figures(item: StoredModule | Total) -> dict[str, Any]:
            return asdict(item) | {"parameters": item.parameters, "bits_per_weight": round(item.bits_per_weight, 4)}

        total = self.total()
        content = {
            "path": self.path,
            "model_type": self.model_type,
            "quantization_method": self.method,
            "tied": self.tied,
            "linears": [figures(module) for module in self.modules if module.kind.endswith("linears")],
            "other": [figures(module) for module in self.modules if not module.kind.endswith("linears")],
            "totals": {kind: figures(self.total(kind)) for kind in KINDS},
            "unquantized": self.unquantized,
            "parameters": total.parameters,
            "bytes": total.bytes,
            "bytes_16_bit": self.dense_bytes,
            "bits_per_weight": round(total.bits_per_weight, 4),
        }
        return json.dumps(content, indent=2)


def inspect_checkpoint(path: Path) -> Inspection:
    """Read headers, not weights. Raises UserError for a damaged checkpoint, or one quantized in an unknown way."""
    checkpoint = Checkpoint.open(path)
    modules: list[StoredModule] = []
    seen: set[str] = set()
    for name in checkpoint.names:
        owner, _, leaf = name.rpartition(".")
        if leaf in ("weight", "weight_packed"):
            modules.append(_module(checkpoint, owner, seen))
    modules += [_dense(checkpoint, name, "other") for name in checkpoint.names if name not in seen]
    return Inspection(
        path=str(path),
        model_type=str(checkpoint.config.get("model_type", "unknown")),
        method=quantization_method(checkpoint.config),
        tied=bool(checkpoint.config.get("tie_word_embeddings", False)),
        modules=tuple(modules),
    )


def _module(checkpoint: Checkpoint, owner: str, seen: set[str]) -> StoredModule:
    name = f"{owner}.weight"
    if name in checkpoint and (len(checkpoint.shape(name)) != 2 or "embed" in owner.rpartition(".")[2]):
        seen.add(name)
        return _dense(checkpoint, name, "embeddings" if "embed" in owner else "other")
    scheme = stored_scheme(checkpoint, owner)
    if scheme is None:
        seen.add(name)
        return _dense(checkpoint, name, "dense linears")
    names = tensor_names(owner, scheme)
    seen.update(names)
    rows, columns = checkpoint.read(f"{owner}.weight_shape").tolist()
    size = sum(checkpoint.nbytes(name) for name in names)
    return StoredModule(owner, "quantized linears", str(scheme), (rows, columns), size)


def _dense(checkpoint: Checkpoint, name: str, kind: Kind) -> StoredModule:
    dtype = str(checkpoint.dtype(name)).removeprefix("torch.")
    shown = name.removesuffix(".weight") if kind != "other" else name
    return StoredModule(shown, kind, dtype, checkpoint.shape(name), checkpoint.nbytes(name))


def render(inspection: Inspection) -> Group:
    """Two tables: modules alike in several layers on one row, then totals, and what was left dense."""
    detail = Table(title=f"{inspection.model_type}, {inspection.method or 'dense'}")
    for heading in ("module", "layers", "scheme", "shape"):
        detail.add_column(heading, overflow="fold")
    for heading in ("bits/weight", "MB"):
        detail.add_column(heading, justify="right")
    for (name, scheme, shape), alike in _alike(inspection).items():
        layers = _ranges([int(number) for module in alike for number in _LAYER.findall(module.name)])
        figures = (f"{alike[0].bits_per_weight:.2f}", f"{sum(module.bytes for module in alike) / 1e6:.2f}")
        detail.add_row(name, layers, scheme, "x".join(map(str, shape)), *figures)
    return Group(inspection.path, detail, _totals(inspection), *_notes(inspection))


def _totals(inspection: Inspection) -> Table:
    table = Table(title="Totals")
    table.add_column("kind")
    for heading in ("modules", "parameters", "bits/weight", "MB"):
        table.add_column(heading, justify="right")
    rows = [(kind, inspection.total(kind)) for kind in KINDS] + [("all", inspection.total())]
    for kind, total in rows:
        if total.modules:
            figures = (f"{total.modules}", f"{total.parameters:,}", f"{total.bits_per_weight:.2f}")
            table.add_row(kind, *figures, f"{total.bytes / 1e6:.2f}")
    return table


def _notes(inspection: Inspection) -> list[str]:
    stored, dense = inspection.total().bytes, inspection.dense_bytes
    notes = [f"{stored / 1e6:.2f} MB, {stored / max(dense, 1):.1%} of the {dense / 1e6:.2f} MB in 16 bits"]
    if inspection.tied:
        notes.append("head tied to the embedding, stored once")
    if inspection.unquantized:
        notes.append("linears left dense: " + ", ".join(inspection.unquantized))
    return notes


def _alike(inspection: Inspection) -> dict[tuple[str, str, tuple[int, ...]], list[StoredModule]]:
    """Modules by local name, scheme and shape, so that the layers of a model share a row."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[StoredModule]] = {}
    for module in inspection.modules:
        groups.setdefault((_LAYER.sub("", module.name), module.scheme, module.shape), []).append(module)
    return groups


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
