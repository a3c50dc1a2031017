"""Answers held to a schema, a regular expression or a list of texts: by any model, hot or greedy, in any batch."""

import contextlib
import json
import re
import time

import pytest
import torch

from microllm import Engine, EngineConfig, SamplingParams
from microllm.errors import RequestError
from microllm.inference import LLM
from microllm.sampling import Grammar

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.5, "seed": 3}


def held(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, **more})


def is_person(text):
    found = json.loads(text)
    return set(found) == {"name", "age"} and len(found["name"]) <= 8 and 0 <= found["age"] <= 99


CASES = [
    ({"json_schema": json.dumps(PERSON)}, is_person),
    ({"regex": r"[a-c]{3}-\d{2}/x"}, lambda text: re.fullmatch(r"[a-c]{3}-\d{2}/x", text)),
    ({"one_of": ["yes", 'say "no"', "back\\slash", "neue\nZeile 🙂"]}, lambda text: text in CASES[2][0]["one_of"]),
    ({"json_schema": '{"enum": [1, "two", null]}'}, lambda text: json.loads(text) in (1, "two", None)),
]


@pytest.mark.parametrize(("grammar", "holds"), CASES)
@pytest.mark.parametrize("sampling", [{}, HOT, {**HOT, "top_k": 5, "repetition_penalty": 2.0}])
def test_the_answer_satisfies_its_grammar_and_ends_by_itself(llm, grammar, holds, sampling):
    for answer in (
        llm.generate("the", held(**grammar, **sampling)),
        Engine(llm).generate("the", held(**grammar, **sampling)),
    ):
        assert answer.finish_reason == "stop", answer
        assert holds(answer.text), answer.text


def test_rows_of_one_batch_keep_their_own_policies(llm):
    kinds = [held(**grammar, **HOT) for grammar, _ in CASES] + [held(**HOT), held(max_tokens=9)]
    for options in ({}, {"deterministic": False}, {"speculate": 4}):
        engine = Engine(llm, EngineConfig(max_rows=8, **options))
        requests = [engine.add("the the the", kind)[0] for kind in kinds]
        while engine.has_work:
            engine.step()
        for (_, holds), request in zip(CASES, requests, strict=False):
            assert holds(request.completion.text)
        if "deterministic" not in options:
            alone = [llm.generate("the the the", kind) for kind in kinds]
            assert [r.completion.token_ids for r in requests] == [each.token_ids for each in alone]


def test_a_preempted_request_goes_on_within_its_grammar(llm):
    size = 16 * llm.config.kv_bytes_per_token("float32")
    engine = Engine(llm, EngineConfig(max_rows=2, kv_bytes=6 * size))
    params = held(json_schema='{"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 20}', **HOT)
    requests = [engine.add("t" * 20, params)[0], engine.add("h" * 20, params)[0]]
    while engine.has_work:
        engine.step()
    assert engine.report().num_preemptions > 0
    for request in requests:
        full = llm.generate("t" * 20 if request is requests[0] else "h" * 20, params)
        assert request.completion.token_ids == full.token_ids


def test_an_empty_schema_and_any_object_end_as_length_at_worst(llm):
    for schema in ("{}", '{"type": "object"}'):
        answer = llm.generate("the", held(json_schema=schema, max_tokens=20, **HOT))
        assert answer.finish_reason in ("stop", "length")
        assert not re.search(r"\s{2}|\n", answer.text.partition('"')[0])
        if answer.finish_reason == "stop":
            json.loads(answer.text)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "Unsatisfiable"),
        ({"json_schema": '{"enum": []}'}, "Unsatisfiable"),
        ({"json_schema": '{"not": {}}'}, "not"),
        ({"json_schema": '{"$ref": "#/x"}'}, "does not exist"),
        ({"regex": "("}, "unclosed"),
        ({"regex": "a(?=b)"}, "look"),
        ({"json_schema": '{"items": ' * 300 + "{}" + "}" * 300}, "recursion"),
    ],
)
def test_what_cannot_be_satisfied_is_refused_before_anything_runs(llm, grammar, says):
    with pytest.raises(RequestError, match=says):
        llm.generate("the", held(**grammar))


@pytest.mark.parametrize(
    "grammar",
    [{"json_schema": "{"}, {"json_schema": "[1]"}, {"json_schema": "true"}, {"json_schema": ""},
     {"json_schema": "[" * 9999}, {"regex": ""},
     {"regex": "x" * 100_001}, {"one_of": [""]}, {"one_of": ["x"] * 65}, {"regex": "a", "one_of": ["a"]}],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_as_a_parameter(grammar):
    with pytest.raises(RequestError, match="need"):
        SamplingParams(**grammar)


def test_a_grammar_that_fails_half_way_ends_its_row_alone(llm, monkeypatch):
    forbid = Grammar.forbid

    def failing(self, logits):
        if self._matcher.is_accepting():
            raise RequestError("got a planted failure; need none")
        forbid(self, logits)

    monkeypatch.setattr(Grammar, "forbid", failing)
    for deterministic in (True, False):
        engine = Engine(llm, EngineConfig(max_rows=4, deterministic=deterministic))
        kinds = [held(max_tokens=9, ignore_eos=True), held(regex="a+"), held(regex="[bc]{3}")]
        requests = [engine.add("the", kind)[0] for kind in kinds]
        while engine.has_work:
            engine.step()
        assert [request.finish_reason for request in requests] == ["length", "error", "stop"]
        assert "planted" in requests[1].completion.error


def test_a_grammar_without_end_costs_its_own_request_and_little_time(llm):
    engine = Engine(llm, EngineConfig(max_rows=2))
    (other,) = engine.add("the", held(max_tokens=9, ignore_eos=True))
    started = time.monotonic()
    with contextlib.suppress(RequestError):
        engine.add("the", held(regex="(((((x{999}){999}){999}){999}){999})", max_tokens=3))
    while engine.has_work:
        engine.step()
    assert other.finish_reason == "length"
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_mask_forbids_all_but_what_may_follow(llm: LLM, device):
    grammar = Grammar(SamplingParams(one_of=["the", "x"]), llm.tokenizer, llm.eos_ids)
    logits = torch.zeros(llm.config.vocab_size, device=device)
    grammar.forbid(logits)
    allowed = {llm.tokenizer.decode([i]) for i in logits.isfinite().nonzero()[:, 0].tolist()}
    assert allowed == {"t", "th", "the", "x"}
    (token,) = llm.tokenizer.encode("x")[-1:]
    grammar.accept(token)
    assert grammar.is_over
