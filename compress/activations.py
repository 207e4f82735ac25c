"""Activations of all calibration tokens, in a file that is mapped and, past a limit, not kept resident."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

RESIDENT_BYTES = 4 << 20  # a larger file's pages are given back after each use; the page cache may still hold them


class Activations:
    """float32 rows [T, width] in a memory-mapped file.

    Reads give aligned copies: a matrix product's last bits may depend on where its operands lie in memory.
    """

    def __init__(self, path: Path, rows: int, width: int, resident_bytes: int = RESIDENT_BYTES) -> None:
        self.path = path
        self.shape = (rows, width)
        self._row_bytes = 4 * width
        self._release = rows * self._row_bytes > resident_bytes
        size = max(rows * self._row_bytes, 1)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size, prot=mmap.PROT_READ)

    def __enter__(self) -> Activations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop as a fresh tensor [stop − start, width]."""
        rows = torch.empty(stop - start, self.shape[1])
        rows.numpy().reshape(-1)[:] = np.frombuffer(self._map, np.float32, rows.numel(), start * self._row_bytes)
        self._give_back(start, stop)
        return rows

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store `rows` [n, width] from row `start` on."""
        # Not through the map: the kernel then copies at once instead of faulting in page after page.
        left = rows.detach().to("cpu", torch.float32).contiguous().numpy().data.cast("B")
        offset = start * self._row_bytes
        while left:
            done = os.pwrite(self._file, left, offset)
            left, offset = left[done:], offset + done

    def flush(self) -> None:
        """On disk when this returns."""
        os.fsync(self._file)

    def close(self) -> None:
        self._map.close()
        os.close(self._file)

    def _give_back(self, start: int, stop: int) -> None:
        if not self._release:
            return
        # Whole pages only; a page shared with the neighbouring rows is simply read again.
        first = start * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(stop * self._row_bytes - first, len(self._map) - first)
        self._map.madvise(mmap.MADV_DONTNEED, first, length)
