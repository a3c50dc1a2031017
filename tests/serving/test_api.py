"""What the HTTP API answers: to the official client, to curl, to mistakes."""

import json
import re
import subprocess

import httpx
import openai
import pytest

from microllm import Engine, EngineConfig, SamplingParams, load

LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def oracle(tiny):
    """One request at a time, in this process."""
    return Engine(load(tiny, device="cpu", precision="fp32"), EngineConfig(scheduler="serial"))


def ask(client, content="Tell me", **more):
    more = {"temperature": 0, "max_tokens": 20, **more}
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], **more)


# ---- the official client


def test_chat_gives_what_the_engine_gives(client, oracle, settled):
    answer = ask(client)
    prompt = oracle.llm.tokenizer.encode_chat([{"role": "user", "content": "Tell me"}])
    want = oracle.generate(prompt, SamplingParams(temperature=0, max_tokens=20))
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (want.text, want.finish_reason)
    assert choice.message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(want.token_ids)
    assert answer.usage.total_tokens == len(prompt) + len(want.token_ids)
    assert answer.usage.model_extra == {"cold": False}
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.endswith("fp32-cpu")


def test_a_stream_joins_to_the_whole_answer(client, settled):
    whole = ask(client, seed=3, temperature=1.2, max_tokens=60)
    chunks = list(
        ask(client, seed=3, temperature=1.2, max_tokens=60, stream=True, stream_options={"include_usage": True})
    )
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[0].delta.role == "assistant"
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert all(part.finish_reason is None for part in parts[:-1])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_take_text_ids_and_lists(client, oracle, settled):
    ids = oracle.llm.tokenizer.encode("and the")
    greedy = {"temperature": 0, "max_tokens": 9}
    want = oracle.generate(ids, SamplingParams(**greedy)).text
    for prompt in ("and the", ids):
        assert client.completions.create(model="tiny", prompt=prompt, **greedy).choices[0].text == want
    for prompt in (["x", "and the"], [oracle.llm.tokenizer.encode("x"), ids]):
        choices = client.completions.create(model="tiny", prompt=prompt, **greedy).choices
        assert [choice.index for choice in choices] == [0, 1]
        assert choices[1].text == want
    text = "".join(
        c.choices[0].text for c in client.completions.create(model="tiny", prompt=ids, stream=True, **greedy)
    )
    assert text == want


def test_n_choices_differ_and_a_seed_repeats_them(client, settled):
    first, again = (ask(client, n=4, seed=7, temperature=1.5, max_tokens=30) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts == [choice.message.content for choice in again.choices]
    streamed = dict.fromkeys(range(4), "")
    for chunk in ask(client, n=4, seed=7, temperature=1.5, max_tokens=30, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_logprobs_are_the_engines(client, oracle, settled):
    prompt = oracle.llm.tokenizer.encode_chat([{"role": "user", "content": "Tell me"}])
    want = oracle.generate(prompt, SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True))
    more = {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
    content = ask(client, logprobs=True, top_logprobs=2, **more).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in want.logprobs])
    assert [bytes(entry.bytes) for entry in content] == [oracle.llm.tokenizer.token_bytes(i) for i in want.token_ids]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    streamed = [
        entry
        for chunk in ask(client, logprobs=True, top_logprobs=2, stream=True, **more)
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    found = client.completions.create(
        model="tiny", prompt=list(prompt), temperature=0, max_tokens=6, logprobs=2, extra_body={"ignore_eos": True}
    ).choices[0]
    assert found.logprobs.token_logprobs == [entry.logprob for entry in content]
    assert all(0 < len(top) <= 2 for top in found.logprobs.top_logprobs)  # two bytes may look alike
    assert found.logprobs.text_offset[0] == 0


def test_minus_infinity_is_a_number_that_json_has(server, settled):
    from microllm.serving.answers import Choice, Reply
    from microllm.serving.engine_client import Piece

    choice = Choice()
    choice.take(Piece(0, "a", [70], [[float("-inf"), [[70, float("-inf")]]]], "stop", {}))
    from microllm.io.resolve import resolve_model
    from microllm.io.tokenizer import load_tokenizer

    for kind in ("chat", "completion"):
        reply = Reply(
            kind=kind, id="x", created=0, model="tiny", fingerprint="f", num_prompt_tokens=1, has_logprobs=True,
            tokenizer=load_tokenizer(resolve_model("demo", offline=True)), include_usage=False, choices=[choice],
        )  # fmt: skip
        text = reply._delta(0, choice, "a")
        assert "-9999.0" in text
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_stop_text_across_tokens_ends_the_answer_and_does_not_leak(client, settled):
    more = {"seed": 11, "temperature": 1.0, "max_tokens": 80, "extra_body": {"ignore_eos": True}}
    text = ask(client, **more).choices[0].message.content
    stop = text[20:24]
    assert len(stop.encode()) >= 4
    stopped = ask(client, stop=[stop], **more)
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    shown = [chunk.choices[0].delta.content or "" for chunk in ask(client, stop=stop, stream=True, **more)]
    assert "".join(shown) == text[: text.index(stop)]


def test_models_say_what_is_served_and_what_is_applied(client, server):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 512
    assert model.checkpoint_sampling["top_k"] == 7
    assert model.checkpoint_sampling_applied is False
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_curl_works(server, settled):
    body = '{"model": "tiny", "prompt": "the", "max_tokens": 3, "temperature": 0, "stream": true}'
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") for line in lines[:-2])


def test_a_mixed_load_gets_what_one_request_at_a_time_gets(server, oracle, settled):
    """Mode B over HTTP: 24 requests at once, streamed and whole, of all kinds, against the serial engine."""
    import concurrent.futures

    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_k": 20, "seed": 6, "frequency_penalty": 0.5},
        {"temperature": 1.3, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.2},
    ]

    def run(number):
        body = {"model": "tiny", "prompt": "the and " * (number % 5 + 1) + str(number // 6), "max_tokens": 5 + number}
        body |= kinds[number % 4]
        if number % 3:
            return body, server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        return body, "".join(event["choices"][0]["text"] for event in events)

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        found = list(pool.map(run, range(24)))
    for body, text in found:
        params = {name: value for name, value in body.items() if name not in ("model", "prompt")}
        assert text == oracle.generate(body["prompt"], SamplingParams(**params)).text, body


# ---- mistakes


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"frobnicate": 1}, "frobnicate", "unknown parameter"),
        ({"tools": []}, "tools", "unknown parameter"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"temperature": 1e999}, "temperature", "less than"),
        ({"temperature": 1e-9}, "temperature", "0 or at least"),
        ({"max_tokens": 0}, "max_tokens", "greater than"),
        ({"max_tokens": 10**400}, "max_tokens", "less than"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"n": 129}, "n", "less than"),
        ({"n": 33}, None, "33 choices"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"top_logprobs": 3}, None, "logprobs=true"),
        ({"stop": [""]}, "stop", "at least 1"),
        ({"stop": ["x"] * 65}, None, "65 stop"),
        ({"logit_bias": {"999999": 1}}, None, "999999"),
        ({"logit_bias": {"x": 1}}, None, "logit_bias"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "system"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", ""),
        ({"messages": [{"role": "user", "content": "a<|end|>b"}]}, "messages", "control token '<|end|>'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"min_tokens": 600}, None, "min_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, None, "one of them"),
    ],
)
def test_a_mistake_is_named_at_once(settled, change, param, says):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **change}
    answer = settled.http.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert param is None or (error["param"] or "").startswith(param), error


@pytest.mark.parametrize("stream", [False, True])
def test_an_over_long_prompt_is_refused_before_anything_is_sent(settled, stream):
    answer = settled.chat("x" * 600, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert settled.complete([]).status_code == 400
    assert settled.complete([600]).status_code == 400


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[1]", b'"text"', b"\xff\xfe", b"{\"model\": \"\xff\"}", b"[" * 100_000, b'{"a":' * 50_000,
     b'{"model": ' + b"9" * 5000 + b"}", b"{\"model\": \"tiny\", \"messages\": NaN}", b"\x00" * 100],
)  # fmt: skip
def test_bad_json_is_a_client_error(settled, content):
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = settled.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.text) < 1000


@pytest.mark.parametrize("depth", [300, 900, 985])
def test_deep_nesting_anywhere_is_a_client_error(settled, depth):
    nested = "[" * depth + "]" * depth
    schema = '{"items":' * depth + "{}" + "}" * depth
    for text in (
        f'{{"model": "tiny", "messages": {nested}}}',
        f'{{"model": "tiny", "messages": [{{"role": "user", "content": {nested}}}]}}',
        f'{{"model": "tiny", "prompt": {nested}, "zzz": {nested}}}',
        '{"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], "response_format": '
        f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}}}',
    ):
        for path in ("/v1/chat/completions", "/v1/completions"):
            answer = settled.http.post(path, content=text, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), answer.text
            assert len(answer.text) < 2000


@pytest.mark.parametrize(
    "more",
    [{"\ud800": 1}, {"user": "\ud800"}, {"stop": "\ud800"},
     {"response_format": {"type": "choice", "choices": ["\ud800"]}},
     {"response_format": {"type": "regex", "regex": "\ud800"}}, {"model": "\ud800"}, {"prompt": "\ud800"},
     {"response_format": {"type": "json_schema", "json_schema": {"name": "\ud800", "schema": {"const": "\ud800"}}}}],
)  # fmt: skip
def test_lone_surrogates_are_no_server_error(settled, more):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, **more}
    answer = settled.http.post(
        "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404), answer.text
    answer.json()


def test_a_large_body_is_refused_whether_or_not_it_says_so(settled):
    body = b'{"model": "' + b"x" * (10 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    assert settled.http.post("/v1/completions", content=body, headers=headers).status_code == 413
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    try:
        answer = settled.http.post("/v1/completions", content=pieces, headers=headers)
        assert answer.status_code == 413
        assert "error" in answer.json()
    except httpx.WriteError:
        pass  # the server answered and closed while the client still wrote


def test_other_models_paths_and_methods(settled):
    assert settled.chat(model="gpt-4").json()["error"]["code"] == "model_not_found"
    for answer, status in (
        (settled.http.get("/v1/nothing"), 404),
        (settled.http.get("/v1/completions"), 405),
        (settled.http.post("/v1/completions", content=b"prompt=x"), 400),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_request_ids_are_logged_without_the_prompt(settled):
    answer = settled.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "secret words", "max_tokens": 2, "user": "ann"},
        headers={"x-request-id": "my-id.1"},
    )  # fmt: skip
    assert answer.headers["x-request-id"] == "my-id.1"
    (line,) = settled.wait_until(lambda: [each for each in settled.lines("request") if each["id"] == "my-id.1"])
    assert (line["status"], line["prompt_tokens"], line["user"]) == (200, 12, "ann")
    assert line["completion_tokens"] <= 2
    assert line["total_ms"] >= line["ttft_ms"] > 0
    assert "secret" not in settled.log.read_text()
    other = settled.http.get("/v1/models", headers={"x-request-id": "bad id " * 9 + "."})
    assert len(other.headers["x-request-id"]) == 24


def test_metrics_count(settled):
    before = settled.metric("microllm_generated_tokens_total"), settled.metric("microllm_prompt_tokens_total")
    answer = settled.complete("count me", max_tokens=7, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 7
    assert settled.metric("microllm_generated_tokens_total") == before[0] + 7
    assert settled.metric("microllm_prompt_tokens_total") == before[1] + answer["usage"]["prompt_tokens"]
    assert settled.metric("microllm_engine_up") == 1
    assert settled.metric("microllm_kv_bytes") > 0
    for name in ("time_to_first_token_seconds", "inter_token_seconds", "request_seconds"):
        assert settled.metric(f"microllm_{name}_count") > 0


# ---- structured output


def test_response_formats_hold(client, settled):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [1, 22, 333]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }  # fmt: skip
    hot = {"temperature": 1.5, "max_tokens": 60}
    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for seed in range(3):
        found = json.loads(ask(client, response_format=named, seed=seed, **hot).choices[0].message.content)
        assert set(found) == {"name", "age"}
    text = ask(client, response_format={"type": "json_object"}, seed=2, **hot).choices[0].message.content
    assert text.startswith("{")
    for form, pattern in (
        ({"type": "regex", "regex": "[ab]{4}"}, "[ab]{4}"),
        ({"type": "choice", "choices": ["yes", "no"]}, "yes|no"),
    ):
        body = {"prompt": "x", "response_format": form, "max_tokens": 20, "temperature": 1, "stream": True}
        answer = settled.http.post("/v1/completions", json={"model": "tiny", **body}).text
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        assert re.fullmatch(pattern, "".join(event["choices"][0]["text"] for event in events))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}, "Unsatisfiable"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "required"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}, "dictionary"),
        ({"type": "regex", "regex": "("}, "unclosed"),
        ({"type": "choice", "choices": []}, "at least 1"),
        ({"type": "grammar"}, "json_object"),
        ("json", "dictionary"),
    ],
)
def test_a_format_that_cannot_be_is_refused(settled, form, says):
    answer = settled.chat(response_format=form, stream=True)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_an_empty_schema_ends_as_length_and_says_so(client, settled):
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}
    choices = ask(client, response_format=form, n=4, seed=1, temperature=2, max_tokens=12).choices
    for choice in choices:
        if choice.finish_reason == "stop":
            json.loads(choice.message.content)
        else:
            assert choice.finish_reason == "length"
