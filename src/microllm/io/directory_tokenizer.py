"""Build a tokenizer from the files of a Hugging Face model directory.

Place: ``io/resolve.py`` finds the directory; ``io/tokenizer.py`` runs what is built here.
Does not read SentencePiece ``tokenizer.model`` files (their tokenizer.json is read) and runs no code from the
directory.

tokenizer.json is taken as it is. What tokenizer_config.json adds is what transformers makes of it: tokens that
tokenizer.json lacks, the tokens with a role, whether a text gets BOS and EOS, and chat templates.

Sources: the tokenizers library's file format; the file names and keys that transformers documents.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers

from microllm.errors import TextError
from microllm.io.json_files import read_json_object
from microllm.io.tokenizer_parts import TokenizerParts, byte_level_bpe, library_errors, surround

_MAX_JSON_BYTES = 64 * 2**20
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PRE_TOKENIZER_OF_CLASS = {
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
}


def parts_from_directory(path: Path) -> TokenizerParts:
    """Return the tokenizer that a model directory holds.

    Raises: ``TextError`` when files are absent, damaged, or disagree about the id of a token.
    """
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    backend = _backend(path, config)
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, path, config)

    roles = {role: _token_text(config[role]) for role in _ROLES if config.get(role)}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [*roles.values(), *(_token_text(token) for token in (extra if isinstance(extra, list) else []))]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in named if t not in special])
    if "add_bos_token" in config or "add_eos_token" in config:
        surround(
            backend,
            bos=roles.get("bos_token") if config.get("add_bos_token") else None,
            eos=roles.get("eos_token") if config.get("add_eos_token") else None,
        )
    eos_id = backend.token_to_id(roles["eos_token"]) if "eos_token" in roles else None
    eos_ids = frozenset() if eos_id is None else frozenset({eos_id})
    return TokenizerParts(backend, roles, eos_ids, _templates(path, config))


def _backend(path: Path, config: Mapping[str, object]) -> tokenizers.Tokenizer:
    whole, vocab, merges = path / "tokenizer.json", path / "vocab.json", path / "merges.txt"
    if whole.is_file():
        with library_errors(f"got a damaged {whole}", "download it again"):
            return tokenizers.Tokenizer.from_file(str(whole))
    if not (vocab.is_file() and merges.is_file()):
        raise TextError(
            f"got no tokenizer in {path}; need tokenizer.json, or vocab.json and merges.txt; copy them there "
            "(a tokenizer.model alone is not read)"
        )
    name = str(config.get("tokenizer_class"))
    if name not in _PRE_TOKENIZER_OF_CLASS or config.get("add_prefix_space"):
        raise TextError(
            f"got vocab.json and merges.txt with tokenizer_class {name} in {path}; need one of "
            f"{', '.join(_PRE_TOKENIZER_OF_CLASS)}, without add_prefix_space; add the model's tokenizer.json"
        )
    with library_errors(f"got damaged vocab.json or merges.txt in {path}", "download them again"):
        bpe = models.BPE.from_file(str(vocab), str(merges))
    backend = byte_level_bpe(bpe, _PRE_TOKENIZER_OF_CLASS[name])
    if name.startswith("Qwen2"):
        backend.normalizer = normalizers.NFC()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, path: Path, config: Mapping[str, object]) -> None:
    """Add the tokens that tokenizer_config.json or added_tokens.json lists beyond the vocabulary, in id order."""
    pairs = [(index, token) for token, index in _read_json(path / "added_tokens.json").items()]
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        pairs += list(decoder.items())
    try:
        listed = {int(str(index)): token for index, token in pairs}
    except ValueError as error:
        raise TextError(f"got an added token whose id is not a number in {path}: {error}; correct it") from error
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for index, token in sorted(listed.items()):
        text = _token_text(token)
        if text not in present:
            flags = {
                flag: bool(token.get(flag, False)) if isinstance(token, Mapping) else False
                for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != index:
            raise TextError(
                f"got token {text!r} with id {backend.token_to_id(text)} in {path} where its configuration says "
                f"{index}; need the same; take all tokenizer files from one revision of the model"
            )


def _templates(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name, from the first place that has any."""
    alone = path / "chat_template.jinja"
    if alone.is_file():
        named = sorted((path / "additional_chat_templates").glob("*.jinja"))
        return {"default": _read_text(alone)} | {file.stem: _read_text(file) for file in named}
    value = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
    given = value if isinstance(value, Mapping) else {"default": value} if value else {}
    templates = {name: text for name, text in given.items() if isinstance(name, str) and isinstance(text, str)}
    if len(templates) != len(given):
        raise TextError(f"got a chat_template in {path} that is no text; need one text, or texts by name")
    return templates


def _token_text(token: object) -> str:
    """Return a token's text; files write it plainly or as an object with ``content``."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise TextError(f"got {token!r} for a token in the tokenizer's configuration; need text; correct the file")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"got an unreadable {path}: {error}; download it again") from error


def _read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file, empty when there is no such file."""
    return read_json_object(path, _MAX_JSON_BYTES, TextError) if os.path.lexists(path) else {}
