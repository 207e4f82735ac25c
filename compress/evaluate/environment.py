"""What a measurement was taken on."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import compress

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "compressed-tensors")


def versions() -> dict[str, str]:
    """Of Python, this tool and the packages that can change a number."""
    found = {"python": platform.python_version(), "compress-llm": compress.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores, threads that torch uses, memory, and the accelerator where one was used."""
    found = {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device != "cpu":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def commit() -> str | None:
    """The commit of the source tree that runs, with `+changes` where files differ from it; None for a package."""
    root = Path(compress.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
