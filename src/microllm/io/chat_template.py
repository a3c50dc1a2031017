"""Render a checkpoint's chat template, which is somebody else's program, in jinja2's sandbox.

Place: ``io/tokenizer.py`` finds the template text and the special tokens, and encodes what comes out.
Does not tokenize, and does not stop message content from spelling control tokens (``Tokenizer.encode_chat``).

A template may come from anywhere, so beyond the sandbox: a name that begins with an underscore is refused at
once instead of reading as empty, values are plain JSON data, time is checked at each turn of a loop and call of
a macro, and memory is bounded: only filters and methods that prompts need exist, nothing is computed at compile
time, and whatever makes a larger value is charged, before it is made, to one allowance for the whole rendering.

Sources: the jinja2 documentation (sandbox, extensions). Within these bounds output is byte-equal to transformers'
``apply_chat_template``; its ``raise_exception``, ``strftime_now``, generation blocks and loop controls are here.
"""

from __future__ import annotations

import functools
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
import markupsafe
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from microllm.errors import TextError

Messages = Sequence[Mapping[str, object]]
Tools = Sequence[Mapping[str, object]] | None
Values = Mapping[str, object] | None

MAX_RENDER_SECONDS = 10.0
MAX_RENDER_CHARS = 16 * 2**20
MAX_REPEATED_ITEMS = 10**6
MAX_RENDER_BYTES = 144 * 2**20  # all values that one rendering makes, at 4 bytes a character

_INSTEAD = "pass a raw prompt instead of messages"
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # the first one present is offered as all
_deadline: ContextVar[float] = ContextVar("chat_template_deadline")
_charged: ContextVar[int] = ContextVar("chat_template_charged", default=0)

# What a template may call. What is cheap makes nothing larger than a number or a reference.
_CHEAP = frozenset(
    "abs attr count d default endswith find first float get index int isalnum isalpha isdecimal isdigit islower "
    "isnumeric isspace istitle isupper items keys last length map reject rejectattr rfind rindex round safe select "
    "selectattr startswith values".split()
)
_COPYING = frozenset(
    "capitalize join lower lstrip partition removeprefix removesuffix replace rpartition rsplit rstrip split "
    "splitlines string strip title trim upper".split()
)
_LISTING = frozenset("dictsort list max min reverse sort unique".split())


class ChatTemplate:
    """One compiled chat template.

    Raises: ``TextError`` with the line when the text is not valid jinja2.
    """

    def __init__(self, source: str) -> None:
        environment = _Sandbox()
        try:
            tree = environment.parse(source)
            if switch := tree.find(jinja2.nodes.EvalContextModifier):
                raise jinja2.TemplateSyntaxError("autoescape is not for prompts", switch.lineno)
            for repeated in list(tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock))):
                repeated.body.insert(0, _check_turn_node(repeated))
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
        _charged.set(0)
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
    _charge_text(message)
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    _charge(1024 * len(form))  # the C library pads
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001  (the names and the order that templates use)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    """Write JSON as templates expect it: jinja2's own filter escapes HTML."""
    if len(str(separators)) > 32 or (len(indent) if isinstance(indent, str) else indent or 0) > 16:
        raise TextError(f"got a chat template that asks for wide JSON; need an indent of at most 16; {_INSTEAD}")
    _charge_text(value, 1)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _charge(size: int) -> None:
    """Take the size of a value that is about to be made from the rendering's allowance."""
    _charged.set(_charged.get() + size)
    if _charged.get() > MAX_RENDER_BYTES:
        raise TextError(f"got a chat template that makes more than {MAX_RENDER_BYTES} bytes of values; {_INSTEAD}")


def _charge_text(value: object, depth: int = 0) -> None:
    """Charge what ``str`` or JSON make of a value; inside a list, escapes lengthen a text."""
    _charge(64 + 64 * depth)
    if isinstance(value, str):
        _charge((24 if depth else 4) * len(value))
    elif isinstance(value, int):
        _charge(value.bit_length())
    elif isinstance(value, Mapping):
        _charge_text(value.items(), depth)
    elif isinstance(value, list | tuple | Set | ValuesView):
        for item in value:
            _charge_text(item, depth + 1)
    elif isinstance(value, jinja2.utils.Namespace):
        raise TextError(f"got a chat template that writes a whole namespace; {_INSTEAD}")


def _counted(values: Iterable[object]) -> Iterator[object]:
    return (value for value in values if _charge(128) is None)


def _charge_use(name: str, value: Any, rest: Sequence[Any]) -> None:  # noqa: ANN401
    """Charge a filter or a text's method before it runs; ``join`` comes with the separator as ``value``."""
    _charge(64)
    if name in _LISTING:
        _charge(128 * len(value))
    elif name == "join":
        _charge(4 * len(str(value)) * len(rest[0]))
        for item in rest[0]:
            _charge_text(item)
    elif name not in _CHEAP:
        for part in (value, *rest) * 3:  # another case may take three letters for one
            _charge_text(part)
        if "split" in name:
            _charge(128 * (value.count(rest[0]) if rest and isinstance(rest[0], str) else len(value)))
        if name == "replace":
            _charge(4 * str(value).count(str(rest[0])) * len(str(rest[1])))


def _charged_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def charged(*args: Any, **kwargs: object) -> object:  # noqa: ANN401
        place = 1 if "jinja_pass_arg" in vars(charged) else 0  # jinja2 puts a context first
        value, rest = args[place], args[place + 1 :]
        if (name in _LISTING or name == "join") and not isinstance(value, str | Mapping):
            value = list(_counted(value))
        _charge_use(name, *(((*rest, kwargs.get("d", ""))[0], [value]) if name == "join" else (value, rest)))
        return function(*args[:place], value, *rest, **kwargs)

    return charged


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _finalize(_: jinja2.runtime.Context, value: object) -> object:
    _charge(64) if isinstance(value, str) else _charge_text(value)
    return value


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Sends ``~`` and slices, which jinja2 writes as plain Python, through the sandbox."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat(")
        self.visit(jinja2.nodes.Tuple(node.nodes, "load"), frame)
        self.write(")")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.take(")
        for part in (node.node, node.arg.start, node.arg.stop, node.arg.step):
            self.visit(part or jinja2.nodes.Const(None), frame)
            self.write(", ")
        return self.write(")")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with underscore names refused aloud, and with bounded work."""

    intercepted_binops = frozenset({"+", "%", "*", "**"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        # Outputs are finalized with a context, and so, like all else, not computed at compile time.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.optimized, self.finalize = False, jinja2.pass_context(_finalize)
        self.filters = {n: _charged_filter(n, f) for n, f in self.filters.items() if n in _CHEAP | _COPYING | _LISTING}
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = self.globals["lipsum"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def wrap_str_format(self, value: object) -> None:
        """Leave ``format``, which pads, to the check of attributes."""

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        data = isinstance(obj, str | bytes | int | float | list | tuple | Mapping)
        known = not data or (attr in _CHEAP | _COPYING and not isinstance(obj, markupsafe.Markup))
        return known and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")

    @staticmethod
    def check_turn(size: int) -> None:
        """Run at each turn of a loop and each call of a macro: all that a template can do without end."""
        _charge(size)
        if time.monotonic() > _deadline.get():
            raise TextError(f"got a chat template that did not end in {MAX_RENDER_SECONDS:g} s; {_INSTEAD}")

    @staticmethod
    def concat(values: Sequence[object]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Compute ``~``, and join what a macro or a block wrote."""
        for value in values:
            _charge_text(value)
        return "".join(map(str, values))

    @staticmethod
    def take(value: Any, *bounds: int | None) -> object:  # noqa: ANN401
        """Compute a slice."""
        _charge(64 + 8 * len(range(len(value))[slice(*bounds)]))
        return value[slice(*bounds)]

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: object) -> object:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        owner = getattr(obj, "__self__", None)
        _charge(64 + 8 * len(args) + sum(128 * len(item) for item in args if isinstance(item, Mapping)))
        if isinstance(owner, str):
            args = ([*_counted(args[0])],) if obj.__name__ == "join" else args
            _charge_use(obj.__name__, owner, args)
        if not self.is_safe_callable(obj):
            raise SecurityError(f"{obj!r} is not safely callable")
        return context.call(obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            what = "computes a power" if operator == "**" else "pads what it formats"
            raise TextError(f"got a chat template that {what}, which no prompt needs; {_INSTEAD}")
        width = 20 if isinstance(left, markupsafe.Markup) or isinstance(right, markupsafe.Markup) else 8
        for item, count in ((left, right), (right, left)):
            if isinstance(item, int) and isinstance(count, int) and item.bit_length() > 10**5:
                raise TextError(f"got a chat template that computes with a number of over 10**5 bits; {_INSTEAD}")
            times = max(count, 0) if operator == "*" and isinstance(count, int) else 1
            if isinstance(item, Sequence) and operator == "*" and len(item) * times > MAX_REPEATED_ITEMS:
                raise TextError(
                    f"got a chat template that repeats {len(item)} items {count} times; "
                    f"need at most {MAX_REPEATED_ITEMS} in all; {_INSTEAD}"
                )
            _charge(64 + (width * len(item) * times if isinstance(item, Sequence) else 0))
        return super().call_binop(context, operator, left, right)


def _check_turn_node(repeated: jinja2.nodes.Node) -> jinja2.nodes.Node:
    makers = (jinja2.nodes.Output, jinja2.nodes.List, jinja2.nodes.Tuple, jinja2.nodes.Dict)
    size = jinja2.nodes.Const(64 + 64 * sum(1 for _ in repeated.find_all(makers)))
    check = jinja2.nodes.EnvironmentAttribute("check_turn")
    return jinja2.nodes.ExprStmt(jinja2.nodes.Call(check, [size], [], None, None), lineno=repeated.lineno)


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
