"""Turn token ids into text one at a time, so that the pieces joined equal the decoding of the whole.

Place: ``Tokenizer.stream()`` makes one for each sequence; the generator pushes ids and prints what comes back.
Does not look for stop strings and does not know which ids end a sequence.

A character may lie across several tokens, so text is held back until it can no longer change. For byte-level
vocabularies that is a byte buffer with an incremental UTF-8 decoder, which is exact for any ids, valid or not.

Sources: the Unicode standard 3.9 (U+FFFD for each maximal invalid part: what Rust's and Python's decoders do);
the decoders of the tokenizers library, whose ``decode`` is the oracle of the tests.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece-like vocabularies spell one byte


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, the 68 other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes that a byte-level token stands for; one with other characters stands for its own text."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()


class TextStream(Protocol):
    """One sequence's text as it grows."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain, possibly none."""
        ...

    def flush(self) -> str:
        """Return what was held back at the end of the sequence and start afresh."""
        ...


class ByteTextStream:
    """The stream for byte-level vocabularies: each token is some bytes (none when it is to be skipped)."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take the next token; return the characters that are now complete."""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD for a character cut off by the end, else nothing, and start afresh."""
        return self._utf8.decode(b"", final=True)


class PieceTextStream:
    """The stream for SentencePiece-like vocabularies: whole pieces, single bytes (``<0x0A>``) in runs.

    A run of bytes decodes together, so it is held back until another piece follows. Leading spaces are stripped
    from the text's start only: each step decodes the visible piece before it as well and returns the difference.
    """

    def __init__(self, token_text: Callable[[int], str | None], decode: Callable[[Sequence[int]], str]) -> None:
        self._token_text = token_text
        self._decode = decode
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Take the next token; return the text up to it unless it is one byte of a run."""
        text = self._token_text(token_id)
        if text is None:
            return ""
        self._held.append(token_id)
        return "" if BYTE_TOKEN.fullmatch(text) else self._release()

    def flush(self) -> str:
        """Return the text of a run of bytes at the end, else nothing, and start afresh."""
        rest = self._release()
        self._before = []
        return rest

    def _release(self) -> str:
        known = self._decode(self._before)
        text = self._decode([*self._before, *self._held])[len(known) :]
        if self._held:
            self._before, self._held = self._held, []
        return text
