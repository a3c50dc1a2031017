"""Text to token ids and back, and conversations to prompts, on the tokenizers library.

Place: made from a ``ModelSource``; inference and serving encode prompts and stream answers with it.
Does not train tokenizers and does not know the model's vocabulary size, except where it is asked about it.

Sources: the tokenizers library. Encoding, decoding and templates equal those of transformers for directories;
encoding equals llama.cpp's for GGUF files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property

import tokenizers
import torch

from microllm.errors import TextError
from microllm.io.chat_template import ChatTemplate, Messages, Tools, Values
from microllm.io.directory_tokenizer import parts_from_directory
from microllm.io.gguf import GGUFSource
from microllm.io.gguf_tokenizer import parts_from_gguf
from microllm.io.resolve import ModelSource
from microllm.io.text_stream import BYTE_TOKEN, ByteTextStream, PieceTextStream, TextStream, bytes_of_piece
from microllm.io.tokenizer_parts import TokenizerParts, library_errors

_PIECE_DECODERS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Return the tokenizer of a model directory or GGUF file.

    Raises: ``TextError`` when there is none or it cannot be used.
    """
    if source.kind == "gguf":
        return tokenizer_from_gguf(GGUFSource(source.path).metadata)
    return Tokenizer(parts_from_directory(source.path))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    Raises: ``TextError`` when it is of another kind than byte-level BPE, or damaged.
    """
    return Tokenizer(parts_from_gguf(metadata))


class Tokenizer:
    """One model's tokenizer.

    ``num_tokens`` counts the ids it knows; the model's embedding may have more rows (``known_ids_mask``).
    ``special_ids`` are the ids that ``skip_special_tokens`` skips. ``eos_ids`` are those that its own files say
    end a text or a turn; a model's configuration may name more. ``chat_template`` is the default one's text.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._roles = dict(parts.roles)
        self._templates = dict(parts.templates)
        self._compiled: dict[str, ChatTemplate] = {}
        self._is_byte_level = _decodes_bytes(parts.backend)
        self.num_tokens = parts.backend.get_vocab_size(with_added_tokens=True)
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_ids = parts.eos_ids
        self.bos_id = self.token_id(self._roles["bos_token"]) if "bos_token" in self._roles else None
        self.chat_template = self._templates.get("default")

    def files(self) -> dict[str, bytes]:
        """Return the files from which this tokenizer, and ``transformers``' own, are built again."""
        config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._roles}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return {
            "tokenizer.json": self._backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(config, indent=1).encode() + b"\n",
        }

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        ``add_special_tokens`` puts BOS and EOS around it where the model's files ask for that.
        ``parse_special=False`` reads ``<|im_end|>`` and its like as plain characters: use it for text from
        people who must not be able to write control tokens.

        Raises: ``TextError`` for a lone surrogate, which no encoding of text has, and where the tokenizer itself fails.
        """
        if not isinstance(text, str):
            raise TextError(f"got a text of type {type(text).__name__}; need str; decode it first")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError(
                f"got a lone surrogate {text[error.start]!a} at character {error.start}; "
                "need valid Unicode; remove it, or decode its bytes with errors='replace'"
            ) from error
        backend = self._backend if parse_special else self._plain_backend
        with library_errors("got a tokenizer that fails on this text", "take its files from the model's authors again"):
            return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids the tokenizer does not know are skipped, broken UTF-8 is U+FFFD."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise TextError(f"got a token id that is negative or beyond 32 bits: {error}; need ids") from error

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """Return a new stream: its pushes and flush joined equal ``decode`` of the same ids."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return ByteTextStream(lambda token_id: b"" if token_id in skipped else self.token_bytes(token_id))
        return PieceTextStream(
            lambda token_id: None if token_id in skipped else self._backend.id_to_token(token_id),
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens),
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for (a special token's are its name); none for an unknown id."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes_of_piece(piece)
        if BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def to_json(self) -> str:
        """Return the tokenizers library's own form of it."""
        return self._backend.to_str()

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its exact text in the vocabulary."""
        return self._backend.token_to_id(text)

    def known_ids_mask(self, vocab_size: int) -> torch.Tensor:
        """Return which ids of an embedding with ``vocab_size`` rows are tokens; the others are padding.

        Shapes: bool (vocab_size,), on the CPU.
        """
        known = self._backend.id_to_token
        return torch.tensor([known(token_id) is not None for token_id in range(vocab_size)])

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, tools: Tools = None, variables: Values = None
    ) -> str:
        """Return the prompt text that the chat template makes of a conversation.

        ``variables`` reach the template as names of their own (``enable_thinking``) and may replace its special
        tokens.

        Raises: ``TextError`` when there is no template, or it cannot render these messages.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            have = f"chat templates {sorted(self._templates)} only" if self._templates else "no chat template"
            raise TextError(f"got a tokenizer with {have}; need one named default; pass a raw prompt instead")
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name])
        return self._compiled[name].render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self._roles, **(variables or {})},
        )

    def encode_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, tools: Tools = None, variables: Values = None
    ) -> list[int]:
        """Return the token ids of a rendered conversation; BOS is there once, where the template writes it.

        As in transformers, control tokens spelled out in message content become control tokens: a service whose
        users must not forge turns has to refuse content that encodes to any of ``special_ids``.

        Raises: ``TextError`` as ``render_chat`` and ``encode`` do.
        """
        prompt = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        return self.encode(prompt, add_special_tokens=False)

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text: the flag belongs to a backend, and backends are shared."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy


def _decodes_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Say whether decoding joins bytes; refuse decoders that no exact stream exists for."""
    state = {"type": "Sequence", "decoders": []}
    if backend.decoder is not None:
        state = json.loads(backend.decoder.__getstate__())
    kinds = [part["type"] for part in (state["decoders"] if state["type"] == "Sequence" else [state])]
    if kinds == ["ByteLevel"]:
        return True
    if not _PIECE_DECODERS.issuperset(kinds):
        raise TextError(
            f"got a tokenizer whose decoder is {kinds}; need ByteLevel, or of {sorted(_PIECE_DECODERS)}; "
            "use a model with a byte-level or SentencePiece-like vocabulary"
        )
    return False
