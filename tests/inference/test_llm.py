"""What a user calls: generate, stream, chat, logits, score, load; and what each refuses."""

import json
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import microllm
from microllm import SamplingParams
from microllm.errors import ConfigError, ModelNotFoundError, RequestError, TextError, UnavailableError
from microllm.inference import llm as llm_module
from microllm.inference import sequence as sequence_module
from microllm.io.checkpoint import save_checkpoint
from microllm.io.hf_config import GenerationDefaults
from microllm.model import Transformer
from microllm.sampling import StopChecker

EOS = 1
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=40, ignore_eos=True)


def test_one_prompt_gives_one_completion_and_a_list_gives_a_list(llm, prompts):
    one = llm.generate("the cat", SAMPLED)
    assert isinstance(one, microllm.Completion)
    assert one.prompt_token_ids == tuple(llm.tokenizer.encode("the cat"))
    assert one.text == llm.tokenizer.decode(one.token_ids)
    assert (one.finish_reason, len(one.token_ids), one.index, one.error) == ("length", 40, 0, None)
    ids = list(one.prompt_token_ids)
    for same in (llm.generate(ids, SAMPLED), *llm.generate(["the cat", ids, tuple(ids)], SAMPLED)):
        assert same.token_ids == one.token_ids
    many = llm.generate(prompts, replace(SAMPLED, n=2))
    assert [c.prompt_token_ids for c in many] == [tuple(llm.tokenizer.encode(p)) for p in prompts for _ in range(2)]
    assert [c.index for c in many] == [0, 1] * len(prompts)


def test_more_rows_than_a_batch_holds(llm, prompts, monkeypatch):
    expected = llm.generate(prompts, replace(SAMPLED, n=3))
    monkeypatch.setattr(llm_module, "MAX_ROWS", 4)
    assert [c.token_ids for c in llm.generate(prompts, replace(SAMPLED, n=3))] == [c.token_ids for c in expected]


def test_choices_at_temperature_0_are_equal(llm):
    choices = llm.generate(["the cat"], SamplingParams(temperature=0, n=3, max_tokens=10))
    assert len({c.token_ids for c in choices}) == 1


def test_a_seed_nobody_gave_is_recorded_and_repeats(llm):
    one, other = (llm.generate("the cat", replace(SAMPLED, seed=None)) for _ in range(2))
    assert one.seed != other.seed
    assert one.token_ids != other.token_ids
    assert llm.generate("the cat", replace(SAMPLED, seed=one.seed)).token_ids == one.token_ids
    drawn = llm.generate(["the cat", "the cat"], replace(SAMPLED, seed=None))
    assert drawn[0].seed != drawn[1].seed


def test_the_global_generator_plays_no_part(llm):
    torch.manual_seed(1)
    one = llm.generate("x", SAMPLED)
    state = torch.get_rng_state()
    assert llm.generate("x", SAMPLED).token_ids == one.token_ids
    assert torch.equal(torch.get_rng_state(), state)


def test_padding_of_the_vocabulary_is_never_chosen(llm):
    hot = SamplingParams(temperature=50.0, max_tokens=60, n=8, seed=0, ignore_eos=True)
    chosen = {token for c in llm.generate(["x"], hot) for token in c.token_ids}
    assert len(chosen) > 100
    assert max(chosen) < llm.tokenizer.num_tokens < llm.config.vocab_size


# ---- how a sequence ends


def test_stop_token_ids_end_it_and_stay_out_of_the_text(llm):
    free = llm.generate("the cat", SAMPLED)
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    stopped = llm.generate("the cat", replace(SAMPLED, stop_token_ids=[stop]))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == llm.tokenizer.decode(free.token_ids[:first])


def test_eos_ends_it_unless_ignored_and_not_before_min_tokens(llm):
    wants_eos = SamplingParams(temperature=0, max_tokens=6, logit_bias={EOS: 100})
    ended = llm.generate("x", wants_eos)
    assert (ended.token_ids, ended.text, ended.finish_reason) == ((EOS,), "", "stop")
    later = llm.generate("x", replace(wants_eos, min_tokens=3))
    assert len(later.token_ids) == 4
    assert later.token_ids.index(EOS) == 3
    ignoring = llm.generate("x", replace(wants_eos, ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == ((EOS,) * 6, "length")


def test_every_source_of_eos_counts(llm):
    llm = microllm.LLM(llm.model, llm.tokenizer, defaults=GenerationDefaults(eos_token_ids=(40, 10**6)))
    assert llm.eos_ids == {EOS, 40}


def test_stop_is_checked_before_length(llm):
    free = llm.generate("the cat", SAMPLED)
    at_the_end = replace(SAMPLED, max_tokens=1, stop_token_ids=[free.token_ids[0]])
    assert llm.generate("the cat", at_the_end).finish_reason == "stop"
    text = llm.tokenizer.decode(free.token_ids[:1])
    assert llm.generate("the cat", replace(SAMPLED, max_tokens=1, stop=text)).finish_reason == "stop"


def test_a_stop_text_that_the_last_cut_character_makes(llm):
    half = llm.tokenizer.encode("é")[1]  # the first of two bytes
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias={half: 100})
    assert llm.generate("x", params).text == "\N{REPLACEMENT CHARACTER}"
    stopped = llm.generate("x", replace(params, stop="\N{REPLACEMENT CHARACTER}"))
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 5))
def test_stop_texts_cut_and_stream_as_the_whole_text_does(llm, data, seed):
    free = llm.generate("the cat", replace(SAMPLED, seed=seed))
    start = data.draw(st.integers(0, len(free.text) - 2))
    stops = [free.text[start : start + data.draw(st.integers(1, 4))], "the the", free.text[5:8]]
    params = replace(SAMPLED, seed=seed, stop=stops)
    checker = StopChecker(stops)
    expected = checker.push(free.text)
    stopped = llm.generate("the cat", params)
    assert (stopped.text, stopped.finish_reason) == (expected, "stop")
    assert not any(stop in stopped.text for stop in stops)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert "".join(piece.text for piece in llm.stream("the cat", params)) == expected


def test_stop_texts_count_only_after_min_tokens(llm):
    free = llm.generate("the cat", SAMPLED)
    early = llm.tokenizer.decode(free.token_ids[:1])
    params = replace(SAMPLED, stop=early, min_tokens=20)
    stopped = llm.generate("the cat", params)
    assert len(stopped.token_ids) > 20
    assert stopped.text.startswith(early)
    assert llm.generate("the cat", replace(SAMPLED, stop=early)).text == ""
    assert llm.generate("the cat", replace(SAMPLED, stop=early, min_tokens=1)).text.startswith(early)


# ---- streams


def test_a_stream_is_the_completion_in_pieces(llm, prompts):
    for prompt in prompts:
        params = replace(SAMPLED, logprobs=2, stop=["q", "zz"])
        whole = llm.generate(prompt, params)
        stream = llm.stream(prompt, params)
        with pytest.raises(RequestError, match="still runs"):
            _ = stream.completion
        pieces = list(stream)
        assert "".join(p.text for p in pieces) == whole.text
        assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
        assert tuple(entry for p in pieces for entry in p.logprobs) == whole.logprobs
        assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
        assert replace(stream.completion, timings=whole.timings) == whole
        assert list(stream) == []


def test_closing_a_stream_cancels_the_rest(llm):
    with llm.stream("the cat", SAMPLED) as stream:
        pieces = [next(stream) for _ in range(5)]
    completion = stream.completion
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == tuple(t for p in pieces for t in p.token_ids)
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    stream.close()
    assert list(stream) == []
    assert stream.completion == completion


def test_a_stream_may_be_closed_before_its_first_token(llm):
    stream = llm.stream("the cat", SAMPLED)
    stream.close()
    completion = stream.completion
    assert (completion.finish_reason, completion.token_ids, completion.text) == ("cancelled", (), "")
    assert (completion.timings.ttft_ms, completion.timings.decode_tokens_per_s) == (None, None)


def test_an_interrupt_ends_the_stream_as_cancelled(llm, monkeypatch):
    stream = llm.stream("the cat", SAMPLED)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.model), "forward", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert stream.completion.finish_reason == "cancelled"
    assert llm.generate("the cat", SAMPLED).finish_reason == "length"


def test_another_thread_may_read_and_close_a_stream(llm, monkeypatch):
    inside, errors = threading.Event(), []
    forward = type(llm.model).forward

    def slow(*args, **options):
        inside.set()
        time.sleep(0.02)
        return forward(*args, **options)

    def read():
        try:
            list(stream)
        except Exception as error:  # noqa: BLE001  (whatever it is, the test names it)
            errors.append(error)

    monkeypatch.setattr(type(llm.model), "forward", slow)
    stream = llm.stream("the cat", SAMPLED)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert inside.wait(10)
    stream.close()
    for reader in readers:
        reader.join()
    assert errors == []
    assert stream.completion.finish_reason == "cancelled"


def test_calls_inside_a_stream_and_from_threads_do_not_disturb_each_other(llm, prompts):
    expected = [llm.generate(p, SAMPLED).token_ids for p in prompts]
    stream = llm.stream(prompts[0], SAMPLED)
    head = [next(stream).token_ids[0] for _ in range(3)]
    answers = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: llm.generate(prompts[i], SAMPLED).token_ids}))
        for i in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(prompts))] == expected
    assert (*head, *(p.token_ids[0] for p in stream)) == expected[0]


# ---- chat


def test_chat_applies_the_template_with_one_bos(llm):
    messages = [{"role": "user", "content": "Hello"}]
    completion = llm.chat(messages, SAMPLED)
    prompt = llm.tokenizer.decode(completion.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<s><user>Hello<assistant>"
    assert completion.prompt_token_ids.count(0) == 1
    stream = llm.chat(messages, SAMPLED, stream=True)
    assert "".join(p.text for p in stream) == completion.text
    with pytest.raises(TextError):
        llm.chat([], SAMPLED)


# ---- log-probabilities


def test_logprobs_are_those_of_the_models_logits(llm):
    params = replace(SAMPLED, logprobs=3, prompt_logprobs=0, logit_bias={50: 5.0}, presence_penalty=1.0)
    c = llm.generate("the cat", params)
    ids = c.prompt_token_ids + c.token_ids
    expected = llm.logits(ids[:-1]).double().log_softmax(dim=1)
    got = [*c.prompt_logprobs, *c.logprobs]
    assert len(got) == len(ids)
    assert got[0] is None
    assert [e.token_id for e in got[1:]] == list(ids[1:])
    assert [e.logprob for e in got[1:]] == pytest.approx(
        [row[t].item() for row, t in zip(expected, ids[1:], strict=True)], abs=1e-4
    )
    assert {len(e.top) for e in c.prompt_logprobs[1:]} == {0}
    for row, entry in zip(expected[len(c.prompt_token_ids) - 1 :], c.logprobs, strict=True):
        best = row.topk(3)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert llm.generate("the cat", SAMPLED).logprobs is None


def test_rows_that_want_logprobs_share_a_batch_with_rows_that_want_none(llm):
    both = llm.generate(["the cat", "x"], replace(SAMPLED, logprobs=1))
    assert [len(c.logprobs) for c in both] == [40, 40]
    assert both[1].token_ids == llm.generate("x", SAMPLED).token_ids


def test_score_is_the_sum_of_the_prompts_logprobs(llm, prompts):
    texts = [p for p in prompts if p]
    scores = llm.score(texts)
    for text, score in zip(texts, scores, strict=True):
        ids = llm.tokenizer.encode(text)
        table = llm.logits(ids).double().log_softmax(dim=1)
        expected = [table[i, t].item() for i, t in enumerate(ids[1:])]
        assert score.logprobs[0] is None
        assert list(score.logprobs[1:]) == pytest.approx(expected, abs=1e-4)
        assert score.num_tokens == len(ids) - 1
        assert score.sum_logprob == pytest.approx(sum(expected), abs=1e-3)
        assert score.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
    assert llm.score(texts[0]) == scores[0]


def test_a_text_of_one_token_has_no_perplexity(llm):
    score = llm.score([7])
    assert (score.logprobs, score.sum_logprob, score.num_tokens, score.perplexity) == ((None,), 0.0, 0, None)


def test_logits_may_be_of_the_last_token_alone(llm):
    ids = llm.tokenizer.encode("the cat")
    whole = llm.logits(ids)
    assert whole.shape == (len(ids), llm.config.vocab_size)
    assert torch.allclose(llm.logits("the cat", last_only=True), whole[-1:], atol=1e-5)
    full = llm.logits([5] * llm.config.max_position_embeddings)
    assert full.shape[0] == llm.config.max_position_embeddings
    assert not full.requires_grad


# ---- refusals


@pytest.mark.parametrize("call", ["generate", "stream", "score", "logits"])
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "got an empty prompt"),
        ([5] * 97, "got a prompt of 97 tokens; need at most"),
        ([5, 280], r"got token ids \[280\] in the prompt; need ids from 0 to 279"),
        ([5, -1], r"got token ids \[-1\]"),
        ([5, 1.5], "need text or ids"),
        ([5, "a"], "need text or ids"),
        ([True, False], "need text or ids"),
        (b"text", "got a prompt of bytes: .*; need text or ids"),
        ({5: 6}, "got a prompt of dict"),
        ({5, 6}, "got a prompt of set"),
        (5, "got a prompt of int"),
        (None, "got a prompt of NoneType"),
    ],
)
def test_bad_prompts_are_refused(llm, call, prompt, words):
    with pytest.raises(RequestError, match=words):
        getattr(llm, call)(prompt)


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, "greedy"])
def test_parameters_of_another_type_are_refused(llm, call, params):
    with pytest.raises(RequestError, match=r"got params of type (dict|str); need SamplingParams"):
        getattr(llm, call)("x", params)


def test_arrays_and_tensors_of_ids_are_prompts(llm):
    want = llm.generate([5, 6, 7], SAMPLED).token_ids
    assert llm.generate(np.array([5, 6, 7]), SAMPLED).token_ids == want
    assert llm.generate(torch.tensor([[5, 6, 7]]), SAMPLED)[0].token_ids == want


def test_a_prompt_must_leave_room_for_one_token(llm):
    context = llm.config.max_position_embeddings
    with pytest.raises(RequestError, match=f"got a prompt of {context} tokens; need at most {context - 1}"):
        llm.generate([5] * context)
    assert len(llm.generate([5] * (context - 1), SAMPLED).token_ids) == 1


def test_one_bad_prompt_refuses_the_batch_before_anything_runs(llm, monkeypatch):
    monkeypatch.setattr(type(llm.model), "forward", lambda *a, **k: pytest.fail("the model ran"))
    for bad in ([[5], []], ["x", [999]], ["x", 5]):
        with pytest.raises(RequestError):
            llm.generate(bad, SAMPLED)


@pytest.mark.parametrize("change", [{"stop_token_ids": [280]}, {"logit_bias": {280: 1.0}}])
def test_token_ids_outside_the_vocabulary_are_refused(llm, change):
    with pytest.raises(RequestError, match=rf"got token ids \[280\] in {next(iter(change))}"):
        llm.generate("x", replace(SAMPLED, **change))


def test_several_choices_need_a_list_of_prompts(llm):
    with pytest.raises(RequestError, match=r"got n=2 for one prompt; need n=1; pass \[prompt\]"):
        llm.generate("x", replace(SAMPLED, n=2))


# ---- what is reported


def test_a_completion_is_plain_data(llm):
    completion = llm.generate("the cat", replace(SAMPLED, logprobs=1, prompt_logprobs=1))
    data = json.loads(json.dumps(completion.to_dict()))
    assert data["text"] == completion.text
    assert data["token_ids"] == list(completion.token_ids)
    assert data["finish_reason"] == "length"
    assert data["logprobs"][0]["top"][0] == list(completion.logprobs[0].top[0])
    assert data["timings"]["ttft_ms"] > 0


def test_numbers_that_are_not_finite_are_null_in_json_and_no_score(spoiled):
    data = spoiled.generate("a!b", replace(SAMPLED, prompt_logprobs=1)).to_dict()
    assert data["finish_reason"] == "error"
    assert json.loads(json.dumps(data, allow_nan=False))["prompt_logprobs"][-1]["logprob"] is None
    with pytest.raises(RequestError, match=r"got non-finite logits at token \d of a text"):
        spoiled.score("a!b")


def test_times_count_the_tokens_that_cost_a_step(llm, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(sequence_module.time, "perf_counter", lambda: next(clock))
    times = llm.generate("x", replace(SAMPLED, max_tokens=5)).timings  # 0 made, 1 started, 2 first token, 3 ended
    assert (times.prefill_ms, times.ttft_ms, times.total_ms) == (1000, 2000, 3000)
    assert times.decode_tokens_per_s == 4


def test_the_checkpoints_defaults_apply_only_when_passed(llm):
    published = GenerationDefaults(do_sample=True, temperature=0.2, top_k=1, repetition_penalty=1.2)
    advised = microllm.LLM(llm.model, llm.tokenizer, defaults=published)
    assert advised.default_params == SamplingParams(temperature=0.2, top_k=1, repetition_penalty=1.2)
    assert llm.default_params == SamplingParams()
    seeded = SamplingParams(seed=4, max_tokens=20)
    assert advised.generate("x", seeded).token_ids == llm.generate("x", seeded).token_ids
    assert (
        advised.generate("x", replace(advised.default_params, seed=4)).token_ids != llm.generate("x", seeded).token_ids
    )


# ---- load


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device": "tpu"}, ConfigError, "got device 'tpu'; need auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, ConfigError, "got device 'cuda:x'"),
        ({"device": "cuda:99"}, UnavailableError, "got device 'cuda:99'; torch .* sees"),
        ({"device": None}, ConfigError, "got device None"),
        ({"device": torch.device("cpu")}, ConfigError, r"got device device\(type='cpu'\)"),
        ({"device": "cuda:" + "9" * 5000}, ConfigError, "got device 'cuda:999"),
        ({"precision": ["fp32"]}, ConfigError, r"got precision \['fp32'\]"),
        ({"name": None}, ModelNotFoundError, "got a model name of type NoneType"),
        ({"precision": "int3"}, ConfigError, "got precision 'int3'; need auto or one of fp32, bf16, fp16"),
        ({}, ModelNotFoundError, "no-such-model"),
    ],
)
def test_load_refuses_what_cannot_be(options, error, words):
    with pytest.raises(error, match=words):
        microllm.load(**({"name": "no-such-model"} | options))


@pytest.mark.parametrize(
    ("precision", "became", "dtype"),
    [("auto", "fp32", torch.float32), ("bf16", "bf16", torch.float32), ("fp16", "fp16", torch.float16)],
)
def test_load_a_directory(llm, tmp_path, precision, became, dtype):
    tokenizer_json = llm.tokenizer._backend.to_str().encode()
    text_files = {
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode(),
    }
    state = {name: tensor.bfloat16() for name, tensor in llm.model.state_dict().items()}
    config = replace(llm.config, dtype="bfloat16")
    defaults = GenerationDefaults(temperature=0.3, eos_token_ids=(EOS, 9))
    path = save_checkpoint(tmp_path / "tiny", config, state, generation=defaults, text_files=text_files)
    loaded = microllm.load(path, device="cpu", precision=precision)
    assert (loaded.precision, loaded.dtype, loaded.device.type) == (became, dtype, "cpu")
    assert isinstance(loaded.transformer, Transformer)
    assert loaded.eos_ids == {EOS, 9}
    assert loaded.default_params.temperature == 0.3
    completion = loaded.generate("the cat", SamplingParams(temperature=0, max_tokens=8))
    assert completion.text == loaded.tokenizer.decode(completion.token_ids)
    assert loaded.generate("the cat", SamplingParams(temperature=0, max_tokens=8)).token_ids == completion.token_ids
