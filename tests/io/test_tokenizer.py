"""Token ids equal llama.cpp's for GGUF files and transformers' for directories; damaged files are refused by name."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from microllm.errors import TextError
from microllm.io.gguf import GGUFSource
from microllm.io.resolve import ModelSource
from microllm.io.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

ORACLE = Path(__file__).resolve().parents[1] / "data" / "llama_cpp_tokens.json.gz"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> 世界 👍🏽"}]

Metadata = dict[str, Any]


@pytest.fixture(scope="module")
def oracle() -> list[list[Any]]:
    """Rows of text, ids with control tokens parsed and, where they differ, ids with them read as text."""
    document = json.loads(gzip.decompress(ORACLE.read_bytes()))
    assert document["llama_cpp_python"] == "0.3.36"
    return document["rows"]


@pytest.fixture(scope="module")
def texts(oracle: list[list[Any]]) -> list[str]:
    return [row[0] for row in oracle]


def directory(path: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("test", path, "directory"))


# --- GGUF ---------------------------------------------------------------------------------------------------------


def test_demo_tokens_equal_llama_cpp(smollm2: Tokenizer, oracle: list[list[Any]]):
    assert len(oracle) > 3000
    for text, ids, *plain in oracle:
        assert smollm2.encode(text) == ids, ascii(text)
        assert smollm2.encode(text, parse_special=False) == (plain[0] if plain else ids), ascii(text)
    assert sum(len(row) == 3 for row in oracle) > 300


def test_the_generator_still_makes_these_texts(texts: list[str], load_tool: Callable[[str], ModuleType]):
    assert list(load_tool("llama_cpp_tokens").texts(3000)) == texts


def test_demo_splits_digits(smollm2: Tokenizer):
    """Where transformers' own conversion of this file goes wrong: it merges digits."""
    assert [smollm2.decode([i]) for i in smollm2.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]


def test_demo_facts(smollm2: Tokenizer):
    assert smollm2.num_tokens == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert (smollm2.bos_id, smollm2.eos_ids) == (1, frozenset({2}))
    assert smollm2.encode("Hello") == smollm2.encode("Hello", add_special_tokens=False)  # the file asks for no BOS
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(smollm2.encode("é")[0]) == "é".encode()
    assert smollm2.token_bytes(49152) == b""


def as_gguf(tokenizer_json: Path, pre: str, rows: int) -> Metadata:
    """What a converter writes for a tokenizer.json: padding to the embedding's rows, types, merges."""
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [5] * rows
    for token, index in content["model"]["vocab"].items():
        tokens[index], types[index] = token, 1
    for added in content["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


@pytest.fixture(scope="module")
def qwen3_metadata(qwen3_directory: Path, qwen3: Tokenizer) -> Metadata:
    metadata = as_gguf(qwen3_directory / "tokenizer.json", "qwen2", 151936)
    roles = {"bos": 151643, "eos": 151643, "padding": 151643}
    metadata |= {f"tokenizer.ggml.{role}_token_id": index for role, index in roles.items()}
    return metadata | {"tokenizer.chat_template": qwen3.chat_template, "tokenizer.ggml.add_bos_token": False}


def test_qwen3_from_gguf_equals_the_directory(qwen3_metadata: Metadata, qwen3: Tokenizer, texts: list[str]):
    """Up to NFC, which tokenizer.json asks for and llama.cpp does not do."""
    ours = tokenizer_from_gguf(qwen3_metadata)
    for text in texts:
        text = unicodedata.normalize("NFC", text)
        for parse in (True, False):
            assert ours.encode(text, parse_special=parse) == qwen3.encode(text, parse_special=parse), ascii(text)
    assert ours.encode("e\u0301") != ours.encode("é") == qwen3.encode("e\u0301")
    assert ours.special_ids == qwen3.special_ids
    assert ours.encode_chat(MESSAGES) == qwen3.encode_chat(MESSAGES)
    assert ours.eos_ids == {151643, 151645}  # the file's own, and <|im_end|>, which the template writes


def test_llama3_from_gguf_equals_the_directory(llama31_directory: Path, llama31: Tokenizer, texts: list[str]):
    metadata = as_gguf(llama31_directory / "tokenizer.json", "llama-bpe", 128256)
    metadata |= {"tokenizer.ggml.bos_token_id": 128000, "tokenizer.ggml.eos_token_id": 128001}
    ours = tokenizer_from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 128009})
    for text in texts[::2]:
        assert ours.encode(text) == llama31.encode(text), ascii(text)
    assert ours.encode("x")[0] == ours.bos_id == 128000  # this pre-tokenizer implies BOS
    assert ours.eos_ids == {128001, 128009}
    assert tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False}).encode("x") == ours.encode("x")[1:]


def small_gguf(**changes: object) -> Metadata:
    """Single letters, two merges, a control token, one row of padding; most bytes have no token."""
    metadata: Metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "Ġ", "aba", "<|end|>", "[PAD6]", "<tool>"],
        "merges": ["a b", "ab a"],
        "token_type": [1, 1, 1, 1, 1, 3, 1, 4],
        "eos_token_id": 5,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def test_small_gguf():
    tokenizer = tokenizer_from_gguf(small_gguf())
    assert tokenizer.encode("ababa b<|end|><tool>") == [2, 4, 3, 1, 5, 7]
    assert tokenizer.encode("aéb") == [0, 1]  # a letter without tokens drops out after merging: not [2]
    assert tokenizer.num_tokens == 7
    assert tokenizer.known_ids_mask(10).tolist() == [True] * 6 + [False, True, False, False]
    assert tokenizer.decode([4, 6, 5, 7]) == "aba<tool>"
    assert tokenizer.chat_template is None
    both = tokenizer_from_gguf(small_gguf(add_bos_token=True, bos_token_id=7, add_eos_token=True, token_type=None))
    assert both.encode("ab") == [7, 2, 5]
    assert both.encode("ab", add_special_tokens=False) == [2]


def test_llama3_takes_whole_words_before_merging():
    tokens = ["a", "b", "ab", "Ġ", "bb", "<|end|>", "[PAD6]", "<tool>"]  # no merge makes "bb"
    assert tokenizer_from_gguf(small_gguf(tokens=tokens, merges=["a b"])).encode("bb") == [1, 1]
    assert tokenizer_from_gguf(small_gguf(tokens=tokens, merges=["a b"], pre="llama-bpe")).encode("bb") == [4]


def test_gguf_names_several_templates():
    metadata = small_gguf() | {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.chat_template == "one"
    assert tokenizer.render_chat(MESSAGES, tools=[{"name": "f"}]) == "two"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "got GGUF tokenizer model 'llama'; need 'gpt2'"),
        ({"model": None}, "got GGUF tokenizer model None"),
        ({"pre": "tekken"}, "got pre-tokenizer 'tekken'; need one of default, gpt-2, smollm"),
        ({"tokens": None}, r"without a list 'tokenizer\.ggml\.tokens'"),
        ({"tokens": []}, r"without a list 'tokenizer\.ggml\.tokens'"),
        ({"tokens": ["a", 7]}, r"got 7 in 'tokenizer\.ggml\.tokens'; need str"),
        ({"merges": None}, r"without a list 'tokenizer\.ggml\.merges'"),
        ({"merges": ["a b", "ab"]}, "got merge 1 'ab'; need two tokens"),
        ({"merges": ["a c"]}, "merges that do not fit the tokens"),
        ({"token_type": [1, 1]}, "got 2 token types for 8 tokens"),
        ({"tokens": ["a", "b", "ab", "Ġ", "a", "aba", "x", "y"]}, "got token 'a' more than once"),
        ({"eos_token_id": 8}, r"got tokenizer\.ggml\.eos_token_id 8; need an id below 8"),
        ({"bos_token_id": -1}, r"got tokenizer\.ggml\.bos_token_id -1"),
        ({"eot_token_id": "5"}, r"got tokenizer\.ggml\.eot_token_id '5'"),
    ],
)
def test_damaged_gguf_metadata(changes: Mapping[str, object], message: str):
    with pytest.raises(TextError, match=message):
        tokenizer_from_gguf(small_gguf(**changes))


def test_loading_a_gguf_file_reads_its_metadata(demo_source: ModelSource, smollm2: Tokenizer):
    again = tokenizer_from_gguf(GGUFSource(demo_source.path).metadata)
    assert again.encode_chat(MESSAGES) == smollm2.encode_chat(MESSAGES)


# --- directories --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama31", "deepseek"])
def test_directories_equal_transformers(name: str, texts: list[str], request: pytest.FixtureRequest):
    from transformers import PreTrainedTokenizerFast

    ours: Tokenizer = request.getfixturevalue(name)
    reference = PreTrainedTokenizerFast.from_pretrained(request.getfixturevalue(f"{name}_directory"))
    for text in texts[::3]:
        ids = ours.encode(text)
        assert ids == reference.encode(text), ascii(text)
        assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert ours.num_tokens == len(reference)
    assert ours.special_ids >= set(reference.all_special_ids)
    assert ours.eos_ids == {reference.eos_token_id}
    assert ours.bos_id == reference.bos_token_id
    if reference.chat_template:
        expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(MESSAGES) == expected


def test_no_second_bos(llama31: Tokenizer):
    assert llama31.render_chat(MESSAGES).startswith("<|begin_of_text|>")
    assert llama31.encode_chat(MESSAGES).count(128000) == 1
    assert llama31.encode("Hi")[0] == 128000


def test_ids_in_the_padded_tail_are_unknown(qwen3: Tokenizer):
    mask = qwen3.known_ids_mask(151936)
    assert qwen3.num_tokens == 151669
    assert mask[:151669].all()
    assert not mask[151669:].any()
    assert mask.shape == (151936,)


def test_special_tokens_as_text(qwen3: Tokenizer):
    assert qwen3.encode("<|im_end|>") == [151645]
    plain = qwen3.encode("<|im_end|>", parse_special=False)
    assert not qwen3.special_ids.intersection(plain)
    assert qwen3.decode(plain) == "<|im_end|>"
    assert qwen3.encode("<|im_end|>") == [151645]  # the two ways do not disturb each other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab\ud800c", r"got a lone surrogate '\\ud800' at character 2"),
        ("\udfff", "at character 0"),
        (b"bytes", "got a text of type bytes"),
        (None, "got a text of type NoneType"),
    ],
)
def test_texts_that_are_none(qwen3: Tokenizer, text: str, message: str):
    with pytest.raises(TextError, match=message):
        qwen3.encode(text)


def test_ids_that_are_none(qwen3: Tokenizer):
    assert qwen3.decode([10**9, 151935]) == ""
    for wrong in (-1, 2**40):
        with pytest.raises(TextError, match="got a token id that is negative or beyond 32 bits"):
            qwen3.decode([wrong])


def test_vocab_and_merges_equal_tokenizer_json(
    qwen3_directory: Path, qwen3: Tokenizer, texts: list[str], tmp_path: Path
):
    content = json.loads((qwen3_directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in content["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes((qwen3_directory / "tokenizer_config.json").read_bytes())
    ours = directory(tmp_path)
    for text in texts[::3]:
        assert ours.encode(text) == qwen3.encode(text), ascii(text)
    assert (ours.num_tokens, ours.special_ids, ours.eos_ids) == (qwen3.num_tokens, qwen3.special_ids, qwen3.eos_ids)
    assert ours.render_chat(MESSAGES) == qwen3.render_chat(MESSAGES)


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Write a small tokenizer directory; None leaves a file out, text is written as it is."""

    def write(**files: object) -> Path:
        vocab = {"a": 0, "b": 1, "ab": 2, "Ġ": 3}
        backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
        backend.decoder = tokenizers.decoders.ByteLevel()
        defaults = {"tokenizer": backend.to_str(), "tokenizer_config": {"eos_token": "</s>", "bos_token": "<s>"}}
        for stem, content in {**defaults, **files}.items():
            if content is not None:
                suffix = {"merges": ".txt", "chat_template_file": ".jinja"}.get(stem, ".json")
                name = stem.removesuffix("_file") + suffix
                (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


def test_tokens_that_only_the_configuration_lists(small: Callable[..., Path]):
    listed = {"5": {"content": "</s>", "special": True}, "4": {"content": "<s>", "special": False}}
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    ours = directory(small(tokenizer_config={**config, "added_tokens_decoder": listed}))
    assert ours.encode("ab</s>a") == [4, 2, 5, 0]
    assert ours.special_ids == {4, 5}  # a token with a role is special whatever its entry says
    assert (ours.bos_id, ours.eos_ids, ours.num_tokens) == (4, {5}, 6)


def test_truncation_and_padding_of_the_file_are_off(small: Callable[..., Path]):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.enable_truncation(2)
    backend.enable_padding(length=20)
    assert directory(small(tokenizer=backend.to_str())).encode("ababab") == [0, 1] * 3


@pytest.mark.parametrize(
    ("files", "default"),
    [
        ({"tokenizer_config": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "listed"}]}}, "listed"),
        ({"chat_template": {"chat_template": "json"}}, "json"),
        ({"tokenizer_config": {"chat_template": "config"}, "chat_template_file": "jinja"}, "jinja"),
        ({}, None),
    ],
)
def test_where_a_chat_template_lies(small: Callable[..., Path], files: Mapping[str, object], default: str | None):
    assert directory(small(**files)).chat_template == default


MODEL = '"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "Fuse"}'
PANIC_AT_LOAD = f'{{{MODEL}, "normalizer": {{"type": "Precompiled", "precompiled_charsmap": "AAAA"}}}}'
PANIC_AT_USE = f"""{{{MODEL}, "post_processor": {{"type": "TemplateProcessing",
    "single": [{{"SpecialToken": {{"id": "q", "type_id": 0}}}}], "pair": [], "special_tokens": {{}}}}}}"""
NO_UNKNOWN = '{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}'
MERGED = {"tokenizer": None, "vocab": {"a": 0, "b": 1}, "merges": "#version: 0.2\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": None}, r"got no tokenizer in .*need tokenizer\.json, or vocab\.json and merges\.txt"),
        ({"tokenizer": "{"}, r"got a damaged .*tokenizer\.json"),
        ({"tokenizer": '{"model": 1}'}, r"got a damaged .*tokenizer\.json"),
        ({"tokenizer": PANIC_AT_LOAD}, r"got a damaged .*tokenizer\.json: Precompiled"),
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template .* is no text"),
        ({"tokenizer_config": {"chat_template": [{"name": "x"}]}}, "chat_template .* is no text"),
        ({"tokenizer_config": {"chat_template": {"default": None}}}, "chat_template .* is no text"),
        ({"tokenizer_config": "[1]"}, r"tokenizer_config\.json"),
        ({"tokenizer_config": "{nonsense"}, r"tokenizer_config\.json"),
        ({"tokenizer_config": {"eos_token": 3}}, "got 3 for a token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<x>"}}}}, "got token '<x>' with id 4 .* 9"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<x>"}}}}, "id is not a number"),
        ({"tokenizer_config": {"added_tokens_decoder": {"4": {"special": True}}}}, "for a token in"),
        ({"added_tokens": {"<x>": 2}}, "got token '<x>' with id 4 .* 2"),
        (MERGED, "with tokenizer_class None .*need one of Qwen2Tokenizer"),
        ({**MERGED, "tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}}, "tokenizer_class LlamaTokenizer"),
        ({**MERGED, "merges": "a c\n", "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}}, "damaged vocab"),
    ],
)
def test_damaged_directories(small: Callable[..., Path], files: Mapping[str, object], message: str):
    with pytest.raises(TextError, match=message):
        directory(small(**files))


@pytest.mark.parametrize("content", [PANIC_AT_USE, NO_UNKNOWN])
def test_a_tokenizer_that_fails_at_a_text(small: Callable[..., Path], content: str):
    ours = directory(small(tokenizer=content, tokenizer_config={}))
    with pytest.raises(TextError, match="got a tokenizer that fails on this text"):
        ours.encode("a")


def test_a_link_to_nowhere_is_a_damaged_file(small: Callable[..., Path]):
    place = small()
    (place / "tokenizer_config.json").unlink()
    (place / "tokenizer_config.json").symlink_to("gone")
    with pytest.raises(TextError, match=r"tokenizer_config\.json"):
        directory(place)


def test_gpt2_vocab_and_merges(small: Callable[..., Path]):
    files = {"vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ġab": 4}, "merges": "#version: 0.2\na b\nĠ ab\n"}
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    ours = directory(small(tokenizer=None, tokenizer_config=config, added_tokens={"<|endoftext|>": 5}, **files))
    assert ours.encode("ab ab  b<|endoftext|>") == [2, 4, 3, 3, 1, 5]
    assert ours.eos_ids == ours.special_ids == {5}
