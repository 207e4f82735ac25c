"""From texts and chats to token ids, with exactly one BOS where the model wants one.

Tokenizing happens in two threads of its own, one for what takes a moment and one for long texts: these hold up neither
the event loop nor short prompts. Each has its own tokenizer, which must not encode twice at once.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from compress.encoding import bos_of, encode_plain, encode_prompt, load_tokenizer, with_one_bos
from compress.errors import UserError
from compress.runtime.server.protocol import ChatPrompt
from compress.runtime.text import Pieces, TextStream
from compress.runtime.tokenizer import has_tokenizer

T = TypeVar("T")
QUICK = 1 << 16  # characters that are tokenized in a moment: a text that is too long is then told its tokens
LIMIT = 1 << 18  # characters of a text that need not fit the context, or ids; half a second of one core


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    truncated: int = 0  # tokens cut from its start
    text: str | None = None  # as it was sent; None where ids were


class Prompts:
    """The tokenizer of a checkpoint; without one, prompts are token ids and answers have no text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        # of the slow thread; made now, since copying holds the interpreter for a tenth of a second and more
        self._spare = copy.deepcopy(tokenizer)
        self._quick, self._slow = ThreadPoolExecutor(1, "tokenizer"), ThreadPoolExecutor(1, "tokenizer-long")
        self._tokens = 0 if tokenizer is None else len(tokenizer)
        self.pieces = None if tokenizer is None else Pieces(tokenizer)
        self._bos = None if tokenizer is None else bos_of(tokenizer)
        # characters: those of byte-level tokens stand for a byte each, so no token is longer than its name
        self._longest = 1 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def of(cls, path: Path) -> Prompts:
        return cls(load_tokenizer(path) if has_tokenizer(path) else None)

    async def _work(self, size: int, function: Callable[[Any], T]) -> T:
        """`function` of a tokenizer, in the thread that suits so many characters or ids."""
        events = asyncio.get_running_loop()
        if size <= QUICK:
            return await events.run_in_executor(self._quick, lambda: function(self._tokenizer))
        return await events.run_in_executor(self._slow, lambda: function(self._spare))

    async def text(self, text: str, add_special_tokens: bool, context: int, fits: bool = True) -> list[int]:
        """Token ids. Raises UserError, before others wait, for a text that cannot fit a `context` in tokens.

        Where it need not fit, for one that is beyond LIMIT besides.
        """
        self._needed("prompt")
        self._check_length("prompt", text, context, fits)
        if add_special_tokens:
            return await self._work(len(text), lambda tokenizer: encode_prompt(tokenizer, text))
        return await self._work(len(text), lambda tokenizer: _encode(tokenizer, text))

    async def chat(self, chat: ChatPrompt, context: int, fits: bool = True) -> list[int]:
        """Token ids of a chat in the model's template. Raises UserError as `text`."""
        tokenizer = self._needed("messages")
        template = tokenizer.chat_template
        if not template:
            raise UserError("messages: the checkpoint has no chat template; use /v1/completions")
        if chat.tools and "tools" not in str(template):
            raise UserError("tools: the checkpoint's chat template knows no tools; leave them out")
        text = await self._work(0, lambda tokenizer: render_chat(tokenizer, chat))
        self._check_length("messages", text, context, fits)
        # the template prints all that is special; the tokenizer adds nothing, least of all a second BOS
        return with_one_bos(await self._work(len(text), lambda tokenizer: _encode(tokenizer, text)), self._bos)

    async def decode(self, ids: list[int]) -> str:
        self._needed("tokens")
        if len(ids) > LIMIT:
            raise UserError(f"tokens: {len(ids)} ids; at most {LIMIT} are decoded at a time")
        for token in ids:
            if not 0 <= token < self._tokens:
                raise UserError(f"tokens: ids go from 0 to {self._tokens - 1}; {token} does not")
        return await self._work(len(ids), lambda tokenizer: tokenizer.decode(ids))

    async def names(self, ids: list[int]) -> list[str] | None:
        """Each token for a reader; None without a tokenizer."""
        pieces = self.pieces
        return None if pieces is None else await self._work(len(ids), lambda _: [pieces.token_text(i) for i in ids])

    def shown(self, ids: list[int]) -> tuple[str, list[int]]:
        """The text of a prompt that is echoed, and the character at which each id begins; "" without a tokenizer."""
        if self.pieces is None:
            return "", []
        stream = TextStream(self.pieces, skip_special_tokens=False)
        for token in ids:
            stream.append(token)
        stream.finish()
        return stream.take(), stream.offsets

    def _check_length(self, field: str, text: str, context: int, fits: bool) -> None:
        most = max(context * self._longest, QUICK if fits else LIMIT)
        if len(text) > most:
            limit = f"the context of {context} tokens can hold" if fits else f"{most}, the limit"
            raise UserError(f"{field}: {len(text)} characters are more than {limit}")

    def _needed(self, field: str) -> Any:
        if self._tokenizer is None:
            raise UserError(f"{field}: the checkpoint has no tokenizer; give prompts as token ids to /v1/completions")
        return self._tokenizer

    def close(self) -> None:
        for worker in (self._quick, self._slow):
            worker.shutdown(wait=False, cancel_futures=True)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return encode_plain(tokenizer, [text], add_special_tokens=False)[0]


def render_chat(tokenizer: Any, chat: ChatPrompt) -> str:
    """Raises UserError where the template refuses the chat."""
    from jinja2 import TemplateError

    messages = [message.plain for message in chat.messages]
    variables = chat.chat_template_kwargs or {}
    # `messages` is what the template calls the conversation
    taken = variables.keys() & {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
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
