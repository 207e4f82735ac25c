"""The tokenizer that a checkpoint brings, and the ids that end its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.checkpoint import read_config, read_object
from compress.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(path: Path) -> Any:
    """Raises UserError for a checkpoint without one."""
    # imported here: it takes seconds, and prompts may be token ids
    from transformers import AutoTokenizer

    if not has_tokenizer(path):
        raise UserError(f"{path}: no tokenizer ({', '.join(TOKENIZER_FILES)}); give prompts as token ids")
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def read_eos_ids(path: Path) -> frozenset[int]:
    """The union of eos_token_id, a number or a list, in config.json and generation_config.json.

    Raises UserError for a file that is damaged, or an id that is no number.
    """
    sources = {path / "config.json": read_config(path)}
    if (path / "generation_config.json").is_file():
        sources[path / "generation_config.json"] = read_object(path / "generation_config.json")
    ids: set[int] = set()
    for file, source in sources.items():
        value = source.get("eos_token_id")
        stated = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in stated):
            raise UserError(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}")
        ids.update(stated)
    return frozenset(ids)
