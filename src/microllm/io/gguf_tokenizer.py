"""Build a tokenizer from a GGUF file's metadata: byte-level BPE, split as llama.cpp splits it.

Place: ``io/gguf.py`` reads the metadata; ``io/tokenizer.py`` runs what is built here.
Does not read files and does not handle SentencePiece or WordPiece vocabularies (refused by name).

The file names its pre-tokenizer and llama.cpp defines what that name means, so llama.cpp is the oracle. Like it,
and unlike the tokenizer.json files of the Qwen family, this does not normalise texts first.

Sources: the GGUF specification (``tokenizer.ggml.*`` keys and token types); llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from tokenizers import AddedToken, Regex, models, pre_tokenizers

from microllm.errors import TextError
from microllm.io.text_stream import BYTE_ALPHABET
from microllm.io.tokenizer_parts import TokenizerParts, byte_level_bpe, library_errors, surround

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types; 1 is an ordinary token
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")  # each ends an answer where the chat template writes it
_ROLE_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_INSTEAD = "convert the model again, or use its Hugging Face directory"

T = TypeVar("T", str, int)


def parts_from_gguf(metadata: Mapping[str, object]) -> TokenizerParts:
    """Return the tokenizer that a GGUF file's metadata describes.

    Raises: ``TextError`` for another kind of tokenizer, an unknown pre-tokenizer (named), or damaged lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TextError(f"got GGUF tokenizer model {model!r}; need 'gpt2' (byte-level BPE); {_INSTEAD}")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    types = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list(metadata, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise TextError(f"got {len(types)} token types for {len(tokens)} tokens; need one each; {_INSTEAD}")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    known = {  # rows that only pad the embedding stay unknown
        index: token
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED and token != f"[PAD{index}]"
    }
    backend = byte_level_bpe(_bpe(metadata, known, ignore_merges=pre in _LLAMA3_NAMES), pre)
    missing = "".join(BYTE_ALPHABET.keys() - set(tokens))
    if missing:  # llama.cpp drops a byte that has no token only after merging: it keeps its neighbours apart
        gap = pre_tokenizers.Split(Regex(f"[{re.escape(missing)}]"), "removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, gap])

    role_ids = {role: _token_id(metadata, key, len(tokens)) for role, key in _ROLE_KEYS.items()}
    roles = {role: tokens[token_id] for role, token_id in role_ids.items() if token_id is not None}
    boundaries = {role_ids["bos_token"], role_ids["eos_token"]}
    control = [known[i] for i in known if types[i] == _CONTROL or i in boundaries]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    user_defined = [known[i] for i in known if types[i] == _USER_DEFINED and i not in boundaries]
    backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
    with_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_NAMES)
    with_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    surround(
        backend,
        bos=roles.get("bos_token") if with_bos else None,
        eos=roles.get("eos_token") if with_eos else None,
    )

    templates = _templates(metadata)
    eos_ids = {_token_id(metadata, key, len(tokens)) for key in ("eos", "eot", "eom")}
    turn_ends = {token for token in _TURN_ENDS if token in templates.get("default", "")} & set(control)
    eos_ids |= {backend.token_to_id(token) for token in turn_ends}
    return TokenizerParts(backend, roles, frozenset(i for i in eos_ids if i is not None), templates)


def _bpe(metadata: Mapping[str, object], known: Mapping[int, str], *, ignore_merges: bool) -> models.BPE:
    vocab = {token: index for index, token in known.items()}
    if len(vocab) != len(known):
        twice = next(token for index, token in known.items() if vocab[token] != index)
        raise TextError(f"got token {twice!r} more than once in tokenizer.ggml.tokens; {_INSTEAD}")
    merges = []
    for index, merge in enumerate(_list(metadata, "tokenizer.ggml.merges", str)):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise TextError(f"got merge {index} {merge!r}; need two tokens with a space between; {_INSTEAD}")
        merges.append((left, right))
    with library_errors("got tokenizer.ggml.merges that do not fit the tokens", _INSTEAD):
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)


def _list(metadata: Mapping[str, object], key: str, item_type: type[T]) -> list[T]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise TextError(f"got GGUF metadata without a list {key!r}; {_INSTEAD}")
    wrong = next((item for item in value if not isinstance(item, item_type)), None)
    if wrong is not None:
        raise TextError(f"got {wrong!r} in {key!r}; need {item_type.__name__} items; {_INSTEAD}")
    return value


def _token_id(metadata: Mapping[str, object], key: str, num_tokens: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    value = metadata.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise TextError(f"got {name} {value!r}; need an id below {num_tokens}; {_INSTEAD}")
    return value


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name; the one without a name is the default."""
    prefix = "tokenizer.chat_template"
    found = {}
    for key, value in metadata.items():
        if key == prefix or key.startswith(prefix + "."):
            found[key[len(prefix) + 1 :] or "default"] = str(value)
    return found
