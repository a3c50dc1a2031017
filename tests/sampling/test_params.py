"""Sampling parameters: what is taken, what is refused and in which words."""

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from microllm.errors import RequestError
from microllm.io.hf_config import GenerationDefaults
from microllm.sampling import SamplingParams

BAD = {
    "max_tokens": [0, -1, 1.0, True, "5", None, math.inf, 2**31],
    "min_tokens": [-1, 0.5, None],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, True, "1", None, 1e-7, 101, 10**400],
    "top_k": [-1, 2.0, True, None],
    "top_p": [0, -0.5, 1.5, math.nan, None],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, math.nan, math.inf],
    "presence_penalty": [2.5, -2.5, math.nan, True],
    "frequency_penalty": [2.5, -2.5, math.nan],
    "seed": [1.5, 2**63, -(2**63) - 1, True, "7"],
    "n": [0, 129, True, None],
    "stop": ["", ["a", ""], [1], None, 5, ["x"] * 65, ["x" * 513], b"end"],
    "stop_token_ids": [[-1], [1.5], [True], 7, "7", [0] * 65],
    "ignore_eos": [1, None, "yes"],
    "logit_bias": [{-1: 1}, {1: 101}, {1: math.nan}, {1: True}, {"a": 1}, {1.5: 1}, [1], dict.fromkeys(range(1025), 1)],
    "logprobs": [-1, 21, True, 1.0],
    "prompt_logprobs": [-1, 21, True],
    "json_schema": ["", "{", "[1]", "true", "x" * 100_001, {"type": "object"}, 5],
    "regex": ["", "x" * 100_001, b"a", 5],
    "one_of": [[""], ["x"] * 65, [1], None, 5],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in BAD.items() for v in values], ids=lambda v: repr(v)[:24]
)
def test_bad_values_are_refused_with_what_is_needed(name, value):
    with pytest.raises(RequestError, match=r"^got .*; need ") as caught:
        SamplingParams(**{name: value})
    words = {"stop": "stop", "stop_token_ids": "stop", "logit_bias": "bias"}
    assert words.get(name, name) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_every_field_has_a_bad_value():
    assert set(BAD) == {f.name for f in dataclasses.fields(SamplingParams)}


def test_no_tokens_points_to_score():
    with pytest.raises(RequestError, match=r"got max_tokens=0; need a whole number from 1 .*score\(\)"):
        SamplingParams(max_tokens=0)


def test_min_tokens_stay_within_max_tokens():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(RequestError, match="got min_tokens=6, max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_values_are_stored_in_one_form():
    params = SamplingParams(
        temperature=1, seed=np.int64(7), top_p=np.float32(0.5), stop="end", stop_token_ids=[3, 4], logit_bias={"5": 2}
    )
    assert params.stop == params.stop_texts == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {5: 2.0}
    assert [type(v) for v in (params.temperature, params.seed, params.top_p)] == [float, int, float]
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")


def test_parameters_are_frozen_hashable_and_travel():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias, stop=["x"])
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(dataclasses.replace(params, logit_bias={1: 3.0}))
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams.from_dict(json.loads(json.dumps(dataclasses.asdict(params)))) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5


def test_unknown_names_are_all_listed_with_near_ones():
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({"temperatur": 1, "max_new_tokens": 5, "zzz": None, "seed": 1})
    text = str(caught.value)
    assert "'temperatur' (did you mean 'temperature'?)" in text
    assert "'max_new_tokens' (did you mean 'max_tokens'?)" in text
    assert "'zzz'," not in text
    assert "'zzz';" in text
    assert "'seed'" not in text


def test_null_in_json_is_not_given():
    assert SamplingParams.from_dict({"stop": None, "temperature": None, "n": 2}) == SamplingParams(n=2)


def test_defaults_of_a_checkpoint():
    published = GenerationDefaults(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
    expected = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
    assert SamplingParams.from_defaults(published) == expected
    assert SamplingParams.from_defaults(GenerationDefaults()) == SamplingParams()
    greedy = GenerationDefaults(do_sample=False, temperature=0.7, max_new_tokens=9)
    assert SamplingParams.from_defaults(greedy) == SamplingParams(temperature=0, max_tokens=9)
