"""Text as it comes equals text at once; characters are whole; stop strings are never half shown, nor lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compress.runtime.text import Pieces, TextStream

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORD = "中文é🙂ß한"
WORDS = ["▁Hello", "▁wor", "ld", "▁", "中", "!"]


def byte_level() -> Tokenizer:
    """One token a byte (id = rank of its stand-in), two merges inside characters, two special tokens."""
    stand_in = {char: i for i, char in enumerate(ALPHABET)}
    e4, b8 = "ä", "¸"  # both print, so they stand for themselves
    merges = [(e4, b8)]
    vocab = stand_in | {e4 + b8: 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("世界 word", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Like Llama 2's: ▁ for spaces, bytes as <0x..>, the first space dropped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁Hello",
        "▁wor",
        "ld",
        "▁",
        "中",
        "!",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", "play", "##ing", "ball", "##s", "!", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


BYTES = Pieces(byte_level())
BYTE_IDS = {bytes(BYTES.token_bytes(i)): i for i in range(256)}
LLAMA = sentencepiece()


def ids_of(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[name] for name in names]


def byte_ids(content: bytes) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in content]


def streamed(pieces: Pieces, ids: list[int], **options: Any) -> list[str]:
    """What each token shows, then what is left at the end; tokens after a stop are not asked for."""
    stream = TextStream(pieces, **options)
    shown = []
    for token in ids:
        stopped = stream.append(token)
        shown.append(stream.take())
        if stopped:
            break
    stream.finish()
    return [*shown, stream.take()]


def at_once(pieces: Pieces, ids: list[int], **options: Any) -> str:
    stream = TextStream(pieces, **options)
    for token in ids:
        if stream.append(token):
            break
    stream.finish()
    return stream.take()


def test_every_byte_has_its_token() -> None:
    assert len(BYTE_IDS) == 256
    assert BYTES.token_bytes(256) == "中".encode()[:2]


def test_characters_come_whole() -> None:
    """A CJK word, é and an emoji, a byte a token: shown at their last byte, never in parts."""
    shown = streamed(BYTES, byte_ids(WORD.encode()))
    assert "".join(shown) == WORD
    assert [text for text in shown if text] == list(WORD)
    assert shown[2] == "中"  # at its third byte
    ids = byte_level().encode(WORD).ids
    assert 256 in ids  # the merge inside 中
    assert "".join(streamed(BYTES, ids)) == WORD


def test_unfinished_bytes_are_shown_at_the_end_alone() -> None:
    shown = streamed(BYTES, byte_ids(b"a\xe4\xb8"))
    assert shown == ["a", "", "", "�"]


@given(st.binary(max_size=60), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_byte_level_equals_decoding_at_once(content: bytes, seed: int) -> None:
    """Random bytes, tokens that are now and then special or longer: as the tokenizer decodes them together."""
    chance = random.Random(seed)
    ids = byte_ids(content)
    for _ in range(len(ids) // 8):
        ids.insert(chance.randrange(len(ids)), chance.choice([256, 257, 258]))
    expected = byte_level().decode(ids, skip_special_tokens=True)
    assert "".join(streamed(BYTES, ids)) == expected
    assert at_once(BYTES, ids) == expected
    assert "".join(streamed(BYTES, byte_ids(content))) == content.decode(errors="replace")


@given(st.text(max_size=30), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_byte_tokens_of_sentencepiece_equal_decoding_at_once(text: str, seed: int) -> None:
    chance = random.Random(seed)
    ids = [3 + byte for byte in text.encode()]
    words = ids_of(LLAMA, [*WORDS, "<s>", "</s>"])
    ids = [chance.choice(words), *ids, chance.choice(words)]
    assert "".join(streamed(Pieces(LLAMA), ids)) == LLAMA.decode(ids, skip_special_tokens=True)


def test_invalid_bytes_of_sentencepiece_spoil_nothing_else() -> None:
    """The tokenizer decodes a run of byte tokens to U+FFFD, all of it, where one byte is wrong; here the é stays."""
    ids = [3 + byte for byte in "é".encode() + b"\xe4"] + ids_of(LLAMA, "!")
    assert LLAMA.decode(ids) == "���!"
    assert "".join(streamed(Pieces(LLAMA), ids)) == "é�!"


@pytest.mark.parametrize("build", [byte_level, sentencepiece, metaspace, wordpiece])
@pytest.mark.parametrize("wrapped", [False, True])
def test_text_continues_the_prompt(build: Any, wrapped: bool) -> None:
    """Prompt and output together decode to the prompt's text and what was streamed; spaces between them stay."""
    tokenizer = build()
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer) if wrapped else tokenizer)
    chance = random.Random(0)
    names = {"sentencepiece": ["▁Hello", "▁wor", "ld", "▁", "中", "!", "<s>", "</s>"]}.get(build.__name__)
    usable = (
        [tokenizer.token_to_id(n) for n in names] if names else list(range(1, min(128, tokenizer.get_vocab_size())))
    )
    if build is byte_level:
        usable = [*byte_ids(b"abc XYZ!\n"), 257, 258]
    for length in (0, 1, 2, 5, 12):
        for _ in range(10):
            prompt, output = chance.choices(usable, k=length), chance.choices(usable, k=8)
            before = tokenizer.decode(prompt, skip_special_tokens=True)
            whole = tokenizer.decode(prompt + output, skip_special_tokens=True)
            assert before + "".join(streamed(pieces, output, prompt=prompt)) == whole


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*byte_ids(b"a"), 257, *byte_ids(b"b")]
    assert at_once(BYTES, ids) == "ab"
    assert at_once(BYTES, ids, skip_special_tokens=False) == "a<|end|>b"


def test_a_prompt_that_ends_inside_a_character() -> None:
    """The output completes it; where it does not, the damage is the prompt's."""
    start, rest = byte_ids(b"x\xe4\xb8"), byte_ids(b"\xad!")
    assert "".join(streamed(BYTES, rest, prompt=start)) == "中!"
    assert "".join(streamed(BYTES, byte_ids(b"!"), prompt=start)) == "!"
    assert "".join(streamed(BYTES, [], prompt=start)) == ""


@pytest.mark.parametrize(
    ("text", "stop", "shown", "by"),
    [
        ("abXYZcd", ("XYZ",), "ab", "XYZ"),
        ("abXYZcd", ("XYQ",), "abXYZcd", None),
        ("ab..XY", ("XYZ",), "ab..XY", None),  # held back, and flushed at the end
        ("abXYZ", ("XYZ",), "ab", "XYZ"),
        ("XYZ", ("XYZ",), "", "XYZ"),
        ("abc", ("ab", "abc"), "", "ab"),  # the first to be complete
        ("abc", ("abc", "ab"), "", "ab"),
        ("xabc", ("bc", "abc"), "x", "abc"),  # complete together: the longest
        ("aaab", ("aab",), "a", "aab"),
        ("abababc", ("ababc",), "ab", "ababc"),
        ("one two", ("two", "one"), "", "one"),
        ("ends中", ("中",), "ends", "中"),
        ("ab XYZ", ("ab", "XYZ"), "", "ab"),
        ("say ab then XYZ", ("XYZ", "ab"), "say ", "ab"),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], shown: str, by: str | None) -> None:
    """However the text is cut into tokens: byte by byte, and in words of every length."""
    encoded = byte_ids(text.encode())
    stream = TextStream(BYTES, stop=stop)
    stopped = [stream.append(token) for token in encoded]  # to the end: what follows a stop adds nothing
    assert any(stopped) == (by is not None)
    stream.finish()
    assert (stream.take(), stream.stopped_by) == (shown, by)
    deltas = streamed(BYTES, encoded, stop=stop)
    assert "".join(deltas) == shown
    assert at_once(BYTES, encoded, stop=stop, include_stop=True) == shown + (by or "")


def test_a_stop_string_is_held_back_only_while_it_can_still_come() -> None:
    assert streamed(BYTES, byte_ids(b"aXYb"), stop=("XYZ",)) == ["a", "", "", "XYb", ""]
    assert streamed(BYTES, byte_ids(b"XXYZ"), stop=("XYZ",)) == ["", "X", "", "", ""]


@given(st.text("abX", max_size=12), st.lists(st.text("abX", min_size=1, max_size=4), max_size=3), st.randoms())
@settings(max_examples=300, deadline=None)
def test_stopping_depends_on_the_text_alone(text: str, stop: list[str], chance: random.Random) -> None:
    """Tokens of one to four characters, cut at random: the same text as an oracle that reads character by character."""
    expected, by = text, None
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            by = max(complete, key=len)
            expected = text[: end - len(by)]
            break
    cuts, at = [], 0
    while at < len(text):
        size = chance.randint(1, 4)
        cuts.append(text[at : at + size])
        at += size
    vocab = {word: i for i, word in enumerate(dict.fromkeys(cuts or ["a"]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    pieces = Pieces(tokenizer)
    ids = [vocab[word] for word in cuts]
    assert "".join(streamed(pieces, ids, stop=tuple(stop))) == expected
    assert at_once(pieces, ids, stop=tuple(stop), include_stop=True) == expected + (by or "")


def test_nothing_stops_before_min_tokens() -> None:
    ids = byte_ids(b"a.b.c.d")
    assert at_once(BYTES, ids, stop=(".",), min_tokens=0) == "a"
    assert at_once(BYTES, ids, stop=(".",), min_tokens=3) == "a.b"
    assert at_once(BYTES, ids, stop=("b.",), min_tokens=4) == "a.b.c.d"  # its first half came too early


def test_offsets_are_where_the_text_of_a_token_begins() -> None:
    stream = TextStream(BYTES)
    for token in byte_ids("aé中b".encode()):
        stream.append(token)
    assert stream.offsets == [0, 1, 1, 2, 2, 2, 3]


def test_tokens_for_a_reader() -> None:
    """Different tokens look different, also those that are parts of characters, or that the tokenizer lacks."""
    llama = Pieces(LLAMA)
    assert [llama.token_text(token) for token in ids_of(LLAMA, ["▁Hello", "ld", "<s>", "中"])] == [
        " Hello",
        "ld",
        "<s>",
        "中",
    ]
    assert llama.token_text(3 + 0xE4) == r"bytes:\xe4"
    assert BYTES.token_text(256) == r"bytes:\xe4\xb8"
    assert BYTES.token_text(9999) == "token_id:9999"
    assert len({BYTES.token_text(i) for i in range(259)}) == 259
    assert Pieces(wordpiece()).token_text(1) == "play"


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    """The tokenizer is asked once for each different token, never for a window of the text."""
    asked = []

    class Counting:
        decoder = decoders.ByteLevel()

        def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
            return {}

        def id_to_token(self, token: int) -> str:
            asked.append(token)
            return ALPHABET[token]

    stream = TextStream(Pieces(Counting()), prompt=[5], stop=("zz",))
    for i in range(5000):
        stream.append(60 + i % 20)
    assert len(asked) <= 22
