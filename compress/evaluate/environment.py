"""Where a measurement was made: hardware, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "scipy")


def hardware() -> dict[str, Any]:
    """Processor, cores, torch's threads, memory in bytes, GPUs by name."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _processor() -> str:
    """The model name that Linux gives, else the platform's."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of Python and of the packages that can change a figure."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def commit(directory: Path = Path(__file__).parent) -> str | None:
    """The git commit of this source tree; None for an installed copy, or where git is missing."""
    command = ["git", "-C", str(directory), "log", "-1", "--format=%H", "--", "."]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None
