"""Text sources: every row is a document, a counted skip, or one line of error."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from compress import texts
from compress.errors import UserError
from compress.texts import read_texts

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def _jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_jsonl_texts_and_chats_in_order(tmp_path: Path) -> None:
    source = _jsonl(tmp_path / "d.jsonl", {"text": "one"}, {"messages": CHAT}, "", {"text": "  "}, {"text": None})
    got = read_texts(source)
    assert got.documents == ["one", CHAT]
    assert got.skipped == {"empty": 3}
    assert got.sha256 == hashlib.sha256(Path(source).read_bytes()).hexdigest()
    assert got.description == "jsonl, 1 texts and 1 chats"


def test_a_row_with_both_is_a_chat(tmp_path: Path) -> None:
    assert read_texts(_jsonl(tmp_path / "d.jsonl", {"text": "flat", "messages": CHAT})).documents == [CHAT]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "response": "b"}, ["line 2", "fields present: prompt, response"]),
        ("{oops", ["line 2", "not JSON"]),
        ([1, 2], ["line 2", "expected an object"]),
        ({"text": 3}, ["line 2", "neither a text"]),
        ({"messages": [{"role": "user"}]}, ["line 2", "role, content"]),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, row: object, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        read_texts(_jsonl(tmp_path / "d.jsonl", {"text": "fine"}, row))
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_field_from_the_argument_and_from_the_source(tmp_path: Path) -> None:
    source = _jsonl(tmp_path / "d.jsonl", {"body": "b", "steps": ["first", "then"], "text": "t"})
    assert read_texts(source, field="body").documents == ["b"]
    assert read_texts(f"{source}#steps", field="body").documents == ["first\nthen"]
    with pytest.raises(UserError, match="no field 'bodi'; did you mean 'body'"):
        read_texts(f"{source}#bodi")


def test_json_object_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"A": {"extract": "a"}, "B": {"extract": "b"}}))
    assert read_texts(f"{path}#extract").documents == ["a", "b"]
    path.write_text(json.dumps([{"text": "x"}, {"title": "y"}]))
    with pytest.raises(UserError, match="entry 1: neither messages nor text; fields present: title"):
        read_texts(str(path))


def test_plain_text_is_one_document_unless_form_feeds(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a\n\nb")
    assert read_texts(str(path)).documents == ["a\n\nb"]
    path.write_text("a\n\fb\f\n")
    assert read_texts(str(path)).documents == ["a\n", "b"]
    assert read_texts(str(path)).skipped == {"empty": 1}
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read_texts(str(path))


def test_parquet_text_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["a", None, "c"]}), path)
    assert read_texts(str(path)).documents == ["a", "c"]
    assert read_texts(str(path)).skipped == {"empty": 1}
    pyarrow.parquet.write_table(pyarrow.table({"messages": [CHAT, CHAT]}), path)
    assert read_texts(str(path)).documents == [CHAT, CHAT]
    with pytest.raises(UserError, match=r"did you mean 'messages'\?; columns present: messages"):
        read_texts(f"{path}#message")
    path.write_bytes(b"not parquet")
    with pytest.raises(UserError, match="not a parquet file"):
        read_texts(str(path))


def test_wheel_python_file_gives_its_long_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "text.py"
    module.write_text(f"raise SystemExit\nBOOK = Book({'word ' * 300!r}, short='no')\n")
    asked = []
    monkeypatch.setattr(texts.sources, "fetch", lambda uri, cache: asked.append(uri) or module)
    assert read_texts("wheel://words==1.0/words/text.py#x").documents == ["word " * 300]
    assert asked == ["wheel://words==1.0/words/text.py"]


@pytest.mark.parametrize("source", ["absent.jsonl", "absent", "a:b:c:d", ":train"])
def test_missing_or_unknown_sources(source: str) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_texts(source)


def test_unknown_suffix_names_the_accepted(tmp_path: Path) -> None:
    (tmp_path / "d.docx").write_text("x")
    with pytest.raises(UserError, match=r"unknown kind of file; accepted: \.jsonl"):
        read_texts(str(tmp_path / "d.docx"))
    with pytest.raises(UserError, match="unknown kind of file"):
        read_texts(str(tmp_path))


def test_hub_offline_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for source in ("nobody/nothing:train", "wikitext:wikitext-2-raw-v1:test"):
        with pytest.raises(UserError, match="not cached") as error:
            read_texts(source, cache=tmp_path)
        assert "\n" not in str(error.value)


def test_hub_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        read_texts("wikitext:test")


def test_hub_rows_are_read_and_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": ["a", "", "c"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split, cache_dir: table)
    got = read_texts("some/set:train")
    assert got.documents == ["a", "c"]
    assert got.skipped == {"empty": 1}
    rows = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in ("a", "", "c"))
    assert got.sha256 == hashlib.sha256(rows).hexdigest()
    with pytest.raises(UserError, match="columns present: id, text"):
        read_texts("some/set:train#body")


def test_local_data_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 39."""

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # importing it would raise
    assert read_texts(_jsonl(tmp_path / "d.jsonl", {"text": "one"})).documents == ["one"]
