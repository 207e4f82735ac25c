"""The header of a GGUF file: metadata and where each tensor is. No weights are read, nothing is memory-mapped.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from compress.errors import UserError

# GGUF value types 0..12; 8 is a string, 9 an array
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # row-major, as torch has it: [out, in]
    kind: GGMLQuantizationType
    start: int  # offset in the file, in bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last dimension)."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    fields: dict[str, Any]  # scalars, strings, lists of either
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table. Raises UserError for another format, another version, or a truncated file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        magic, version = struct.unpack("<4sI", stream.read(8).ljust(8, b"\0"))
        if magic != b"GGUF":
            raise UserError(f"{path}: not a GGUF file")
        if version not in (2, 3):
            raise UserError(f"{path}: GGUF version {version} is not supported; supported: 2 and 3, little-endian")
        try:
            tensor_count, field_count = struct.unpack("<QQ", _take(stream, 16))
            fields = {_string(stream): _value(stream, _number(stream, "<u4")) for _ in range(field_count)}
            raw = [_tensor(stream) for _ in range(tensor_count)]
        except (EOFError, UnicodeDecodeError, KeyError, ValueError, struct.error) as error:
            raise UserError(f"{path}: damaged GGUF header: {error}") from None
        alignment = int(fields.get("general.alignment", 32))
        base = -(-stream.tell() // alignment) * alignment
    tensors = {name: GgufTensor(name, shape, kind, base + offset) for name, shape, kind, offset in raw}
    for tensor in tensors.values():
        if tensor.start + tensor.nbytes > size:
            raise UserError(f"{path}: truncated: tensor {tensor.name!r} ends after the end of the file ({size} bytes)")
    return GgufHeader(path, fields, tensors)


def _take(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError("the file ends inside it")
    return data


def _number(stream: BinaryIO, kind: str) -> Any:
    dtype = np.dtype(kind)
    return np.frombuffer(_take(stream, dtype.itemsize), dtype)[0].item()


def _string(stream: BinaryIO) -> str:
    return _take(stream, _number(stream, "<u8")).decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _number(stream, _SCALARS[kind])
    inner, count = struct.unpack("<IQ", _take(stream, 12))
    if inner in _SCALARS:
        dtype = np.dtype(_SCALARS[inner])
        return np.frombuffer(_take(stream, count * dtype.itemsize), dtype).tolist()
    return [_value(stream, inner) for _ in range(count)]


def _tensor(stream: BinaryIO) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = _string(stream)
    dimensions = struct.unpack("<I", _take(stream, 4))[0]
    sizes = struct.unpack(f"<{dimensions}Q", _take(stream, 8 * dimensions))
    kind, offset = struct.unpack("<IQ", _take(stream, 12))
    return name, tuple(reversed(sizes)), GGMLQuantizationType(kind), offset
