"""Rendered prompts equal transformers' byte for byte; hostile templates and wrong messages are refused by name."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import jinja2
import pytest
import tokenizers
from tokenizers import AddedToken, models

from microllm.errors import TextError
from microllm.io import chat_template
from microllm.io.chat_template import ChatTemplate
from microllm.io.tokenizer import Tokenizer
from microllm.io.tokenizer_parts import TokenizerParts

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
ROLES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
USER = [{"role": "user", "content": "Hi"}]
WEATHER_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Wetter für <Ort> & "Zeit" — 天气',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": 1}}}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "What is 2 < 3 & 'é' in 世界?\n"}],
    "turns": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "Hello <|im_end|>"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
        {"role": "user", "content": "again  "},
        {"role": "assistant", "content": "Yes", "reasoning": "\nthey said again\n"},
        {"role": "user", "content": "and?"},
    ],
    "tool call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": '{"t": 21}'},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "dry"},
        {"role": "assistant", "content": "21", "thinking": "so"},
    ],
    "none values": [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ],
    "many turns": [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(11)],
    "roles": [{"role": "user", "content": "x"}, {"role": "note", "content": "n"}, {"role": "nobody", "content": "y"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
}
VARIABLES = (
    {},
    {"enable_thinking": False, "date_string": "1 Jan 2026", "builtin_tools": ["search", "code_interpreter"]},
)


@pytest.fixture(scope="module")
def reference():
    """A transformers tokenizer whose vocabulary does not matter: only its template renderer is used."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), **ROLES)


@pytest.fixture(scope="module", params=["qwen2.5", "constructs", "smollm2", "qwen3", "llama31"])
def template(request: pytest.FixtureRequest) -> str:
    path = TEMPLATES / f"{request.param}.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    return request.getfixturevalue(request.param).chat_template


def test_equal_to_transformers(template: str, reference):
    compiled = ChatTemplate(template)
    rendered = 0
    cases = itertools.product(CONVERSATIONS.items(), (None, WEATHER_TOOLS), (True, False), VARIABLES)
    for (name, messages), tools, prompt, variables in cases:
        case = f"{name}, tools {tools is not None}, prompt {prompt}, {variables}"
        try:
            expected = reference.apply_chat_template(
                messages,
                chat_template=template,
                tools=tools,
                add_generation_prompt=prompt,
                tokenize=False,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, AttributeError):  # what templates raise on messages they refuse
            with pytest.raises(TextError):
                compiled.render(messages, add_generation_prompt=prompt, tools=tools, variables={**ROLES, **variables})
        else:
            got = compiled.render(messages, add_generation_prompt=prompt, tools=tools, variables={**ROLES, **variables})
            assert got == expected, case
            rendered += 1
    assert rendered >= 32  # of 56: a template may refuse some conversations, not most


def test_pinned_prompts(smollm2: Tokenizer, qwen3: Tokenizer):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert smollm2.render_chat(USER) == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    closed = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert qwen3.render_chat(USER, variables={"enable_thinking": False}) == closed
    assert qwen3.render_chat(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__ }}",
        "{{ lipsum.__globals__.os }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '%s'.__mod__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
        "{{ (messages|items if false else messages|map('trim')).gi_frame }}",
    ],
)
def test_python_internals_are_out_of_reach(source: str):
    with pytest.raises(TextError, match="got a chat template that reaches outside its sandbox in line 1"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize("source", ["{% include 'secret' %}", "{% import 'os' as os %}", "{% extends 'other' %}"])
def test_no_other_file_is_read(source: str):
    with pytest.raises(TextError, match="the chat template failed in line 1"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro g(n) %}{% if n %}{% call twice() %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(60) }}",
    ],
)
def test_a_template_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TextError, match=r"did not end in 0\.2 s"):
        ChatTemplate(source).render(USER)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10000000) }}", "Range too big"),
        ("{{ 'a' * 1000000000 }}", "repeats 1 items 1000000000 times"),
        ("{{ 1000000000 * messages }}", "repeats 1 items 1000000000 times"),
        ("{{ 10 ** 10 ** 10 }}", "computes a power"),
        ("{% for i in range(1000) %}{{ 'a' * 100000 }}{% endfor %}", "writes more than 16777216 characters"),
    ],
)
def test_work_and_output_are_bounded(source: str, message: str):
    with pytest.raises(TextError, match=message):
        ChatTemplate(source).render(USER)


def test_bounds_do_not_touch_ordinary_work():
    long = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(2000)]
    source = "{% for m in messages %}{{ m.content * 2 }}{{ 2 * 3 }}{% endfor %}"
    assert ChatTemplate(source).render(long) == "".join(m["content"] * 2 + "6" for m in long)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ok\n{% for m in messages %}\n", "syntax error in line 2"),
        ("a\nb\n{{ messages[0 }}", "syntax error in line 3"),
        ("{% endgeneration %}", "syntax error in line 1.*endgeneration"),
        ("{% break %}", "does not compile"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "does not compile"),
    ],
)
def test_a_broken_template_says_where(source: str, message: str):
    with pytest.raises(TextError, match=message):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n{{ 1 // 0 }}", "failed in line 3: ZeroDivisionError"),
        ("\n{{ messages[7].content }}", "failed in line 2: UndefinedError"),
        ("{{ messages[0].content + 1 }}", "failed in line 1: TypeError"),
        ("{{ raise_exception('Only one system message!') }}", "refused these messages: Only one system message!"),
    ],
)
def test_a_failing_template_says_where(source: str, message: str):
    with pytest.raises(TextError, match=message):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "got no messages"),
        ("Hello", "got messages of type str"),
        ({"role": "user", "content": "x"}, "got messages of type dict"),
        (["Hello"], r"got messages\[0\] of type str"),
        ([*USER, {"content": "x"}], r"got messages\[1\] with role None"),
        ([{"role": "", "content": "x"}], r"got messages\[0\] with role ''"),
        ([{"role": 3, "content": "x"}], r"got messages\[0\] with role 3"),
        ([{"role": "user"}], r"got messages\[0\] \(user\) without content"),
        ([{"role": "user", "content": None}], "without content"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": {"text": "x"}}], "content of type dict"),
        ([{"role": "user", "content": "x", "extra": object()}], r"got messages\[0\].extra of type object"),
        ([{"role": "user", "content": [{"data": b"x"}]}], r"got messages\[0\].content\[0\].data of type bytes"),
    ],
)
def test_wrong_messages_are_named(messages: object, message: str):
    with pytest.raises(TextError, match=message):
        ChatTemplate("{{ messages }}").render(messages)


def test_data_that_never_ends_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TextError, match="nested more than 100 deep"):
        ChatTemplate("x").render([{"role": "user", "content": loop}])
    with pytest.raises(TextError, match="tools that are not all dicts"):
        ChatTemplate("x").render(USER, tools=[print])


def test_callers_messages_stay_as_they_were():
    messages = json.loads(json.dumps(CONVERSATIONS["none values"]))
    ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}").render(messages, variables={"x": (1, 2)})
    assert messages == CONVERSATIONS["none values"]


def with_templates(**templates: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    return Tokenizer(TokenizerParts(backend, {"bos_token": "<s>"}, templates=templates))


def test_the_template_is_chosen_by_name():
    both = with_templates(default="{{ bos_token }}plain", tool_use="{{ bos_token }}tools")
    assert both.chat_template == "{{ bos_token }}plain"
    assert both.render_chat(USER) == "<s>plain"
    assert both.render_chat(USER, tools=WEATHER_TOOLS) == "<s>tools"
    assert both.render_chat(USER, variables={"bos_token": "B"}) == "Bplain"
    assert with_templates(default="d").render_chat(USER, tools=WEATHER_TOOLS) == "d"


def test_no_template_says_what_to_do():
    with pytest.raises(TextError, match=r"got a tokenizer with no chat template.*pass a raw prompt"):
        with_templates().render_chat(USER)
    with pytest.raises(TextError, match=r"chat templates \['rag', 'tool_use'\] only"):
        with_templates(rag="x", tool_use="y").render_chat(USER)


GROW = "{% set ns = namespace(v='ab', l=[]) %}{% for i in range(60) %}{% set ns.v = "
HOSTILE = [
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'|center(1000000000) }}",
    "{{ ('a'|attr('zfill'))(1000000000) }}",
    "{{ (5).to_bytes(1000000000, 'big') }}",
    "{{ 'a\nb'|indent(1000000000) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%((a))999999999d' % {'(a)': 1} }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ messages|tojson(separators=('a' * 1000000, 'b')) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ lipsum(n=100000) }}",
    "{% autoescape 'a'|center(1000000000) %}{% endautoescape %}",
    "{{ ('a' * 1000000)|replace('', 'b' * 1000000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ range(100000)|join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join(range(100000)|map('string')) }}",
    GROW + "ns.v ~ ns.v %}{% endfor %}",
    GROW + "ns.v + ns.v %}{% endfor %}",
    GROW + "[ns.v, ns.v] %}{% endfor %}{{ ns.v }}",
    GROW + "[ns.v, ns.v] %}{% endfor %}{{ ns.v|tojson }}",
    GROW + "[ns.v, ns.v] %}{% endfor %}{{ raise_exception(ns.v) }}",
    GROW + "[ns.v, ns.v]|join %}{% endfor %}",
    GROW + "ns.v.replace('a', 'aa') %}{% endfor %}",
    GROW + "ns.v|replace('a', 'aa') %}{% endfor %}",
    GROW + "'%s%s' % (ns.v, ns.v) %}{% endfor %}",
    GROW + "'{0}{0}'.format(ns.v) %}{% endfor %}",
    GROW + "ns.v|e ~ '&&' %}{% set ns.v = ns.v|e %}{% set ns.v = ns.v ~ ns.v %}{% endfor %}",
    "{% set ns = namespace(v=3) %}{% for i in range(60) %}{% set ns.v = ns.v * ns.v %}{% endfor %}",
    "{% macro m(s, n) %}{{ s }}{{ s }}{% if n %}{{ m(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ m('a', 60) }}",
    GROW + "ns.v %}{% set ns.v %}{{ ns.v }}{{ ns.v }}{% endset %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% set s = 'é' * 1000000 %}"
    "{% for i in range(100000) %}{% set ns.l = [ns.l, s[1:]] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% set s = '世 ' * 500000 %}"
    "{% for i in range(100000) %}{% set ns.l = [ns.l, s.split()] %}{% endfor %}",
    "{% set s = '世界' * 500000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(100000) %}{% set ns.l = [ns.l, s|list] %}{% endfor %}",
]
MEASURED = """
import json, resource, sys, time
from microllm.errors import TextError
from microllm.io.chat_template import ChatTemplate
user = [{"role": "user", "content": "Hi"}]
ChatTemplate("{{ messages }}").render(user)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 10**6,) * 2)
for source in json.load(sys.stdin):
    start = time.process_time()
    try:
        ChatTemplate(source).render(user)
    except TextError as error:
        seconds = time.process_time() - start
        if "MemoryError" in str(error) or seconds > 1:
            print(source, seconds, error)
    else:
        print(source, "was rendered")
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and limits the address space")
def test_hostile_templates_stay_small_and_quick():
    run = subprocess.run(
        [sys.executable, "-c", MEASURED], input=json.dumps(HOSTILE), capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.returncode) == ("done\n", 0), run.stdout + run.stderr


def test_the_limit_is_named():
    with pytest.raises(TextError, match="makes more than 150994944 bytes of values"):
        ChatTemplate(GROW + "ns.v ~ ns.v %}{% endfor %}").render(USER)
    with pytest.raises(TextError, match="No filter named 'center'"):
        ChatTemplate("{{ 'a'|center(9) }}")
