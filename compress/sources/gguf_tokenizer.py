"""GGUF vocabulary → tokenizer.json, through transformers, corrected where transformers loses something."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import pre_tokenizers

from compress.errors import UserError
from compress.sources.gguf_header import GgufHeader
from compress.tensorfile import write_json

# How text is cut before merging. transformers rebuilds these from the GGUF by name...
_REBUILT = frozenset(
    ("gpt-2", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "tekken", "qwen2", "deepseek-r1-qwen")
)


def write_tokenizer(header: GgufHeader, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    Raises UserError for a way of cutting text that would be rebuilt wrongly.
    """
    from transformers import AutoTokenizer  # seconds to import: not for `import compress`

    cut = header.fields.get("tokenizer.ggml.pre")
    byte_level = header.fields.get("tokenizer.ggml.model") == "gpt2"
    if byte_level and cut is None:
        raise UserError(f"{header.path}: no tokenizer.ggml.pre, so its vocabulary is ambiguous; use a newer conversion")
    if byte_level and cut not in _REBUILT | {"smollm"}:
        known = ", ".join(sorted(_REBUILT | {"smollm"}))
        raise UserError(f"{header.path}: tokenizer.ggml.pre {cut!r} is not supported; supported: {known}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(header.path.parent), gguf_file=header.path.name)
    except Exception as error:  # the tokenizers library raises nothing narrower for an inconsistent vocabulary
        reason = str(error).split("\n")[0]
        raise UserError(f"{header.path}: its vocabulary does not make a tokenizer: {reason}") from error
    if byte_level and cut == "smollm":
        # ... except SmolLM's, whose digits stand alone: without this, "2024" becomes tokens the model never saw.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    template = header.fields.get("tokenizer.chat_template")
    if template and not tokenizer.chat_template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):  # how it was loaded here, not what it is
        content.pop(key, None)
    content["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    content["model_max_length"] = header.fields[f"{header.fields['general.architecture']}.context_length"]
    write_json(settings, content)
