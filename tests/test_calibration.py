"""Calibration sequences and evaluation windows: exact token counts, one BOS, seeded, disjoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from compress import calibration
from compress.calibration import (
    Calibration,
    calibrate_texts,
    encode_prompt,
    evaluation_source,
    evaluation_windows,
    overlap,
    split_source,
    wants_bos,
)
from compress.encoding import encode_plain, load_tokenizer
from compress.errors import UserError
from compress.passages import passages, windows
from compress.texts import TextSource, read_texts
from tests.tiny import byte_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
LETTERS = "abcdefghijklmnopqrstuvwxyz ABC012"


def _tokenizer(directory: Path, post: bool = False, template: str | None = None, eos: bool = True) -> Path:
    """One token for each byte, `<s>` as BOS and `</s>` as EOS; `post` adds a post-processor that prepends BOS."""
    byte_tokenizer(directory, bos_token="<s>", **({"eos_token": "</s>"} if eos else {}))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    if post:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


_load = load_tokenizer


def _texts(path: Path, lengths: list[int], seed: int = 0) -> str:
    """A .jsonl of random texts of the given numbers of characters, so of tokens."""
    draw = random.Random(seed)
    rows = [{"text": "".join(draw.choice(LETTERS[:26]) for _ in range(length))} for length in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _sequences(calibration: Calibration) -> list[list[int]]:
    return [part.tolist() for part in calibration.ids_T.split(list(calibration.lengths))]


def test_ragged_without_a_pad_token(tmp_path: Path) -> None:
    """Row 3: 12 samples of 5 to 60 tokens, no pad token; nothing is added to any."""
    lengths = [5 * (i + 1) for i in range(12)]
    data = _texts(tmp_path / "d.jsonl", lengths)
    byte_tokenizer(tmp_path / "t")
    assert _load(tmp_path / "t").pad_token_id is None
    got = calibrate_texts([data], 12, 128, 0, False, tmp_path / "t")
    assert sorted(got.lengths) == lengths
    assert got.ids_T.shape == (sum(lengths),)
    assert got.ids_T.dtype == torch.int64
    decoded = sorted(_load(tmp_path / "t").decode(ids) for ids in _sequences(got))
    assert decoded == sorted(read_texts(data).documents)


@pytest.mark.parametrize("pack", [False, True])
def test_long_texts_are_cut_and_nothing_is_dropped(tmp_path: Path, pack: bool) -> None:
    """Row 4: 4 texts of 700 and 4 of 20 tokens at 128."""
    data = _texts(tmp_path / "d.jsonl", [700] * 4 + [20] * 4)
    got = calibrate_texts([data], 1000, 128, 0, pack, _tokenizer(tmp_path / "t"))
    assert got.facts.dropped == {}
    assert got.facts.documents_used == 8
    assert got.facts.cut >= 4
    assert sum(got.lengths) == got.facts.tokens == 4 * 700 + 4 * 20 + (7 if pack else 0)  # 7 EOS between 8
    if pack:
        assert got.lengths == (128,) * 22 + (71,)
        assert got.ids_T.eq(_load(tmp_path / "t").eos_token_id).sum() == 7
    else:
        assert sorted(got.lengths) == [20] * 4 + [60] * 4 + [128] * 20
    assert got.facts.warnings == [
        f"{got.facts.samples} of the 1000 samples asked for: the data holds no more ({got.facts.tokens} tokens)"
    ]


@pytest.mark.parametrize("samples", [5, 1000])
def test_the_order_of_rows_does_not_show(tmp_path: Path, samples: int) -> None:
    """Row 4: shuffled rows give the same sequences, all used or not."""
    data = _texts(tmp_path / "d.jsonl", [700, 20, 45, 300] * 5)
    rows = Path(data).read_text().splitlines(keepends=True)
    random.Random(1).shuffle(rows)
    (tmp_path / "shuffled.jsonl").write_text("".join(rows))
    tokenizer = _tokenizer(tmp_path / "t")
    one = calibrate_texts([data], samples, 64, 0, None, tokenizer)
    two = calibrate_texts([str(tmp_path / "shuffled.jsonl")], samples, 64, 0, None, tokenizer)
    assert torch.equal(one.ids_T, two.ids_T)
    assert one.facts.sha256 == two.facts.sha256


def test_seed_decides_and_repeats(tmp_path: Path) -> None:
    data = _texts(tmp_path / "d.jsonl", [50] * 40)
    tokenizer = _tokenizer(tmp_path / "t")
    hashes = [calibrate_texts([data], 8, 64, seed, False, tokenizer).facts.sha256 for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]
    # Pinned: the choice must not change between platforms, Python versions or runs.
    assert hashes[0] == "25d41dc549d0ff6ad348fc5220f8c42368135b2b212e985c774c27f5d406c6a4"


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": " "}\n'])
def test_nothing_usable_is_an_error(tmp_path: Path, content: str) -> None:
    """Row 4: an empty file stops before any weights are read."""
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(UserError, match="no usable text"):
        calibrate_texts([str(tmp_path / "d.jsonl")], 8, 64, 0, None, _tokenizer(tmp_path / "t"))


def test_sources_take_turns(tmp_path: Path) -> None:
    few, many = _texts(tmp_path / "few.jsonl", [30] * 3), _texts(tmp_path / "many.jsonl", [40] * 20, seed=1)
    got = calibrate_texts([few, many], 10, 64, 0, False, _tokenizer(tmp_path / "t"))
    assert got.lengths == (30, 40, 30, 40, 30, 40, 40, 40, 40, 40)
    assert [source["samples"] for source in got.facts.sources] == [3, 7]


BOTH = "{{ bos_token }}" + TEMPLATE


@pytest.mark.parametrize(
    ("post", "template", "text_bos", "chat_bos"),
    [(True, BOTH, 1, 1), (False, TEMPLATE, 0, 0), (True, TEMPLATE, 1, 1), (False, BOTH, 0, 1)],
    ids=["both", "neither", "post-processor", "template"],
)
def test_one_bos(tmp_path: Path, post: bool, template: str, text_bos: int, chat_bos: int) -> None:
    """Row 31: the ids of prompt, calibration and evaluation start with one BOS where wanted, never two."""
    directory = _tokenizer(tmp_path / "t", post, template)
    tokenizer = _load(directory)
    bos = tokenizer.bos_token_id
    assert wants_bos(tokenizer) == post
    assert encode_prompt(tokenizer, "abc").count(bos) == text_bos
    assert encode_prompt(tokenizer, "<s>abc").count(bos) == 1  # the text brings its own
    chat = encode_prompt(tokenizer, CHAT)
    assert chat.count(bos) == chat_bos
    assert (chat[0] == bos) == bool(chat_bos)

    data = _texts(tmp_path / "d.jsonl", [700, 20, 20])
    texts = calibrate_texts([data], 100, 64, 0, None, directory)
    assert [ids.count(bos) for ids in _sequences(texts)] == [text_bos] * len(texts.lengths)
    assert [ids[0] == bos for ids in _sequences(texts)] == [bool(text_bos)] * len(texts.lengths)
    assert texts.facts.bos == ("one at start" if post else "none wanted")
    assert texts.facts.first_ids == [ids[:8] for ids in _sequences(texts)[:3]]
    evaluation = evaluation_windows(read_texts(data), directory, 64)
    assert evaluation.ids.eq(bos).sum(dim=1).tolist() == [text_bos] * evaluation.facts.windows
    assert bool(evaluation.ids[:, 0].eq(bos).all()) == bool(text_bos)

    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    chats = calibrate_texts([str(tmp_path / "c.jsonl")], 1, 64, 0, None, directory)
    assert _sequences(chats) == [chat]
    assert chats.facts.chat_template


def test_packed_windows_with_bos_are_exactly_full(tmp_path: Path) -> None:
    data = _texts(tmp_path / "d.jsonl", [100] * 30)
    got = calibrate_texts([data], 20, 64, 0, None, _tokenizer(tmp_path / "t", post=True))
    assert got.lengths == (64,) * 20
    assert got.facts.packed > 0


def test_add_bos_token_of_the_config_is_heard(tmp_path: Path) -> None:
    directory = _tokenizer(tmp_path / "t")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True}))
    tokenizer = _load(directory)
    assert wants_bos(tokenizer)
    assert encode_prompt(tokenizer, "abc").count(tokenizer.bos_token_id) == 1


def test_chats_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(UserError, match=r"put chat_template\.jinja beside"):
        calibrate_texts([str(tmp_path / "c.jsonl")], 1, 64, 0, None, _tokenizer(tmp_path / "t"))


def test_a_refused_chat_is_counted(tmp_path: Path) -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TEMPLATE
    rows = [{"messages": CHAT}, {"messages": CHAT[1:]}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    got = calibrate_texts([str(tmp_path / "c.jsonl")], 2, 64, 0, None, _tokenizer(tmp_path / "t", template=strict))
    assert got.facts.samples == 1
    assert got.facts.dropped == {"refused by the chat template": 1}
    assert len(got.facts.warnings) == 2


def test_no_eos_means_plain_joins(tmp_path: Path) -> None:
    got = calibrate_texts(
        [_texts(tmp_path / "d.jsonl", [30] * 4)], 9, 64, 0, None, _tokenizer(tmp_path / "t", eos=False)
    )
    assert sum(got.lengths) == 120


@pytest.mark.parametrize("count", [1, 15, 64, 65, 79, 80, 127, 128, 129, 200])
def test_windows_lose_nothing_and_leave_no_crumbs(count: int) -> None:
    got = list(windows(list(range(count)), 64))
    assert [i for part in got for i in part] == list(range(count))
    assert all(len(part) <= 64 for part in got)
    assert len(got) == 1 or min(map(len, got)) >= 16


def test_passages_of_a_long_text_join_to_the_text() -> None:
    text = " ".join(f"word{i}" for i in range(5000))
    parts = [passage.content for passage in passages([text, "short"], 16)]
    assert "".join(parts[:-1]) == text  # type: ignore[arg-type]
    assert parts[-1] == "short"
    assert max(map(len, parts)) <= 512
    assert all(part[0] == " " for part in parts[1:-1])
    assert [len(part) for part in _contents("x" * 1100)] == [512, 512, 76]  # no white space


def _contents(text: str) -> list[str]:
    return [str(passage.content) for passage in passages([text], 16)]


def test_evaluation_windows_are_the_text_in_order(tmp_path: Path) -> None:
    source = TextSource("d", ["a" * 50, "b" * 50, "c" * 100], "", "", {})
    tokenizer = _tokenizer(tmp_path / "t", post=True)
    got = evaluation_windows(source, tokenizer, 33)
    text = "a" * 50 + "\n\n" + "b" * 50 + "\n\n" + "c" * 100
    assert "".join(_load(tokenizer).decode(ids[1:]) for ids in got.ids) == text[: 32 * 6]
    assert got.documents == [0, 0, 1, 1, 2, 2]
    facts = got.facts
    assert (facts.window, facts.stride, facts.windows, facts.tokens, facts.predicted) == (33, 32, 6, 192, 192)
    assert not facts.sampled
    with pytest.raises(UserError, match="204 tokens, less than one window of 512"):
        evaluation_windows(source, tokenizer, 512)


def test_evaluation_takes_no_more_than_asked(tmp_path: Path) -> None:
    source = read_texts(_texts(tmp_path / "d.jsonl", [500] * 40))
    tokenizer = _tokenizer(tmp_path / "t")
    hashes = set()
    for seed in (0, 0, 1):
        got = evaluation_windows(source, tokenizer, 64, 2048, seed)
        assert got.facts.tokens == 2048
        assert got.facts.sampled
        assert got.documents == sorted(got.documents)
        hashes.add(got.sha256)
    assert len(hashes) == 2


def test_one_window_at_least_is_drawn_from_short_texts(tmp_path: Path) -> None:
    """Asking for fewer tokens than a window holds means one window, not too short a text."""
    source = read_texts(_texts(tmp_path / "d.jsonl", [20] * 400))
    got = evaluation_windows(source, _tokenizer(tmp_path / "t"), 512, 10)
    assert (got.facts.windows, got.facts.tokens) == (1, 511 if got.facts.bos.startswith("one") else 512)


def test_overlap_is_exact(tmp_path: Path) -> None:
    """One calibration text shares 30 of 113 characters with the evaluation: 18 of its 101 runs of 13."""
    tokenizer = _tokenizer(tmp_path / "t", post=True)
    draw = random.Random(0)
    ours = "".join(draw.choice(LETTERS) for _ in range(113))
    other = "".join(draw.choice(LETTERS) for _ in range(60))
    evaluation = evaluation_windows(TextSource("e", [ours], "", "", {}), tokenizer, 114)

    def share(*documents: str) -> float:
        path = tmp_path / "c.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        return overlap(calibrate_texts([str(path)], 100, 512, 0, False, tokenizer), evaluation)

    assert share(other[:30] + ours[40:70] + other[30:]) == pytest.approx(18 / 101)
    assert share(ours) == 1.0
    assert share(other) == 0.0
    assert share(ours[:12], ours[12:24]) == 0.0  # shorter than a run, and not joined across sequences
    assert share(ours[:13]) == pytest.approx(1 / 101)


@pytest.mark.parametrize("count", [1, 100])
def test_the_same_source_is_held_apart(tmp_path: Path, count: int) -> None:
    data = _texts(tmp_path / "d.jsonl", [20_000 // count] * count)
    tokenizer = _tokenizer(tmp_path / "t")
    shared = calibrate_texts([data], 1000, 64, 0, None, tokenizer)
    apart = calibrate_texts([data], 1000, 64, 0, None, tokenizer, evaluation=str(tmp_path / "." / "d.jsonl"))
    source = evaluation_source(data, [data])
    evaluation = evaluation_windows(source, tokenizer, 64)
    assert overlap(shared, evaluation) > 0.7
    assert overlap(apart, evaluation) == 0.0
    assert "held apart" in apart.facts.sources[0]["description"]
    assert "held apart" in evaluation.facts.source["description"]
    whole = "".join(map(str, read_texts(data).documents))
    parts = [split_source(read_texts(data), part).documents for part in ("calibration", "evaluation")]
    assert sum(len(text) for part in parts for text in part) == len(whole)
    assert evaluation_source(f"{data}#text", [data]).documents == source.documents
    assert "held apart" not in evaluation_source(data, ["other:train"]).description


def test_a_book_is_drawn_from_all_over(tmp_path: Path) -> None:
    """1 long text, few samples: passages from at least a third of its tenths, not its head alone."""
    words = " ".join(f"w{i:06d}" for i in range(40_000))
    (tmp_path / "book.txt").write_text(words)
    tokenizer = _tokenizer(tmp_path / "t")
    got = calibrate_texts([str(tmp_path / "book.txt")], 320, 64, 0, None, tokenizer)
    decoded = _load(tokenizer).decode(got.ids_T)
    tenths = {int(word[1:]) // 4000 for word in decoded.split() if len(word) == 7 and word[1:].isdigit()}
    assert len(tenths) >= 4


def test_only_what_is_needed_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _texts(tmp_path / "d.jsonl", [50] * 5000)
    seen = []

    def counted(tokenizer: object, prompts: list[str]) -> list[list[int]]:
        seen.append(len(prompts))
        return encode_plain(tokenizer, prompts)

    monkeypatch.setattr(calibration, "encode_plain", counted)
    got = calibrate_texts([data], 8, 64, 0, None, _tokenizer(tmp_path / "t"))
    assert (got.facts.samples, got.facts.documents_read) == (8, 5000)
    assert sum(seen) <= calibration.BATCH
