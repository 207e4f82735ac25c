"""Token ids to text, as they come.

Text is made of whole characters: the bytes of a token are known, whatever the tokenizer, and go through an incremental
UTF-8 decoder. That costs the same for every token, needs no second decoding of a window, and gives U+FFFD only for
bytes that can no longer become a character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CONTEXT = 8  # tokens of the prompt that can matter to the next: more than the bytes of an unfinished character


class Pieces:
    """What each token id adds to a text, for a transformers tokenizer or a `tokenizers.Tokenizer`.

    Byte-level and sentencepiece-like decoders are read once and applied token by token. For any other, a token adds
    what it changes in the decoded text of the token before it and itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._backend = backend if hasattr(backend, "id_to_token") else None
        self._rules = None if self._backend is None else _decoding_rules(_decoders(self._backend))
        self._known: dict[int, bytes] = {}
        self.special = _special_ids(tokenizer, self._backend)

    def added(self, token: int, previous: int | None) -> bytes:
        """The bytes of a token after `previous`, the last one that is shown; None at the start of a text."""
        if self._rules is None:
            return self._difference(token, previous).encode()
        if previous is None:
            return self._rules(self._name(token), True)
        if token not in self._known:
            self._known[token] = self._rules(self._name(token), False)
        return self._known[token]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token inside a text; special tokens by their names, none for an id without a token."""
        if self._rules is not None:
            return self.added(token, token)
        return self._difference(token, None).encode()

    def token_text(self, token: int) -> str:
        """A token for a reader of log-probabilities: its text, `bytes:\\xe4\\xb8` where that is part of a character,
        `token_id:9` for an id without a token. So that different tokens do not look alike."""
        content = self.token_bytes(token)
        if not content and self._name(token) == "":
            return f"token_id:{token}"
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _name(self, token: int) -> str:
        if self._backend is not None:
            return self._backend.id_to_token(token) or ""
        return self._tokenizer.convert_ids_to_tokens(token) or ""

    def _difference(self, token: int, previous: int | None) -> str:
        decode = self._tokenizer.decode
        if previous is None:
            return decode([token], skip_special_tokens=False)
        before = decode([previous], skip_special_tokens=False)
        both = decode([previous, token], skip_special_tokens=False)
        return both[len(before) :] if both.startswith(before) else decode([token], skip_special_tokens=False)


def _special_ids(tokenizer: Any, backend: Any) -> frozenset[int]:
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(i for i, added in backend.get_added_tokens_decoder().items() if added.special)


def _decoders(backend: Any) -> list[dict[str, Any]]:
    """A tokenizer's decoders in order, as its tokenizer.json states them; empty where it has none."""
    if backend.decoder is None:
        return []
    flat: list[dict[str, Any]] = []
    todo = [json.loads(backend.decoder.__getstate__())]
    while todo:
        decoder = todo.pop(0)
        if decoder["type"] == "Sequence":
            todo = decoder["decoders"] + todo
        else:
            flat.append(decoder)
    return flat


_Rules = Callable[[str, bool], bytes]  # a token's name, and whether it begins the text → its bytes


def _decoding_rules(decoders: Sequence[dict[str, Any]]) -> _Rules | None:
    """One function for the decoders that work token by token; None where another is among them."""
    kinds = [decoder["type"] for decoder in decoders]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return _byte_level()
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    stripping = decoders[kinds.index("Strip") :] if "Strip" in kinds else []
    # before everything is fused, a strip would be of each token; at the end of a text it would need what follows
    if stripping and (len(stripping) > 1 or "Fuse" not in kinds or stripping[0]["stop"]):
        return None
    replaced = [(d["pattern"].get("String"), d["content"]) for d in decoders if d["type"] == "Replace"]
    if any(pattern is None for pattern, _ in replaced):
        return None
    return _sentencepiece(decoders, replaced, "ByteFallback" in kinds)


def _sentencepiece(decoders: Sequence[dict[str, Any]], replaced: list[tuple[str, str]], byte_tokens: bool) -> _Rules:
    strip = next((d for d in decoders if d["type"] == "Strip"), None)
    metaspace = next((d for d in decoders if d["type"] == "Metaspace"), None)

    def rules(name: str, first: bool) -> bytes:
        byte = BYTE_TOKEN.fullmatch(name) if byte_tokens else None
        if byte:
            content = bytes([int(byte[1], 16)])
        else:
            if metaspace:
                drop = first and metaspace.get("prepend_scheme") != "never"
                name = name.replace(metaspace["replacement"], "" if drop else " ")
            for pattern, content in replaced:
                name = name.replace(pattern, content)
            content = name.encode()
        if first and strip:
            for _ in range(strip["start"]):
                content = content.removeprefix(strip["content"].encode())
        return content

    return rules


def _byte_level() -> _Rules:
    """GPT-2's printable stand-ins for bytes: those that print stand for themselves, the others for 256, 257, …"""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    byte_of = {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def rules(name: str, first: bool) -> bytes:
        if all(char in byte_of for char in name):
            return bytes(byte_of[char] for char in name)
        return name.encode()  # an added token is its own text

    return rules


class TextStream:
    """The text of one request: `append` each token, `take` what may be shown, `finish` at the end.

    Held back are bytes that are not yet a character, and an end that could be the beginning of a stop string. The
    text, and where it stops, is the same however it is taken. A stop string is the first one that is complete, the
    longest of several that end there; the text before it stays, itself only with `include_stop`. Tokens before
    `min_tokens` are no part of a stop string.
    """

    def __init__(
        self,
        pieces: Pieces,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stopped_by: str | None = None
        self.offsets: list[int] = []  # of each token: characters of text that were complete before it
        self._pieces = pieces
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._skipped = pieces.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._previous: int | None = None
        self._length = 0  # characters decoded so far
        self._ready: list[str] = []  # may be shown
        self._held = ""  # the beginning of a stop string, perhaps
        self._prompt_open = False  # the prompt ends inside a character, which the first tokens may complete
        for token in [t for t in prompt[-CONTEXT:] if t not in self._skipped]:
            self._decode(token)
        self._prompt_open = bool(self._decoder.getstate()[0])
        if self._previous is None:
            self._previous = next((t for t in prompt if t not in self._skipped), None)

    def append(self, token: int) -> bool:
        """Add a token; whether a stop string is now complete. Tokens after that add nothing."""
        self.offsets.append(self._length)
        if self.stopped_by is None and token not in self._skipped:
            self._add(self._decode(token))
        return self.stopped_by is not None

    def end(self, token: int, show: bool) -> None:
        """Add the token that ends the text. It has a place in it, and is itself a part only where it is to `show`."""
        self.offsets.append(self._length)
        if self.stopped_by is None and show and token not in self._skipped:
            self._add(self._decode(token))

    def take(self) -> str:
        """What may be shown and was not taken before."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> None:
        """No token follows: what was held back is text after all, unfinished characters U+FFFD."""
        if self.stopped_by is None:
            self._add(self._whole(b"", final=True))
            self._ready.append(self._held)
            self._held = ""

    def _decode(self, token: int) -> str:
        content = self._pieces.added(token, self._previous)
        self._previous = token
        return self._whole(content)

    def _whole(self, content: bytes, final: bool = False) -> str:
        """The characters that these bytes complete. One that the prompt began and nothing completes is the prompt's."""
        text = self._decoder.decode(content, final)
        if text and self._prompt_open:
            self._prompt_open = False
            return text.removeprefix("\ufffd")
        return text

    def _add(self, text: str) -> None:
        self._length += len(text)
        if not self._stop or len(self.offsets) < self._min_tokens:
            self._ready.append(text)
            return
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped_by = min(found)
            self._ready.append(text[: end if self._include_stop else start])
            self._held = ""
            return
        keep = len(text) - max(_possible_start(text, stop) for stop in self._stop)
        self._ready.append(text[:keep])
        self._held = text[keep:]


def _possible_start(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
