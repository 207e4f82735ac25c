"""Tiny models that can fail: wide initial weights, random norms and biases, a byte-level tokenizer.

At the default initializer_range 0.02 most faults change no token; at 0.3, with random norm weights and biases, a lost
bias, norm or rope scaling moves the logits visibly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BASE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}

UNIT_OFFSET = ("gemma2", "gemma3_text")  # their norms multiply by 1 + weight


def tiny_model(directory: Path, family: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Write a tiny checkpoint with its tokenizer to `directory`; `changes` override config keys."""
    max_shard_size = changes.pop("max_shard_size", "5GB")
    config = AutoConfig.for_model(family, **(BASE | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_((0 if family in UNIT_OFFSET else 1) + 0.3 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer(directory)
    return directory


def byte_tokenizer(directory: Path, **settings: Any) -> None:
    """A tokenizer with one token for each byte, written to `directory`; no merges, no padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(directory)


def write_texts(path: Path, count: int = 16, length: int = 200, seed: int = 0) -> Path:
    """A .jsonl of `count` pseudo-random texts of `length` characters, deterministic in `seed`."""
    generator = torch.Generator().manual_seed(seed)
    letters = "abcdefghijklmnopqrstuvwxyz .,ABC012"
    with path.open("w") as out:
        for _ in range(count):
            picks = torch.randint(len(letters), (length,), generator=generator).tolist()
            out.write(json.dumps({"text": "".join(letters[i] for i in picks)}) + "\n")
    return path
