"""What a tokenizer is built from, whichever file it lies in, and how a byte-level BPE is put together.

Place: ``io/directory_tokenizer.py`` and ``io/gguf_tokenizer.py`` make the parts; ``io/tokenizer.py`` runs them.
Does not read files and does not encode.

Sources: the GPT-2 byte-level BPE (Radford et al. 2019); the pre-tokenizers of llama.cpp (``llama-vocab.cpp``),
whose names GGUF files use; the tokenizers library's documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from microllm.errors import TextError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_CL100K % r"\p{N}{1,3}",)
_QWEN2 = (_CL100K % r"\p{N}",)

# Pre-tokenizer name -> the expressions that split the text, each applied to what the one before left.
PRE_TOKENIZERS: Mapping[str, Sequence[str]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@dataclass(frozen=True)
class TokenizerParts:
    """A backend and what its files say about it: the tokens with a role, the ids that end, the templates.

    ``roles`` maps ``bos_token``, ``eos_token`` and so on to token text, under the names chat templates use.
    """

    backend: tokenizers.Tokenizer
    roles: Mapping[str, str] = field(default_factory=dict)
    eos_ids: frozenset[int] = frozenset()
    templates: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def library_errors(got: str, remedy: str) -> Iterator[None]:
    """Turn what the tokenizers library throws at damaged files into a ``TextError``.

    It raises plain ``Exception``, and where its Rust code panics a class of its own that is no ``Exception``.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TextError(f"{got}: {error}; {remedy}") from error


def byte_level_bpe(bpe: models.BPE, pre: str) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer that splits text as the named pre-tokenizer does.

    Raises: ``TextError`` for a pre-tokenizer that is not in ``PRE_TOKENIZERS``.
    """
    if pre not in PRE_TOKENIZERS:
        raise TextError(
            f"got pre-tokenizer {pre!r}; need one of {', '.join(PRE_TOKENIZERS)}; "
            "splitting text another way would give wrong tokens; use the model's tokenizer.json instead"
        )
    backend = tokenizers.Tokenizer(bpe)
    splits = [pre_tokenizers.Split(tokenizers.Regex(expression), "isolated") for expression in PRE_TOKENIZERS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def surround(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Let ``add_special_tokens`` put these tokens before and after a text, and no others.

    Raises: ``TextError`` when such a token is not in the vocabulary.
    """
    special = []
    for token in (bos, eos):
        if token is None:
            continue
        token_id = backend.token_to_id(token)
        if token_id is None:
            raise TextError(f"got {token!r} to put around texts; need a token of the vocabulary; correct the file")
        special.append((token, token_id))
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
