"""Text and chats to token ids, with exactly one BOS where the model wants one.

The one place that decides about BOS: calibration, evaluation and the server all encode through here, so the three see
the same ids. Two BOS (the tokenizer adds one, the chat template prints another) cost about as much as a bad
quantization; a missing one can cost far more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.checkpoint import read_object
from compress.errors import UserError
from compress.texts import Document, Message


class TemplateRefusal(UserError):
    """The chat template raised an error on this chat: unknown role, roles that do not alternate, ..."""


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory, from its files alone. Raises UserError where there is none."""
    from transformers import AutoTokenizer

    config = directory / "tokenizer_config.json"
    stated = {file.name: read_object(file) for file in (directory / "tokenizer.json", config) if file.is_file()}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        if "tokenizer.json" not in stated:
            raise UserError(f"{directory}: no usable tokenizer; expected tokenizer.json") from error
        tokenizer = _from_tokenizer_json(directory)  # an architecture that transformers does not know
    if config.name in stated:  # transformers 5 forgets add_bos_token where there is a tokenizer.json
        tokenizer.init_kwargs["add_bos_token"] = stated[config.name].get("add_bos_token")
    return tokenizer


def _from_tokenizer_json(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        reason = " ".join(str(error).split())
        raise UserError(f"{directory / 'tokenizer.json'}: not a usable tokenizer: {reason}") from error


def wants_bos(tokenizer: Any) -> bool:
    """Whether a sequence of this model starts with BOS: its tokenizer adds one, or its add_bos_token is true.

    Expects a tokenizer of `load_tokenizer`, which reads add_bos_token.
    A chat template that prints BOS speaks for chats alone, and does so by itself.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return False
    return tokenizer("a")["input_ids"][:1] == [bos] or tokenizer.init_kwargs.get("add_bos_token") is True


def with_one_bos(ids: list[int], bos: int | None) -> list[int]:
    """`ids` with exactly one `bos` at its start; unchanged where `bos` is None (the model wants none)."""
    if bos is None:
        return ids
    return [bos, *without_bos(ids, bos)]


def without_bos(ids: list[int], bos: int | None) -> list[int]:
    """`ids` without the `bos` tokens at its start; unchanged where `bos` is None."""
    start = 0
    while bos is not None and start < len(ids) and ids[start] == bos:
        start += 1
    return ids[start:]


def bos_of(tokenizer: Any) -> int | None:
    """The id that each sequence starts with, or None where the model wants none."""
    return tokenizer.bos_token_id if wants_bos(tokenizer) else None


def encode_prompt(tokenizer: Any, prompt: Document, add_generation_prompt: bool = False) -> list[int]:
    """The ids of one text or chat. A chat is rendered by the model's template, which then says all that is special.

    Raises UserError for a chat where the tokenizer has no template, or where the template refuses the chat.
    """
    return with_one_bos(encode_plain(tokenizer, [prompt], add_generation_prompt)[0], bos_of(tokenizer))


def encode_plain(
    tokenizer: Any, prompts: Sequence[Document], add_generation_prompt: bool = False, add_special_tokens: bool = True
) -> list[list[int]]:
    """The ids of each text or chat as tokenizer and template give them, in one parallel call for each kind.

    `add_special_tokens` speaks of texts; in a chat, the template has printed all that is special.
    """
    encoded: dict[int, list[int]] = {}
    for chat in (False, True):
        picked = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) != chat]
        if not picked:
            continue
        texts = [_paired(render(tokenizer, prompts[i], add_generation_prompt)) for i in picked]
        special = add_special_tokens and not chat
        ids = tokenizer(texts, add_special_tokens=special, truncation=False, verbose=False)["input_ids"]
        encoded.update(zip(picked, ids, strict=True))
    return [encoded[i] for i in range(len(prompts))]


def _paired(text: str) -> str:
    """Half a surrogate pair (JSON may hold one) is no character, and tokenizers refuse it: U+FFFD stands in for it."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def render(tokenizer: Any, prompt: Document, add_generation_prompt: bool = False) -> str:
    """A text as it is; a chat through the chat template."""
    if isinstance(prompt, str):
        return prompt
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError(
            "the data holds chats, but the model has no chat template: put chat_template.jinja beside its "
            "tokenizer.json, or give texts in a field `text`"
        )
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise TemplateRefusal(f"the model's chat template refuses a chat of roles {_roles(prompt)}: {error}") from error


def _roles(chat: list[Message]) -> str:
    return ", ".join(str(message["role"]) for message in chat[:6])
