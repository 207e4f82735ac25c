"""The text that perplexity and KL are measured on: held apart from calibration, cut into disjoint full windows.

N windows, W tokens of a window (BOS included).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from torch import Tensor

from compress.encoding import bos_of, encode_plain, load_tokenizer, without_bos
from compress.errors import UserError
from compress.passages import Passage, by_key, content_key, passages
from compress.texts import TextSource, read_texts, split_field

if TYPE_CHECKING:
    from compress.calibration import Calibration

Part = Literal["calibration", "evaluation"]

FEW = 32  # documents; a source of fewer is split inside its texts
SEPARATOR = "\n\n"  # between texts, as in the published WikiText perplexities; EOS would put the chat's end into prose
BATCH = 64  # passages tokenized at a time
GRAM = 13  # tokens; the length that GPT-3's contamination study used (arXiv 2005.14165, appendix C)
CHUNK = 1 << 22  # n-grams hashed at a time: 32 MiB


@dataclass
class EvaluationFacts:
    """What is measured on. Two results compare only where these agree."""

    source: dict[str, Any]  # name, description, sha256, skipped
    sha256: str  # of the ids, int64 little-endian, row by row
    seed: int
    window: int  # tokens, BOS included
    stride: int  # text tokens from one window to the next
    windows: int
    tokens: int  # text tokens in all windows
    predicted: int  # tokens that have a token before them in their window
    documents: int  # documents that a window starts in
    bos: str  # "one at start" or "none wanted"
    sampled: bool  # whether windows were drawn, the text holding more than max_tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EvaluationText:
    ids_NW: Tensor  # int64
    documents: list[int]  # which document each window starts in
    sha256: str
    facts: EvaluationFacts

    @property
    def ids(self) -> Tensor:
        return self.ids_NW


def same_source(one: str, other: str) -> bool:
    """Whether two names mean the same file or dataset. Fields do not tell them apart: one may name the default."""
    a, b = split_field(one)[0], split_field(other)[0]
    paths = [Path(name).expanduser() for name in (a, b)]
    return a == b or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


def evaluation_source(
    text: str, calibration_data: Sequence[str], field: str | None = None, cache: Path | None = None
) -> TextSource:
    """Read the evaluation text, and only its held-apart part where calibration reads the same source."""
    source = read_texts(text, field, cache)
    return split_source(source, "evaluation") if any(same_source(text, data) for data in calibration_data) else source


def split_source(source: TextSource, part: Part) -> TextSource:
    """One of two disjoint parts of a source.

    FEW documents or more: each belongs to one part by the parity of its content's hash, so equal documents stay
    together. Fewer: the first three quarters of each text calibrate, the last quarter evaluates; chats go by parity.
    """
    evaluation = part == "evaluation"
    by_position = len(source.documents) < FEW
    kept = []
    for document in source.documents:
        if by_position and isinstance(document, str):
            near = len(document) * 3 // 4
            border = document.find(" ", near) if " " in document[near:] else near
            kept.append(document[border:] if evaluation else document[:border])
        elif (content_key(document, 0, b"held apart")[0] % 2 == 1) == evaluation:
            kept.append(document)
    kept = [document for document in kept if not isinstance(document, str) or document.strip()]
    if not kept:
        raise UserError(f"data {source.name!r}: too small to hold evaluation apart from calibration; name another text")
    how = "by position" if by_position else "by document"
    return replace(source, documents=kept, description=f"{source.description}; {part} part, held apart {how}")


def evaluation_windows(
    source: TextSource, tokenizer_dir: Path, window: int, max_tokens: int | None = None, seed: int = 0
) -> EvaluationText:
    """Disjoint windows of exactly `window` tokens, in the order of the text, each starting with BOS where wanted.

    Texts are joined by an empty line, and a last window that is not full is left out. Where the text holds more than
    `max_tokens`, passages are drawn by seed and then put back in order. Raises UserError for less than one window.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    bos = bos_of(tokenizer)
    stride = window - (bos is not None)
    everything = list(passages(source.documents, window))
    # One window at least, whatever is asked for.
    drawn = _draw(everything, tokenizer, bos, None if max_tokens is None else max(max_tokens, stride), seed)
    ids, owners = _stream(drawn, tokenizer, bos)
    count = len(ids) // stride if max_tokens is None else min(len(ids) // stride, max(1, max_tokens // stride))
    if count == 0:
        raise UserError(
            f"evaluation text {source.name!r}: {len(ids)} tokens, less than one window of {window}; "
            "give a longer text or a smaller window"
        )
    ids_NW = ids[: count * stride].reshape(count, stride)
    if bos is not None:
        ids_NW = numpy.concatenate([numpy.full((count, 1), bos, "<i8"), ids_NW], axis=1)
    starts = owners[: count * stride : stride].tolist()
    digest = hashlib.sha256(ids_NW.tobytes()).hexdigest()
    facts = EvaluationFacts(
        source=source.facts(),
        sha256=digest,
        seed=seed,
        window=window,
        stride=stride,
        windows=count,
        tokens=count * stride,
        predicted=count * (window - 1),
        documents=len(set(starts)),
        bos="none wanted" if bos is None else "one at start",
        sampled=len(drawn) < len(everything) or count < len(ids) // stride,
    )
    return EvaluationText(torch.from_numpy(ids_NW.astype(numpy.int64)), starts, digest, facts)


def _draw(
    everything: list[Passage], tokenizer: Any, bos: int | None, max_tokens: int | None, seed: int
) -> list[Passage]:
    """All passages, or as many as hold `max_tokens`, drawn by seed and content; in the order of the text."""
    if max_tokens is None:
        return everything
    drawn: list[Passage] = []
    tokens = 0
    for passage, ids in _encoded(tokenizer, by_key(everything, seed, b"evaluation"), bos):
        if tokens >= max_tokens:
            break
        drawn.append(passage)
        tokens += len(ids)
    return sorted(drawn, key=lambda passage: (passage.document, passage.part))


def _stream(drawn: list[Passage], tokenizer: Any, bos: int | None) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The ids of all passages end to end, and the document of each."""
    following = [*((after.document, after.part) for after in drawn[1:]), None]
    joined = [
        replace(passage, content=passage.content + SEPARATOR)
        if isinstance(passage.content, str) and after is not None and after != (passage.document, passage.part + 1)
        else passage
        for passage, after in zip(drawn, following, strict=True)
    ]
    encoded = [(passage.document, numpy.array(ids, "<i8")) for passage, ids in _encoded(tokenizer, joined, bos)]
    ids = numpy.concatenate([numpy.empty(0, "<i8"), *(ids for _, ids in encoded)])
    owners = numpy.repeat([document for document, _ in encoded], [len(ids) for _, ids in encoded])
    return ids, owners.astype(numpy.int64)


def _encoded(tokenizer: Any, ordered: list[Passage], bos: int | None) -> Iterator[tuple[Passage, list[int]]]:
    for first in range(0, len(ordered), BATCH):
        batch = ordered[first : first + BATCH]
        contents = [passage.content for passage in batch]
        encoded = encode_plain(tokenizer, contents, add_special_tokens=False)
        yield from ((passage, without_bos(ids, bos)) for passage, ids in zip(batch, encoded, strict=True))


def overlap(calibration: Calibration, evaluation: EvaluationText) -> float:
    """The share of the evaluation's runs of GRAM tokens that also occur in a calibration sequence.

    Runs lie inside one window or sequence and leave its BOS out. Hashes of 64 bits are compared, CHUNK at a time.
    """
    bos = evaluation.facts.bos == "one at start"
    count, window = evaluation.ids_NW.shape
    wanted = _grams(evaluation.ids_NW.numpy().reshape(-1), [window] * count, bos)
    known = _grams(calibration.ids_T.numpy(), calibration.lengths, bos)
    if not len(wanted) or not len(known):
        return 0.0
    found = numpy.zeros(len(wanted), bool)
    for first in range(0, len(known), CHUNK):
        chunk = numpy.sort(known[first : first + CHUNK])
        place = numpy.searchsorted(chunk, wanted).clip(max=len(chunk) - 1)
        found |= chunk[place] == wanted
    return float(found.mean())


def _grams(ids: numpy.ndarray, lengths: Sequence[int], bos: bool) -> numpy.ndarray:
    """uint64 hashes of all runs of GRAM ids that lie inside one sequence."""
    ends = numpy.cumsum(lengths)
    begins = ends - numpy.asarray(lengths)
    inside = numpy.ones(len(ids), bool)  # whether a run may start here
    for back in range(1, GRAM):
        inside[numpy.maximum(ends - back, begins)] = False
    if bos:
        inside[begins] = False
    starts = numpy.flatnonzero(inside[: max(0, len(ids) - GRAM + 1)])
    hashes = numpy.empty(len(starts), numpy.uint64)
    unsigned = ids.astype(numpy.uint64) + numpy.uint64(1)
    for first in range(0, len(starts), CHUNK):
        here = starts[first : first + CHUNK]
        hashed = numpy.zeros(len(here), numpy.uint64)
        for step in range(GRAM):
            hashed = (hashed ^ unsigned[here + step]) * numpy.uint64(0x9E3779B97F4A7C15)
            hashed ^= hashed >> numpy.uint64(29)
        hashes[first : first + CHUNK] = hashed
    return hashes
