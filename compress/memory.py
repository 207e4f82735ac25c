"""Peak memory of this process, as the kernel counts it."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """What is resident now."""
    return psutil.Process().memory_info().rss


def reset_peak() -> None:
    """Start counting the peak anew, where the system allows it (Linux)."""
    if _CLEAR_REFS.exists():
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:  # a container may forbid it; the peak is then that of the whole process
            return


def peak_bytes() -> int:
    """The largest resident size since `reset_peak`, or since the process began."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes() -> int:
    """What new allocations may take without swapping."""
    return psutil.virtual_memory().available
