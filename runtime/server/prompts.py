"""From texts and chats to token ids, with exactly one BOS where the model wants one.

Tokenizing happens in one thread of its own: a long text must not hold up the event loop, and a tokenizer must not
encode twice at once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from compress.encoding import bos_of, encode_plain, encode_prompt, load_tokenizer, with_one_bos
from compress.errors import UserError
from compress.runtime.server.protocol import ChatPrompt
from compress.runtime.text import Pieces, TextStream
from compress.runtime.tokenizer import has_tokenizer

T = TypeVar("T")
QUICK = 1 << 16  # characters that are tokenized in a moment: a text that is too long is then told its tokens


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    truncated: int = 0  # tokens cut from its start
    text: str | None = None  # as it was sent; None where ids were


class Prompts:
    """The tokenizer of a checkpoint; without one, prompts are token ids and answers have no text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._worker = ThreadPoolExecutor(1, "tokenizer")
        self.pieces = None if tokenizer is None else Pieces(tokenizer)
        self._bos = None if tokenizer is None else bos_of(tokenizer)
        # characters: those of byte-level tokens stand for a byte each, so no token is longer than its name
        self._longest = 1 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def of(cls, path: Path) -> Prompts:
        return cls(load_tokenizer(path) if has_tokenizer(path) else None)

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, partial(function, *arguments))

    async def text(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids. Raises UserError for a text that is too long for `most` tokens, before others wait for it."""
        tokenizer = self._needed("prompt")
        self._check_length("prompt", text, most)
        if add_special_tokens:
            return await self._work(encode_prompt, tokenizer, text)
        return (await self._work(partial(encode_plain, add_special_tokens=False), tokenizer, [text]))[0]

    async def chat(self, chat: ChatPrompt, most: int | None = None) -> list[int]:
        """Token ids of a chat in the model's template. Raises UserError as `text`."""
        tokenizer = self._needed("messages")
        template = tokenizer.chat_template
        if not template:
            raise UserError("messages: the checkpoint has no chat template; use /v1/completions")
        if chat.tools and "tools" not in str(template):
            raise UserError("tools: the checkpoint's chat template knows no tools; leave them out")
        return await self._work(self._encode_chat, chat, most)

    def _encode_chat(self, chat: ChatPrompt, most: int | None) -> list[int]:
        """The template prints all that is special; the tokenizer adds nothing, least of all a second BOS."""
        text = render_chat(self._tokenizer, chat)
        self._check_length("messages", text, most)
        ids = encode_plain(self._tokenizer, [text], add_special_tokens=False)[0]
        return with_one_bos(ids, self._bos)

    async def decode(self, ids: list[int]) -> str:
        tokenizer = self._needed("tokens")
        for token in ids:
            if not 0 <= token < len(tokenizer):
                raise UserError(f"tokens: ids go from 0 to {len(tokenizer) - 1}; {token} does not")
        return await self._work(tokenizer.decode, ids)

    def shown(self, ids: list[int]) -> tuple[str, list[int]]:
        """The text of a prompt that is echoed, and the character at which each id begins; "" without a tokenizer."""
        if self.pieces is None:
            return "", []
        stream = TextStream(self.pieces, skip_special_tokens=False)
        for token in ids:
            stream.append(token)
        stream.finish()
        return stream.take(), stream.offsets

    def _check_length(self, field: str, text: str, most: int | None) -> None:
        if most is not None and len(text) > max(most * self._longest, QUICK):
            raise UserError(f"{field}: {len(text)} characters are more than the context of {most} tokens can hold")

    def _needed(self, field: str) -> Any:
        if self._tokenizer is None:
            raise UserError(f"{field}: the checkpoint has no tokenizer; give prompts as token ids to /v1/completions")
        return self._tokenizer

    def close(self) -> None:
        self._worker.shutdown(wait=False)


def render_chat(tokenizer: Any, chat: ChatPrompt) -> str:
    """Raises UserError where the template refuses the chat."""
    from jinja2 import TemplateError

    messages = [message.plain for message in chat.messages]
    variables = chat.chat_template_kwargs or {}
    taken = variables.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    if taken:
        raise UserError(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set here")
    start_answer = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=chat.tools,
            tokenize=False,
            add_generation_prompt=start_answer,
            continue_final_message=bool(chat.continue_final_message),
            **variables,
        )
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        # a template is a program: what it trips over is in the chat
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"messages: the model's chat template refuses this chat: {reason}") from error


def truncate(ids: list[int], keep: int | None) -> tuple[list[int], int]:
    """The last `keep` ids, and how many were cut from the start."""
    if keep is None or len(ids) <= keep:
        return ids, 0
    return ids[-keep:], len(ids) - keep
