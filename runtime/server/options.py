"""What the server is called, and where its limits lie."""

from __future__ import annotations

from dataclasses import dataclass

from compress.errors import UserError

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Options:
    names: tuple[str, ...]  # what clients may call the model; the first is the one that answers bear
    max_model_len: int  # tokens of a prompt and its answer
    api_key: str | None = None
    max_body_bytes: int = 4 * MEBIBYTE
    max_n: int = 128  # answers to one prompt
    max_queue: int = 256  # choices that may wait beside those that run
    max_logprobs: int = 20  # likeliest tokens beside each token
    drain_seconds: float = 30.0  # how long running requests may go on once the server is told to stop


def check_key(key: str | None) -> str | None:
    """A key that a client can send. Raises UserError, without the key, for one that leaves the server open or shut."""
    if key is None:
        return None
    if not key:
        raise UserError("--api-key: the key is empty; leave the option out for a server that asks for none")
    if key != key.strip() or not key.isprintable():
        raise UserError("--api-key: the key begins or ends with white space, or has control characters")
    return key
