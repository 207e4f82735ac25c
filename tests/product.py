"""Running the product as a user does: a recipe, the command line, and what stands in the output directory."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from compress.cli import main
from tests.tiny import tiny_model, write_texts


def run_cli(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `compress ARGUMENTS`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["compress", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def write_recipe(place: Path, model: object, evaluate: bool = False, **quantize: Any) -> Path:
    """A recipe beside its texts in `place`; the result goes to place/out."""
    place.mkdir(parents=True, exist_ok=True)
    data = place / "texts.jsonl"
    if not data.exists():
        write_texts(data, 16)
    recipe: dict[str, Any] = {
        "model": str(model),
        "output": str(place / "out"),
        "calibration": {"data": str(data), "samples": 24, "sequence_length": 64},
        "stages": [{"quantize": {"method": "gptq", "bits": 4, "group_size": 32} | quantize}],
    }
    if evaluate:
        prose = write_texts(place / "prose.jsonl", 8, seed=9)
        speed = {"batch": [1], "prompt": 8, "output": 4, "rounds": 2, "seconds": 5}
        recipe["evaluate"] = {"text": str(prose), "window": 64, "tokens": 512, "speed": speed}
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def compressed(place: Path, family: str = "llama", model: dict[str, Any] | None = None, **quantize: Any) -> Path:
    """A tiny model of `family`, quantized by the command line; the output directory. The source is place/model."""
    # Qwen's tokenizer class adds a special token to the 256 bytes.
    vocabulary: dict[str, Any] = {"vocab_size": 272} if family.startswith("qwen") else {}
    source = tiny_model(place / "model", family, **(vocabulary | (model or {})))
    code, _, err = run_cli("run", write_recipe(place, source, **quantize))
    assert code == 0, err
    return place / "out"


def report_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "report.json").read_text())


def token_ids(length: int = 48, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))
