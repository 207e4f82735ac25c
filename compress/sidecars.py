"""The files beside the weights (tokenizer, generation config, chat template, code, licence): copied byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

WEIGHT_SUFFIXES = frozenset(
    (
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".ggml",
        ".onnx",
        ".h5",
        ".msgpack",
        ".ot",
        ".tflite",
        ".npz",
    )
)
OWN_FILES = frozenset(("config.json", "README.md"))  # a compressed model has its own


def sidecars(source: Path) -> list[Path]:
    """Paths, relative to `source`, of every file that travels with the model unchanged.

    Left out: weights and their indexes, config.json and README.md, hidden files and caches, and subdirectories with
    weights in them (original/, onnx/, a draft): those are other models.
    """
    return sorted(file.relative_to(source) for file in _walk(source))


def copy_sidecars(source: Path, target: Path) -> None:
    """Copy the sidecars of `source` into `target`; links are followed, modes are the default ones."""
    for relative in sidecars(source):
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target / relative)


def _walk(source: Path) -> list[Path]:
    found: list[Path] = []
    for entry in source.iterdir():
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            inside = [file for file in entry.rglob("*") if file.is_file()]
            if not any(_is_weight(file) for file in inside):
                hidden = [f for f in inside if any(p.startswith(".") for p in f.relative_to(entry).parts)]
                found += [file for file in inside if file not in hidden and "__pycache__" not in file.parts]
        elif entry.is_file() and not _is_weight(entry) and entry.name not in OWN_FILES:
            found.append(entry)
    return found


def _is_weight(file: Path) -> bool:
    return file.suffix.lower() in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
