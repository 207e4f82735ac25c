"""A model that says what it is told to: every token has one successor, whatever came before.

Embeddings are one-hot, attention and MLP add nothing, and the head's row of succ(t) is the embedding of t. So text,
stop strings and characters of several bytes need no trained model.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.tiny import BASE, byte_tokenizer

VOCABULARY = 256
CERTAIN = 10.0  # logits of 160 against 0: sampling picks it too


def successor_model(directory: Path, chain: bytes, eos: int | list[int] = 255, then: int = 255) -> Path:
    """After the first byte of `chain` come the others, in order, then token `then`. No byte may occur twice."""
    assert len(set(chain)) == len(chain)
    byte_tokenizer(directory)
    ids = [byte_id(directory, byte) for byte in chain] + [then]
    config = LlamaConfig(**(BASE | {"hidden_size": VOCABULARY, "eos_token_id": eos, "num_hidden_layers": 1}))
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        block = model.model.layers[0]
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, successor in pairwise(ids):
            model.lm_head.weight[successor, token] = CERTAIN
    model.save_pretrained(directory)
    return directory


def byte_id(directory: Path, byte: int) -> int:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return next(token for token in range(VOCABULARY) if tokenizer.convert_ids_to_tokens(token) == _alphabet()[byte])


def _alphabet() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
