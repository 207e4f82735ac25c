"""A Hugging Face checkpoint directory: strict lazy reader, durable streaming writer.

A directory that opens has every tensor exactly once, where its index says, at the size its header says.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from compress.arch import HEAD, ModelSpec
from compress.errors import UserError
from compress.shards import INDEX, check_index, read_config, read_object, shard_names
from compress.sidecars import copy_sidecars
from compress.tensorfile import (
    DTYPES,
    Entry,
    LazyTensor,
    TensorFile,
    TensorRef,
    entry_bytes,
    open_part,
    save_part,
    sync_directory,
    write_json,
)

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "TensorRef",
    "check_tensors",
    "open_part",
    "publish",
    "read_config",
    "read_object",
    "save_part",
    "write_checkpoint",
]

EDGE = 4096  # bytes of each end of a tensor that enter the fingerprint


class Checkpoint:
    """The tensors of a checkpoint directory by name; `read` copies one into memory of its own."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[TensorFile]) -> None:
        self.path = path
        self.config = config
        self._files = files
        refs = {name: ref for file in files for name, ref in file.refs.items()}
        self._refs = {name: refs[name] for name in sorted(refs, key=natural_order)}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a directory. Raises UserError, naming the file, for anything missing, damaged or contradictory."""
        path = Path(path)
        config = read_config(path)
        files = [TensorFile(path / shard) for shard in shard_names(path)]
        owner: dict[str, TensorFile] = {}
        for file in files:
            for name in file.refs:
                if name in owner:
                    raise UserError(f"{file.path}: tensor {name!r} is also in {owner[name].path.name}")
                owner[name] = file
        if (path / INDEX).is_file():
            check_index(path / INDEX, owner)
        return cls(path, config, files)

    @property
    def names(self) -> list[str]:
        """Tensor names, with layer 2 before layer 10."""
        return list(self._refs)

    def __contains__(self, name: object) -> bool:
        return name in self._refs

    def ref(self, name: str) -> TensorRef:
        return self._refs[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._refs[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._refs[name].dtype]

    def nbytes(self, name: str) -> int:
        return self._refs[name].nbytes

    @property
    def total_bytes(self) -> int:
        return sum(ref.nbytes for ref in self._refs.values())

    def read(self, name: str) -> torch.Tensor:
        return self._refs[name].read()

    def map(self, name: str) -> torch.Tensor:
        """The tensor in the file's own pages; see TensorRef.map."""
        return self._refs[name].map()

    def fingerprint(self) -> str:
        """sha256 over config.json and each shard's header, size, and the two ends of every tensor: cheap at 26 GB."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(self._files, key=lambda file: file.path.name):
            digest.update(f"{file.path.name} {file.size}\n".encode())
            digest.update(file.header)
            with file.path.open("rb", buffering=0) as stream:
                for ref in sorted(file.refs.values(), key=lambda ref: ref.start):
                    for start in (ref.start, max(ref.start, ref.stop - EDGE)):
                        digest.update(os.pread(stream.fileno(), min(EDGE, ref.nbytes), start))
        return digest.hexdigest()


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def check_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Check that the checkpoint holds the model of `spec`, whole.

    A linear may be stored quantized (parts beside or instead of `.weight`), a tied head may be stored or not, and old
    rotary buffers are tolerated. Raises UserError with the first names and the count of what is missing, has another
    shape, or would be ignored.
    """
    quantized = "quantization_config" in checkpoint.config
    modules = set(spec.linears()) if quantized else set()
    stored_modules = {name.rpartition(".")[0] for name in checkpoint.names}
    expected = spec.tensors(checkpoint)
    missing = [
        name
        for name in expected
        if name not in checkpoint
        and not (name.endswith(".weight") and name[:-7] in modules and name[:-7] in stored_modules)
    ]
    wrong = [
        f"{name} is {list(checkpoint.shape(name))}, not {list(shape)}"
        for name, shape in expected.items()
        if name in checkpoint and checkpoint.shape(name) != shape
    ]
    extra = [name for name in checkpoint.names if name not in expected and not _tolerated(name, spec, modules)]
    for title, names in (("missing", missing), ("wrong shape", wrong), ("not part of the model", extra)):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise UserError(f"{checkpoint.path}: {len(names)} tensors {title}: {shown}")


def _tolerated(name: str, spec: ModelSpec, quantized: Iterable[str]) -> bool:
    module, _, leaf = name.rpartition(".")
    if spec.tied and module == HEAD:
        return True
    return name.endswith(".rotary_emb.inv_freq") or module in quantized or leaf in ("k_scale", "v_scale")


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Entry],
    config: Mapping[str, Any],
    sidecars_from: Path | None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint directory, which appears whole or not at all; equal contents give equal bytes.

    Always numbered shards with an index. Tensors given as TensorRef are copied as bytes, a LazyTensor is made when its
    turn comes, so memory stays at one tensor. Files of `sidecars_from` that are neither weights nor config are copied
    byte for byte. Raises UserError if `directory` exists.
    """
    _refuse_existing(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        if sidecars_from is not None:
            copy_sidecars(sidecars_from, temporary)
        _write_shards(temporary, tensors, max_shard_bytes)
        write_json(temporary / "config.json", config)
        publish(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_shards(directory: Path, tensors: Mapping[str, Entry], max_shard_bytes: int) -> None:
    shards: list[dict[str, Entry]] = [{}]
    filled = 0
    for name in sorted(tensors, key=natural_order):
        size = entry_bytes(tensors[name])
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensors[name]
        filled += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_part(directory / file, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(entry_bytes(entry) for entry in tensors.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name, durably. Raises UserError if the name is taken."""
    _refuse_existing(final)
    for file in temporary.rglob("*"):
        if file.is_dir():
            sync_directory(file)
        else:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    sync_directory(temporary)
    temporary.rename(final)
    sync_directory(final.parent)


def _refuse_existing(directory: Path) -> None:
    if directory.exists() or directory.is_symlink():
        raise UserError(f"{directory}: already exists; remove it or choose another output")
