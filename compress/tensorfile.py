"""One safetensors file: header, byte ranges, reading into own memory, mapping, durable writing.

Headers are parsed here. Compression reads tensors with plain reads: a mapping of a 26 GB model counts as resident
memory and gets processes killed. The runtime maps them: it reads every weight in every step, in place.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without gaps
(huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from compress.errors import RunError, UserError

PIECE = 16 << 20  # bytes moved at a time, so that copying a model needs no memory
HEADER_LIMIT = 100 << 20  # the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor's bytes are: `file[start:stop]`, offsets counted from the beginning of the file."""

    file: Path
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def read(self) -> torch.Tensor:
        """The tensor in memory of its own. Raises RunError if the file shrank since its header was read."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.start)
            _read_exactly(stream, buffer.numpy().data, self.file)
        return buffer.view(DTYPES[self.dtype]).reshape(self.shape)

    def map(self) -> torch.Tensor:
        """The tensor in the file's own pages, which processes share and the system may drop and read again.

        Writes to it stay in this process. A tensor that does not begin at a multiple of its element size, which is
        legal and rare, is read instead. Raises RunError if the file shrank since its header was read.
        """
        dtype = DTYPES[self.dtype]
        if self.start % dtype.itemsize or self.nbytes == 0:
            return self.read()
        if self.file.stat().st_size < self.stop:
            raise RunError(f"{self.file}: file ended early; it changed while it was read")
        raw = np.memmap(self.file, dtype=np.uint8, mode="c", offset=self.start, shape=(self.nbytes,))
        return torch.from_numpy(raw).view(dtype).reshape(self.shape)

    def pieces(self) -> Iterator[memoryview]:
        """The raw bytes, at most PIECE at a time; each piece is overwritten by the next."""
        buffer = memoryview(bytearray(min(PIECE, self.nbytes)))
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.start)
            for done in range(0, self.nbytes, PIECE):
                piece = buffer[: min(PIECE, self.nbytes - done)]
                _read_exactly(stream, piece, self.file)
                yield piece


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that `load` makes when its turn to be written comes, and that is dropped after."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


Entry = TensorRef | LazyTensor | torch.Tensor


class TensorFile:
    """The tensors of one safetensors file, by name. Raises UserError naming the file if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.header, self.refs = _read_header(path, self.size)

    @property
    def names(self) -> list[str]:
        return list(self.refs)

    def __contains__(self, name: object) -> bool:
        return name in self.refs

    def ref(self, name: str) -> TensorRef:
        return self.refs[name]

    def read(self, name: str) -> torch.Tensor:
        return self.refs[name].read()


def open_part(path: Path) -> TensorFile:
    """Open one file written by `save_part`. Raises UserError if it is missing or damaged."""
    if not path.is_file():
        raise UserError(f"{path}: file is missing")
    return TensorFile(path)


def save_part(path: Path, tensors: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file durably: a temporary name, fsync, rename. It appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            write_tensors(out, tensors, metadata)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable (a rename is not, until its directory is flushed)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Sorted, indented, UTF-8: equal contents give equal bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(out: BinaryIO, tensors: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors stream, one tensor in memory at a time; the bytes depend only on the contents."""
    # Wide types first keeps every tensor aligned to its element, so that readers can map the file.
    order = sorted(tensors, key=lambda name: (-entry_dtype(tensors[name]).itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        entry = tensors[name]
        end = offset + entry_bytes(entry)
        header[name] = {
            "dtype": DTYPE_NAMES[entry_dtype(entry)],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        entry = tensors[name]
        if isinstance(entry, TensorRef):
            for piece in entry.pieces():
                out.write(piece)
        else:
            _write_tensor(out, name, entry)


def entry_dtype(entry: Entry) -> torch.dtype:
    return DTYPES[entry.dtype] if isinstance(entry, TensorRef) else entry.dtype


def entry_bytes(entry: Entry) -> int:
    return entry.nbytes if isinstance(entry, TensorRef) else math.prod(entry.shape) * entry.dtype.itemsize


def _write_tensor(out: BinaryIO, name: str, entry: LazyTensor | torch.Tensor) -> None:
    tensor = entry.load() if isinstance(entry, LazyTensor) else entry
    if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
        raise RunError(f"{name}: announced {entry.dtype} {list(entry.shape)}, made {tensor.dtype} {list(tensor.shape)}")
    out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read_exactly(stream: Any, target: memoryview, path: Path) -> None:
    done = 0
    while done < len(target):
        count = stream.readinto(target[done:])
        if not count:
            raise RunError(f"{path}: the file ended early; it changed while it was being read")
        done += count


def _read_header(path: Path, size: int) -> tuple[bytes, dict[str, TensorRef]]:
    with path.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise UserError(f"{path}: a Git LFS pointer, not weights; run `git lfs pull` in its repository")
        if len(first) < 8 or length > size - 8:
            raise UserError(f"{path}: truncated or not safetensors: {size} bytes do not hold its header")
        if length > HEADER_LIMIT:
            raise UserError(f"{path}: corrupt safetensors header: it claims {length} bytes")
        text = stream.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        refs = {name: _parse_entry(path, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: corrupt safetensors header: {error}") from None
    _check_cover(path, refs, 8 + length, size)
    return first + text, refs


def _parse_entry(path: Path, entry: dict[str, Any], base: int) -> TensorRef:
    begin, end = entry["data_offsets"]
    ref = TensorRef(path, entry["dtype"], tuple(int(size) for size in entry["shape"]), base + begin, base + end)
    if ref.dtype not in DTYPES:
        raise ValueError(f"dtype {ref.dtype} is not supported; supported: {', '.join(DTYPES)}")
    if ref.nbytes != math.prod(ref.shape) * DTYPES[ref.dtype].itemsize:
        raise ValueError(f"{ref.dtype} {list(ref.shape)} does not fill {ref.nbytes} bytes")
    return ref


def _check_cover(path: Path, refs: Mapping[str, TensorRef], base: int, size: int) -> None:
    end = base
    for name, ref in sorted(refs.items(), key=lambda item: (item[1].start, item[1].stop)):
        if ref.start != end:
            raise UserError(f"{path}: corrupt safetensors header: bytes before {name!r} overlap or are missing")
        end = ref.stop
    if end > size:
        raise UserError(f"{path}: truncated: its header describes {end} bytes, the file has {size}")
    if end < size:
        raise UserError(f"{path}: {size - end} bytes after the last tensor; the header does not match the file")
