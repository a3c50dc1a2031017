"""The probe passes on every family, whatever the thread count, and fails when something is really different."""

import json

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from microllm.cli import main
from microllm.config import preset
from microllm.errors import ConfigError
from microllm.inference import LLM
from microllm.inference.runner import ModelRunner
from microllm.io.tokenizer import Tokenizer
from microllm.io.tokenizer_parts import TokenizerParts
from microllm.lab import probe as probe_module
from microllm.lab.probe import ProbeConfig, ProbeResult, probe_batch_invariance
from microllm.model import Transformer

# 176 and 301 are no multiples of a vector: what torch rounds differently at the end of a tensor shows here.
SHAPE = {
    "vocab_size": 301, "hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 1, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "llama": preset("tiny", **SHAPE, tie_word_embeddings=True),
    "qwen2": preset("tiny", **SHAPE, family="qwen2", qkv_bias=True),
    "qwen3": preset("tiny", **SHAPE, family="qwen3", qk_norm=True),
}


def llm_of(family, dtype=torch.float32):
    names = [f"t{i}" for i in range(SHAPE["vocab_size"])]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("t0", special=True)])
    tokenizer = Tokenizer(TokenizerParts(backend=backend, roles={}, eos_ids=frozenset(), templates={}))
    return LLM(Transformer(FAMILIES[family], dtype=dtype).initialise(1, std=0.2).eval(), tokenizer, name=family)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_surrounding_gives_the_same_bits_whatever_the_threads(threads):
    family = list(FAMILIES)[threads - 1]
    results = probe_batch_invariance(llm_of(family), ProbeConfig(strangers=3, max_tokens=10))
    assert [r for r in results if not r.passed] == []
    assert len(results) == 11


def test_other_dtypes_too():
    results = probe_batch_invariance(
        llm_of("qwen3", torch.bfloat16), ProbeConfig(strangers=2, max_tokens=10, kv_dtype="fp8")
    )
    assert [r for r in results if not r.passed] == []


def test_a_last_bit_that_knows_the_batch_is_found(monkeypatch):
    run = ModelRunner.run

    def spoiled(self, chunks):
        logits, firsts = run(self, chunks)
        return (torch.nextafter(logits, logits + 1) if len(chunks) > 1 else logits), firsts

    monkeypatch.setattr(ModelRunner, "run", spoiled)
    results = probe_batch_invariance(llm_of("llama"), ProbeConfig(strangers=2, max_tokens=10))
    assert {r.case for r in results if not r.passed} == {"first of 3", "last of 3", "amid 2 strangers"} | {
        "after a preemption"
    }
    assert "log-probabilities of token" in next(r.detail for r in results if not r.passed)


def test_a_case_that_is_not_what_it_claims_fails(monkeypatch):
    config = probe_module.EngineConfig
    monkeypatch.setattr(probe_module, "EngineConfig", lambda **options: config(**options, prefix_cache=False))
    results = probe_batch_invariance(llm_of("llama"), ProbeConfig(strangers=1, max_tokens=10))
    assert {r.case: r.detail for r in results if not r.passed} == {
        "after a prefix hit": "greedy: no page was found again; sampled: no page was found again"
    }


def test_guesses_that_are_never_right_fail_their_case(monkeypatch):
    monkeypatch.setattr(probe_module._Oracle, "__call__", lambda self, tokens, most: [self._ids[0]] * min(most, 1))
    results = probe_batch_invariance(llm_of("llama"), ProbeConfig(strangers=1, max_tokens=10))
    (failed,) = (r for r in results if not r.passed)
    assert failed.case == "with speculation"
    assert "greedy: 0 of " in failed.detail
    assert "guesses were right" in failed.detail


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [58, 88])
def test_long_answers_fit_and_longer_ones_than_the_context_are_refused(max_tokens):
    results = probe_batch_invariance(llm_of("llama"), ProbeConfig(strangers=1, max_tokens=max_tokens))
    assert [r for r in results if not r.passed] == []
    with pytest.raises(ConfigError, match="got max_tokens=89; need at most 88, the context after the prompt"):
        probe_batch_invariance(llm_of("llama"), ProbeConfig(max_tokens=89))


def test_the_command_prints_a_verdict_and_says_so_in_its_status(monkeypatch, capsys):
    results = [ProbeResult("first of 4", True, "", 0.1), ProbeResult("last of 4", False, "token 3 is 5, alone 4", 0.2)]
    precisions = []
    monkeypatch.setattr(
        "microllm.inference.load", lambda *_, precision, **__: precisions.append(precision) or llm_of("llama")
    )
    monkeypatch.setattr(probe_module, "probe_batch_invariance", lambda llm, config: results[: config.strangers])
    command = ["probe", "batch-invariance", "--device", "cpu", "--model", "demo", "--strangers"]
    assert main([*command, "1"]) == 0
    assert "1 of 1 surroundings give the bits of the request alone (llama in fp32 on cpu)" in capsys.readouterr().out
    assert main([*command, "2"]) == 1
    assert "DIFFERS" in (text := capsys.readouterr().out)
    assert "token 3 is 5, alone 4" in text
    assert precisions == ["fp32"] * 2
    assert main([*command, "2", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], [r["passed"] for r in found["results"]]) == (False, [True, False])


@pytest.mark.parametrize("options", [{"strangers": 0}, {"max_tokens": 9}])
def test_options_that_test_nothing_are_refused(options):
    with pytest.raises(ConfigError, match="need at least 1 and at least 10"):
        ProbeConfig(**options)
