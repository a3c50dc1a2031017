"""Render a checkpoint's chat template, which is somebody else's program, in jinja2's sandbox.

Place: ``io/tokenizer.py`` finds the template text and the special tokens, and encodes what comes out.
Does not tokenize, and does not stop message content from spelling control tokens (``Tokenizer.encode_chat``).

A template may come from anywhere, so beyond the sandbox: a name that begins with an underscore is refused at
once instead of reading as empty, values are plain JSON data, and loops, macros, products and output are bounded.

Sources: the jinja2 documentation (sandbox, extensions). Output is byte-equal to ``apply_chat_template`` of
transformers, whose filters, ``raise_exception``, ``strftime_now``, generation blocks and loop controls it has.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from microllm.errors import TextError

Messages = Sequence[Mapping[str, object]]
Tools = Sequence[Mapping[str, object]] | None
Values = Mapping[str, object] | None

MAX_RENDER_SECONDS = 10.0
MAX_RENDER_CHARS = 16 * 2**20
MAX_REPEATED_ITEMS = 10**6

_INSTEAD = "pass a raw prompt instead of messages"
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # the first one present is offered as all
_deadline: ContextVar[float] = ContextVar("chat_template_deadline")


class ChatTemplate:
    """One compiled chat template.

    Raises: ``TextError`` with the line when the text is not valid jinja2.
    """

    def __init__(self, source: str) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            for repeated in list(tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock))):
                repeated.body.insert(0, _check_time_node(repeated.lineno))
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(
                f"got a chat template with a syntax error in line {error.lineno}: {error.message}; "
                f"need valid jinja2; correct the template, or {_INSTEAD}"
            ) from error
        except Exception as error:  # what the generated Python meets: a break outside a loop, too deep nesting
            raise TextError(f"got a chat template that does not compile: {error}; {_INSTEAD}") from error

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, tools: Tools = None, variables: Values = None
    ) -> str:
        """Return the prompt text for a conversation.

        ``variables`` are the other names a template reads: special tokens, ``enable_thinking``, ``documents``.

        Raises: ``TextError`` for messages of another form, for what the template itself refuses, and for a
        template that fails, reaches for Python's internals, or does not end.
        """
        values: dict[str, object] = {"documents": None}
        values |= {name: plain_data(value, name) for name, value in (variables or {}).items()}
        values["messages"] = check_messages(messages)
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise TextError("got tools that are not all dicts; need a list of JSON schemas; write them out")
        values["tools"] = plain_data(tools, "tools")
        values["add_generation_prompt"] = add_generation_prompt
        token = _deadline.set(time.monotonic() + MAX_RENDER_SECONDS)
        try:
            return _join_bounded(self._template.generate(values))
        except TextError:
            raise
        except SecurityError as error:
            raise TextError(
                f"got a chat template that reaches outside its sandbox{_line_of(error)}: {error}; "
                f"do not use this template; {_INSTEAD}"
            ) from error
        except _Refused as error:
            raise TextError(f"the chat template refused these messages: {error}; change the messages") from error
        except Exception as error:  # somebody else's program may raise anything at all
            raise TextError(
                f"the chat template failed{_line_of(error)}: {type(error).__name__}: {error}; "
                f"give messages of the form that this template expects, or {_INSTEAD}"
            ) from error
        finally:
            _deadline.reset(token)


def check_messages(messages: Messages) -> list[dict[str, object]]:
    """Return the messages as plain data; a key whose value is None is dropped.

    Raises: ``TextError`` naming the message and what it holds.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise _message_error(f"messages of type {type(messages).__name__}")
    if not messages:
        raise _message_error("no messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise _message_error(f"{where} of type {type(message).__name__}")
    plain = {str(key): plain_data(value, f"{where}.{key}") for key, value in message.items() if value is not None}
    role, content = plain.get("role"), plain.get("content")
    if not isinstance(role, str) or not role:
        raise _message_error(f"{where} with role {role!r}")
    if content is None and not plain.get("tool_calls"):
        raise _message_error(f"{where} ({role}) without content")
    if content is not None and not isinstance(content, str | list):
        raise _message_error(f"{where} ({role}) with content of type {type(content).__name__}")
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _message_error(got: str) -> TextError:
    return TextError(f'got {got}; need a list such as [{{"role": "user", "content": "Hello"}}]')


def plain_data(value: object, where: str, depth: int = 0) -> object:
    """Rebuild a value from JSON types only: an object's methods would be the template's to call.

    Raises: ``TextError`` naming the place of what is not JSON data.
    """
    if depth > 100:
        raise TextError(f"got {where} nested more than 100 deep; pass flatter data")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise TextError(f"got {where} of type {type(value).__name__}; need JSON data: text, numbers, lists, dicts")


class _Refused(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001  (the names and the order that templates use)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    """Write JSON as templates expect it: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with underscore names refused aloud, and with bounded work."""

    intercepted_binops = frozenset({"*", "**"})

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")

    @staticmethod
    def check_time() -> None:
        """Run at each turn of a loop and each call of a macro: all that a template can do without end."""
        if time.monotonic() > _deadline.get():
            raise TextError(f"got a chat template that did not end in {MAX_RENDER_SECONDS:g} s; {_INSTEAD}")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator == "**":
            raise TextError(f"got a chat template that computes a power, which no prompt needs; {_INSTEAD}")
        for item, count in ((left, right), (right, left)):
            if isinstance(item, Sequence) and isinstance(count, int) and len(item) * count > MAX_REPEATED_ITEMS:
                raise TextError(
                    f"got a chat template that repeats {len(item)} items {count} times; "
                    f"need at most {MAX_REPEATED_ITEMS} in all; {_INSTEAD}"
                )
        return super().call_binop(context, operator, left, right)


def _check_time_node(line: int) -> jinja2.nodes.Node:
    check = jinja2.nodes.EnvironmentAttribute("check_time")
    return jinja2.nodes.ExprStmt(jinja2.nodes.Call(check, [], [], None, None), lineno=line)


def _join_bounded(pieces: Iterable[str]) -> str:
    parts, size = [], 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > MAX_RENDER_CHARS:
            raise TextError(f"got a chat template that writes more than {MAX_RENDER_CHARS} characters; {_INSTEAD}")
    return "".join(parts)


def _line_of(error: BaseException) -> str:
    """Say which line of the template an exception came from, where the traceback knows it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""
