"""Streamed text joined equals the tokenizers library's decode of the whole, whatever the ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from microllm.errors import TextError
from microllm.io.text_stream import BYTE_ALPHABET, PieceTextStream
from microllm.io.tokenizer import Tokenizer
from microllm.io.tokenizer_parts import TokenizerParts

many = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

SCRIPTS = (
    "Zażółć gęślą jaźń", "敏捷的棕色狐狸。", "키스의 고유조건은", "한국어 각", "e\u0301\u0323\u0308x", "नमस्ते दुनिया",
    "ไทยเป็น", "👩‍👩‍👧‍👦👍🏽🇫🇷1️⃣🏴󠁧󠁢󠁥󠁮󠁧󠁿", "𝟘𐄇𓀀", "\x00\x04\x7f\ufffd\ufeff", " \n\t  \u3000",
    "<|im_end|><|eot_id|> <think>", "السلام שלום",
)  # fmt: skip


def streamed(tokenizer: Tokenizer, ids: Iterable[int], *, skip: bool) -> str:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])


def assert_exact(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    for skip in (True, False):
        assert streamed(tokenizer, ids, skip=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@many
@given(data=st.data())
def test_random_ids(real_tokenizer: Tokenizer, data: st.DataObject):
    top = real_tokenizer.num_tokens
    special = st.sampled_from(sorted(real_tokenizer.special_ids))
    ids = st.one_of(st.integers(0, top - 1), st.integers(0, 600), special, st.integers(top, top + 300))
    assert_exact(real_tokenizer, data.draw(st.lists(ids, max_size=60)))


@many
@given(data=st.data())
def test_random_bytes(real_tokenizer: Tokenizer, data: st.DataObject):
    """Bytes one token each, mostly lead and continuation bytes: overlong, surrogate, cut and stray sequences."""
    id_of_byte = {byte: real_tokenizer.token_id(piece) for piece, byte in BYTE_ALPHABET.items()}
    known = [byte for byte, token_id in id_of_byte.items() if token_id is not None]
    multibyte = [byte for byte in known if byte >= 0x80]
    skipped = min(real_tokenizer.special_ids)
    drawn = data.draw(st.lists(st.one_of(st.sampled_from(multibyte), st.sampled_from(known), st.none()), max_size=40))
    ids = [skipped if byte is None else id_of_byte[byte] for byte in drawn]
    assert_exact(real_tokenizer, ids)
    text = bytes(byte for byte in drawn if byte is not None).decode("utf-8", errors="replace")
    assert real_tokenizer.decode(ids) == text


@many
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(SCRIPTS)).map("".join)), cut=st.integers(0, 8))
@example(text="".join(SCRIPTS), cut=0)
def test_encoded_texts(real_tokenizer: Tokenizer, text: str, cut: int):
    """Texts of many scripts, whole and cut within their last characters."""
    ids = real_tokenizer.encode(text, add_special_tokens=False)
    assert_exact(real_tokenizer, ids[: len(ids) - cut] if cut else ids)


def test_incomplete_characters_are_held_back(qwen3: Tokenizer):
    ids = qwen3.encode("𓀀!")
    assert len(ids) > 2, "the character has to span tokens for this test"
    stream = qwen3.stream()
    assert [stream.push(token_id) for token_id in ids] == [""] * (len(ids) - 2) + ["𓀀", "!"]
    assert stream.flush() == ""
    assert stream.push(ids[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(ids[-1]) + stream.flush() == "!"  # a flushed stream starts afresh


def test_special_tokens_do_not_split_characters(qwen3: Tokenizer):
    ids = qwen3.encode("𓀀")
    special = min(qwen3.special_ids)
    mixed = [ids[0], special, *ids[1:]]
    assert streamed(qwen3, mixed, skip=True) == qwen3.decode(mixed) == "𓀀"
    assert "<|endoftext|>" in streamed(qwen3, mixed, skip=False)


def sentencepiece_like() -> Tokenizer:
    """A vocabulary in the manner of Llama 2's: pieces with U+2581 for a space, and every byte as <0xNN>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581\u2581", "a", "\u2581a", "bc", "é", "世", "\u2581世界", "<0xZZ>", "\n"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    strip = decoders.Strip(content=" ", left=1, right=0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return Tokenizer(TokenizerParts(backend))


@many
@given(data=st.data())
def test_sentencepiece_like_vocabularies(data: st.DataObject):
    tokenizer = sentencepiece_like()
    byte = st.integers(0, 255).map(lambda byte: 3 + byte)
    continuation = st.sampled_from([3 + byte for byte in "é世👍".encode()])
    assert_exact(tokenizer, data.draw(st.lists(st.one_of(st.integers(0, 270), byte, continuation), max_size=30)))


def test_sentencepiece_like_text_appears_as_it_comes():
    tokenizer = sentencepiece_like()
    stream = tokenizer.stream()
    pieces = ["\u2581a", "\u2581a", "<0xC3>", "<0xA9>", "bc", "<0xE4>"]
    pushed = [stream.push(tokenizer.token_id(piece)) for piece in pieces]
    assert pushed == ["a", " a", "", "", "ébc", ""]
    assert stream.flush() == "\ufffd"
    assert [tokenizer.token_bytes(tokenizer.token_id(piece)) for piece in pieces[1:4]] == [b" a", b"\xc3", b"\xa9"]


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never")])
def test_other_simple_decoders(decoder: object):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "\u2581b": 1, "c": 2, "\u2581": 3}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(TokenizerParts(backend))
    for ids in ([], [0], [1, 1], [3, 0, 3, 1, 2], [2, 1, 0, 0, 3, 3]):
        assert_exact(tokenizer, ids)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC()])
def test_decoders_without_an_exact_stream_are_refused(decoder: object):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(TextError, match=r"got a tokenizer whose decoder is .*need ByteLevel"):
        Tokenizer(TokenizerParts(backend))


def test_streaming_work_is_linear():
    """Each token is decoded a bounded number of times however long the text grows."""
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "x" * len(ids)

    stream = PieceTextStream(lambda token_id: "x", decode)
    text = "".join([stream.push(token_id) for token_id in range(5000)])
    assert len(text + stream.flush()) == 5000
    assert decoded <= 4 * 5000
