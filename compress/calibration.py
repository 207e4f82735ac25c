"""Texts and chats to calibration sequences: seeded, hashed, ragged, every token accounted for.

There is no padding anywhere: sequences lie end to end in one flat tensor and attention runs per sequence, so no pad
token is needed and nothing masked can leak into a statistic. Long documents are cut, short ones packed or kept.

Which documents are taken depends on their content and the seed alone, not on the order of rows in a file: each has
the key BLAKE2b(seed, content), and the smallest keys are taken first.

T tokens of all sequences.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from compress.encoding import (
    TemplateRefusal,
    bos_of,
    encode_plain,
    encode_prompt,
    load_tokenizer,
    wants_bos,
    without_bos,
)
from compress.errors import UserError
from compress.heldout import (
    EvaluationText,
    evaluation_source,
    evaluation_windows,
    overlap,
    same_source,
    split_source,
)
from compress.passages import Packer, Passage, TokenSequence, by_key, passages, windows
from compress.texts import TextSource, read_texts

__all__ = [
    "Calibration",
    "CalibrationFacts",
    "EvaluationText",
    "calibrate_texts",
    "encode_prompt",
    "evaluation_source",
    "evaluation_windows",
    "overlap",
    "split_source",
    "wants_bos",
]

BATCH = 64  # passages tokenized at a time: enough to keep the tokenizer's threads busy, few to waste


@dataclass
class CalibrationFacts:
    """What was used, for the report. Sequences, documents and tokens are counts."""

    sources: list[dict[str, Any]]  # name, description, sha256, skipped (rows by reason), samples
    sha256: str  # of all ids, then all lengths, as int64 little-endian
    seed: int
    sequence_length: int
    requested: int  # sequences asked for
    samples: int  # sequences got
    tokens: int
    documents_read: int
    documents_used: int
    cut: int  # documents that lie in more than one sequence
    packed: int  # documents that share a sequence with another
    dropped: dict[str, int]  # passages that gave no sequence, by reason
    bos: str  # "one at start" or "none wanted"
    chat_template: bool  # whether it was used
    first_ids: list[list[int]]  # the first 8 ids of the first three sequences
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Calibration:
    ids_T: Tensor  # int64, sequences end to end
    lengths: tuple[int, ...]  # tokens of each sequence; they sum to T
    facts: CalibrationFacts


def calibrate_texts(
    data: Sequence[str],
    samples: int,
    sequence_length: int,
    seed: int,
    pack: bool | None,
    tokenizer_dir: Path,
    cache: Path | None = None,
    field: str | None = None,
    evaluation: str | None = None,
) -> Calibration:
    """Read `data` and take `samples` sequences of at most `sequence_length` tokens, in turn from each source.

    pack        join documents with EOS into full sequences; None does so for texts and keeps chats apart
    field       the field of the text, for sources that do not name it with #FIELD
    evaluation  the source that perplexity is measured on: where it is one of `data`, only the part that
                `split_source` gives to calibration is read
    Fewer sequences than asked for is a warning in the facts. Nothing usable raises UserError.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    sources = [read_texts(name, field, cache) for name in data]
    if evaluation is not None:
        sources = [split_source(s, "calibration") if same_source(s.name, evaluation) else s for s in sources]
    dropped: Counter[str] = Counter()
    streams = [_sequences(source, tokenizer, sequence_length, seed, pack, dropped) for source in sources]
    picked = list(islice(_in_turn(streams), samples))
    if not picked:
        counts = "; ".join(f"{s.name}: {s.description}, skipped {s.skipped or 0}" for s in sources)
        raise UserError(f"calibration data: no usable text ({counts or 'no source'}{_because(dropped)})")
    return _calibration(picked, sources, tokenizer, samples, sequence_length, seed, dropped)


def _because(dropped: Counter[str]) -> str:
    return f"; dropped {dict(dropped)}" if dropped else ""


def _in_turn(streams: list[Iterator[TokenSequence]]) -> Iterator[tuple[int, TokenSequence]]:
    """One sequence of each stream in turn, with the stream's number, until all are exhausted."""
    active = list(enumerate(streams))
    while active:
        for number, stream in list(active):
            sequence = next(stream, None)
            if sequence is None:
                active.remove((number, stream))
            else:
                yield number, sequence


def _sequences(
    source: TextSource, tokenizer: Any, size: int, seed: int, pack: bool | None, dropped: Counter[str]
) -> Iterator[TokenSequence]:
    """The sequences of one source, tokenized as they are asked for."""
    bos = bos_of(tokenizer)
    start = [] if bos is None else [bos]
    room = size - len(start)
    packer = Packer(room, tokenizer.eos_token_id)

    def started(sequence: TokenSequence) -> TokenSequence:
        return TokenSequence(start + sequence.ids, sequence.documents)

    for passage, encoded in _encoded(tokenizer, by_key(passages(source.documents, size), seed), dropped):
        ids = without_bos(encoded, bos)
        if not ids:
            dropped["no tokens"] += 1
        elif pack or (pack is None and isinstance(passage.content, str)):
            yield from map(started, packer.add(ids, passage.document))
        else:
            yield from (TokenSequence(start + part, (passage.document,)) for part in windows(ids, room))
    yield from map(started, packer.rest())


def _encoded(tokenizer: Any, ordered: list[Passage], dropped: Counter[str]) -> Iterator[tuple[Passage, list[int]]]:
    """Each passage with its ids; chats that the template refuses are counted in `dropped`."""
    for first in range(0, len(ordered), BATCH):
        batch = ordered[first : first + BATCH]
        try:
            encoded = encode_plain(tokenizer, [passage.content for passage in batch])
        except TemplateRefusal:
            for passage in batch:
                try:
                    yield passage, encode_plain(tokenizer, [passage.content])[0]
                except TemplateRefusal:
                    dropped["refused by the chat template"] += 1
            continue
        yield from zip(batch, encoded, strict=True)


def _calibration(
    picked: list[tuple[int, TokenSequence]],
    sources: list[TextSource],
    tokenizer: Any,
    requested: int,
    sequence_length: int,
    seed: int,
    dropped: Counter[str],
) -> Calibration:
    """Lay the sequences end to end and count."""
    lengths = tuple(len(sequence.ids) for _, sequence in picked)
    ids_T = numpy.fromiter(chain.from_iterable(sequence.ids for _, sequence in picked), "<i8", sum(lengths))
    uses = Counter((number, document) for number, sequence in picked for document in sequence.documents)
    shared = {(n, document) for n, sequence in picked if len(sequence.documents) > 1 for document in sequence.documents}
    per_source = Counter(number for number, _ in picked)
    facts = CalibrationFacts(
        sources=[source.facts() | {"samples": per_source[number]} for number, source in enumerate(sources)],
        sha256=hashlib.sha256(ids_T.tobytes() + numpy.array(lengths, "<i8").tobytes()).hexdigest(),
        seed=seed,
        sequence_length=sequence_length,
        requested=requested,
        samples=len(picked),
        tokens=len(ids_T),
        documents_read=sum(len(source.documents) for source in sources),
        documents_used=len(uses),
        cut=sum(count > 1 for count in uses.values()),
        packed=len(shared),
        dropped=dict(dropped),
        bos="one at start" if wants_bos(tokenizer) else "none wanted",
        chat_template=any(not isinstance(sources[n].documents[document], str) for n, document in uses),
        first_ids=[sequence.ids[:8] for _, sequence in picked[:3]],
        warnings=_warnings(len(picked), requested, len(ids_T), dropped),
    )
    return Calibration(torch.from_numpy(ids_T.astype(numpy.int64)), lengths, facts)


def _warnings(samples: int, requested: int, tokens: int, dropped: Counter[str]) -> list[str]:
    found = [f"{count} passages dropped: {reason}" for reason, count in dropped.items()]
    if samples < requested:
        found.append(f"{samples} of the {requested} samples asked for: the data holds no more ({tokens} tokens)")
    return found
