"""Documents to passages in a seeded order, and token ids to sequences no longer than a size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from compress.texts import Document

LEAST = 16  # tokens; a tail shorter than this shares the tokens of the sequence before it
SPREAD = 32  # characters of a passage for each token of a sequence: some 8 sequences of English


@dataclass(frozen=True)
class Passage:
    """A chat, a text, or one part of a long text. `document` and `part` count from 0."""

    document: int
    part: int
    content: Document


@dataclass(frozen=True)
class TokenSequence:
    ids: list[int]
    documents: tuple[int, ...]  # whose tokens it holds, in order


def passages(documents: Sequence[Document], sequence_length: int) -> Iterator[Passage]:
    """Each document whole, but a text longer than SPREAD · sequence_length characters in parts of at most that.

    Parts end before white space where there is any, and their concatenation is the text. So a few sequences from all
    over a book can be drawn without tokenizing the book.
    """
    longest = SPREAD * sequence_length
    for number, document in enumerate(documents):
        parts = _parts(document, longest) if isinstance(document, str) else [document]
        yield from (Passage(number, part, content) for part, content in enumerate(parts))


def _parts(text: str, longest: int) -> Iterator[str]:
    start = 0
    while len(text) - start > longest:
        end = start + longest
        breaks = [text.rfind(space, start + longest // 2, end) for space in ("\n", " ")]
        end = next((found for found in breaks if found > 0), end)
        yield text[start:end]
        start = end
    yield text[start:]


def content_key(content: Document, seed: int, purpose: bytes = b"order") -> bytes:
    """BLAKE2b of the content under the seed: the same on every platform and in every run."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, key=str(seed).encode(), person=purpose).digest()


def by_key(items: Iterable[Passage], seed: int, purpose: bytes = b"order") -> list[Passage]:
    """In the order of their keys. Equal contents have equal keys, so the order of the rows does not show."""
    return sorted(items, key=lambda passage: content_key(passage.content, seed, purpose))


def windows(ids: list[int], size: int) -> Iterator[list[int]]:
    """Cut into runs of `size`. A tail shorter than LEAST splits what it and the run before it hold evenly."""
    start = 0
    while len(ids) - start > size:
        left = len(ids) - start
        step = size if left >= size + min(LEAST, size) or left >= 2 * size else (left + 1) // 2
        yield ids[start : start + step]
        start += step
    if start < len(ids):
        yield ids[start:]


@dataclass
class Packer:
    """Joins documents with EOS and cuts the stream into sequences of exactly `size` tokens, but for its end."""

    size: int
    eos: int | None
    _ids: list[int] = field(default_factory=list)
    _owners: list[int] = field(default_factory=list)  # the document of each token

    def add(self, ids: list[int], document: int) -> Iterator[TokenSequence]:
        """Take the ids of one document; yield the sequences that are full."""
        if self._ids and self.eos is not None and self._ids[-1] != self.eos:
            self._ids.append(self.eos)
            self._owners.append(self._owners[-1])
        self._ids += ids
        self._owners += [document] * len(ids)
        while len(self._ids) >= self.size + LEAST:  # what stays behind is never too short for the last sequence
            yield self._take(self.size)

    def rest(self) -> Iterator[TokenSequence]:
        """The last sequences, of what no full sequence took."""
        for part in list(windows(self._ids, self.size)):
            yield self._take(len(part))

    def _take(self, count: int) -> TokenSequence:
        taken = TokenSequence(self._ids[:count], tuple(dict.fromkeys(self._owners[:count])))
        del self._ids[:count], self._owners[:count]
        return taken
